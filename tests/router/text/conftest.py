"""The demo model's text side, loaded once, and one that fastokens does not cover."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer, normalizers

import homing
from homing.router.text.export import TokenizerParts, load_parts
from homing.router.text.tokenizer import TextModel

DEMO = Path(homing.__file__).parent / "replica" / "demo" / "model"


@pytest.fixture(scope="session")
def text_model() -> Iterator[TextModel]:
    """A byte-level tokenizer with a chat template."""
    model = TextModel.load(DEMO, cache_bytes=1_000_000)
    yield model
    model.close()


def slow_parts() -> TokenizerParts:
    """The demo model's, with a normalizer that changes nothing of ASCII."""
    parts = load_parts(DEMO)
    tokenizer = Tokenizer.from_str(parts.tokenizer)
    tokenizer.normalizer = normalizers.NFKC()
    return msgspec.structs.replace(parts, tokenizer=tokenizer.to_str())


@pytest.fixture(scope="session")
def slow_model() -> Iterator[TextModel]:
    model = TextModel(slow_parts(), cache_bytes=1_000_000)
    yield model
    model.close()


@pytest.fixture(params=["text_model", "slow_model"])
def any_model(request: pytest.FixtureRequest) -> TextModel:
    found: TextModel = request.getfixturevalue(request.param)
    return found
