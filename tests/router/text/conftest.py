"""The demo model's text side, loaded once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import homing
from homing.router.text.tokenizer import TextModel

DEMO = Path(homing.__file__).parent / "replica" / "demo" / "model"


@pytest.fixture(scope="session")
def text_model() -> Iterator[TextModel]:
    """A byte-level tokenizer with a chat template."""
    model = TextModel.load(DEMO, cache_bytes=1_000_000)
    yield model
    model.close()
