"""Text models for the tests: the demo model, loaded once, and one that fastokens does not support."""

import threading
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer, normalizers

import homing
from homing.router.text.encoder import ExactEncoder, TokenIds
from homing.router.text.export import TokenizerParts, load_parts
from homing.router.text.tokenizer import TextModel

DEMO = Path(homing.__file__).parent / "replica" / "demo" / "model"


@pytest.fixture(scope="session")
def text_model() -> Iterator[TextModel]:
    """The demo model: a byte-level tokenizer with a chat template."""
    model = TextModel.load(DEMO, cache_bytes=1_000_000)
    yield model
    model.close()


@cache
def demo_parts() -> TokenizerParts:
    return load_parts(DEMO)


def slow_parts() -> TokenizerParts:
    """The demo model's parts, with a normalizer that leaves ASCII unchanged and that fastokens does not support."""
    parts = demo_parts()
    encoder = Tokenizer.from_str(parts.tokenizer)
    encoder.normalizer = normalizers.NFKC()
    return msgspec.structs.replace(parts, tokenizer=encoder.to_str())


class RecordingEncoder(ExactEncoder):
    """Records the texts it is given, and blocks on texts that contain `HOLD` until `go_on` is set."""

    HOLD = "hold"

    def __init__(self, backend: object) -> None:
        super().__init__(backend)
        self.texts: list[str] = []
        self.holding, self.go_on = threading.Event(), threading.Event()

    def encode(self, texts: Sequence[str], *, special_tokens: bool, most: int | None = None) -> list[TokenIds]:
        self.texts += texts
        if any(self.HOLD in text for text in texts):
            self.holding.set()
            assert self.go_on.wait(60)
        return super().encode(texts, special_tokens=special_tokens, most=most)


def recording_model(*, cache_bytes: int = 0) -> tuple[TextModel, RecordingEncoder]:
    """A model without fastokens, and its encoder, which records the texts it encodes."""
    parts = demo_parts()
    encoder = RecordingEncoder(Tokenizer.from_str(parts.tokenizer))
    return TextModel(parts, cache_bytes=cache_bytes, choose=lambda *_: (encoder, "a test")), encoder


@pytest.fixture(scope="session")
def slow_model() -> Iterator[TextModel]:
    model = TextModel(slow_parts(), cache_bytes=1_000_000)
    yield model
    model.close()


@pytest.fixture(params=["text_model", "slow_model"])
def any_model(request: pytest.FixtureRequest) -> TextModel:
    found: TextModel = request.getfixturevalue(request.param)
    return found
