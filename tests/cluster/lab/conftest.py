"""Lets commands that read the demo model's tokenizer read it once."""

import functools
from collections.abc import Iterator

import pytest

from homing.router.text import tokenizer


@pytest.fixture(scope="session", autouse=True)
def _shared_tokenizer() -> Iterator[None]:
    """Each command would start a process of transformers (a second of CPU). Failures are not kept."""
    patch = pytest.MonkeyPatch()
    patch.setattr(tokenizer, "load_parts", functools.cache(tokenizer.load_parts))
    yield
    patch.undo()
