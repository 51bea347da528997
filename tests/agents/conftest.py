"""One router for all tests of this folder; each test defines what the model answers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .scripted import Engine, scripted


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Started only once, because starting takes longer than most tests."""
    with scripted(tmp_path_factory.mktemp("scripted")) as engine:
        yield engine


@pytest.fixture
def engine(served: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """The server that clients connect to, in an environment that names no other server."""
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    yield served
    served.check()
