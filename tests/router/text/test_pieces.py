"""Properties of the table of pieces."""

from homing.router.text.pieces import byte_alphabet, byte_level_piece, other_piece
from homing.router.text.tokenizer import TextModel


def test_the_alphabet_names_every_byte_once():
    """Otherwise some bytes could never be written."""
    assert sorted(byte_alphabet().values()) == list(range(256))


def test_sentencepiece_marks_become_bytes():
    """Names of logprobs must read as text."""
    assert other_piece("\u2581fox") == b" fox"
    assert other_piece("<0xE2>") == b"\xe2"


def test_an_added_token_stands_for_itself():
    """It is no spelling of bytes."""
    assert byte_level_piece("<tool> x", byte_alphabet()) == b"<tool> x"


def test_pieces_of_a_text_join_to_it(text_model: TextModel):
    """The table is what streaming rests on."""
    text = "A fox, ünïcödé 🦊 and 12 apples."
    ids = list(text_model.encode_now([text], special_tokens=False)[0])

    assert b"".join(map(text_model.piece, ids)).decode() == text
