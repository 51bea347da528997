"""Properties of incremental decoding and of the token piece table."""

from collections.abc import Callable
from itertools import islice

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from homing.router.text.detokenizer import (
    REPLACEMENT,
    ByteDetokenizer,
    Detokenizer,
    WindowDetokenizer,
    byte_alphabet,
    piece_table,
)
from homing.router.text.tokenizer import TextModel

FIXTURE = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def deltas(detokenizer: Detokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    """The deltas when `ids` are pushed in groups of these `sizes`."""
    rest = iter(ids)
    groups = [list(islice(rest, size)) for size in sizes] + [list(rest)]
    return [*(detokenizer.push(group) for group in groups), detokenizer.flush()]


def sentencepiece_like() -> Tokenizer:
    """A tokenizer with byte fallback and space marks, decoded as in Llama 2."""
    words = ["\u2581", "\u2581the", "fox", "\u2581é", "🦊", "s"]
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {word: 256 + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("<s>")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def byte_level() -> Tokenizer:
    """A tokenizer with one token per byte, plus added tokens inside and outside the byte alphabet."""
    vocabulary = byte_alphabet()
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_tokens(["é", "<tool> x", "日"])
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


sizes = st.lists(st.integers(0, 4), max_size=30)
BYTES, SENTENCE = byte_level(), sentencepiece_like()
END, START = BYTES.token_to_id("<|end|>"), SENTENCE.token_to_id("<s>")


def window(decode: Callable[[list[int]], str] = SENTENCE.decode) -> WindowDetokenizer:
    """A detokenizer for `SENTENCE` that shows no special tokens."""
    return WindowDetokenizer(decode, {each: piece for each, piece in enumerate(piece_table(SENTENCE)) if each != START})


@FIXTURE
@given(ids=st.lists(st.integers(0, 260), max_size=40), sizes=sizes)
def test_byte_level_deltas_join_to_the_whole_decode(ids, sizes):
    """This includes invalid UTF-8, which sampling at high temperature does yield."""
    detokenizer = ByteDetokenizer({each: piece for each, piece in enumerate(piece_table(BYTES)) if each != END})

    assert "".join(deltas(detokenizer, ids, sizes)) == BYTES.decode(ids, skip_special_tokens=True)


def encode_fallback(text: str) -> list[int]:
    """Ids of the sentencepiece-like vocabulary for any text; a line feed becomes a special token."""
    ids: list[int] = []
    for character in text.replace(" ", "\u2581"):
        known = START if character == "\n" else SENTENCE.token_to_id(character)
        ids += [known] if known is not None else character.encode()
    return ids


@FIXTURE
@example(text=" 𐀀", sizes=[])  # a space without visible text, then a character of four bytes
@given(text=st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from(" 🦊sé\n")), max_size=30), sizes=sizes)
def test_window_deltas_join_to_the_whole_decode(text, sizes):
    """Holds for any valid Unicode text and any token boundaries, including texts with U+FFFD of their own."""
    ids = encode_fallback(text)

    assert "".join(deltas(window(), ids, sizes)) == SENTENCE.decode(ids, skip_special_tokens=True)


@FIXTURE
@given(text=st.text(max_size=30).filter(lambda text: REPLACEMENT not in text))
def test_no_delta_ends_inside_a_character(text_model: TextModel, text):
    """A client cannot repair a character that was split between two deltas."""
    ids = list(text_model.encode_now([text], special_tokens=False)[0])

    parts = deltas(text_model.detokenizer(), ids, [1] * len(ids))

    assert not any(REPLACEMENT in part for part in parts)
    assert "".join(parts) == text_model.decode(ids, skip_special_tokens=True)


def test_a_window_gives_up_on_bytes_that_stay_broken():
    """Held tokens must not pile up when a model writes garbage."""
    assert len(window().push([0xFF] * 40)) >= 36


@pytest.mark.parametrize("hidden", [START, 10**6])
def test_tokens_without_text_do_not_slow_down_a_window(hidden):
    """A client can force any token; if hidden ones were decoded again with each new one, it could block the router."""
    lengths: list[int] = []

    def decode(ids: list[int]) -> str:
        lengths.append(len(ids))
        return SENTENCE.decode(ids)

    detokenizer = window(decode)
    assert detokenizer.push([257, *[hidden] * 100, 258]) == "thefox"
    assert max(lengths) == 2


def test_the_alphabet_names_every_byte_once():
    """Otherwise some bytes could not be represented."""
    assert sorted(byte_alphabet().values()) == list(range(256))


def test_sentencepiece_marks_become_bytes():
    """Token texts in logprobs must be readable."""
    pieces = piece_table(SENTENCE)

    assert pieces[SENTENCE.token_to_id("\u2581the")] == b" the"
    assert pieces[SENTENCE.token_to_id("<0xE2>")] == b"\xe2"


def test_an_added_token_stands_for_itself():
    """Its text must not be read as a spelling of bytes."""
    assert piece_table(BYTES)[BYTES.token_to_id("<tool> x")] == b"<tool> x"


def test_pieces_of_a_text_join_to_it(text_model: TextModel):
    """Streaming relies on the piece table."""
    text = "A fox, ünïcödé 🦊 and 12 apples."
    ids = list(text_model.encode_now([text], special_tokens=False)[0])

    assert b"".join(map(text_model.piece, ids)).decode() == text
