"""The lower bound on a text's number of tokens is never too high."""

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homing.router.text.export import layout_of
from homing.router.text.token_bound import NFC_CHARACTERS_PER_BYTE, characters_per_token, fewest_tokens

from .test_encoder import TOKENIZERS, made, texts

BOUNDED = {"demo", "byte level", "byte level with NFC", "an unusual pattern", "gpt2", "gemma", "llama 2", "metaspace"}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_text_has_fewer_tokens(name):
    """A bound that is too high would refuse prompts that fit."""
    tokenizer = made(name)
    characters = characters_per_token(layout_of(tokenizer.to_str()))
    longest = sorted(tokenizer.get_vocab(), key=len)[-5:]
    long_words = st.sampled_from([word.replace("Ġ", " ").replace("▁", " ") for word in longest])

    @settings(max_examples=100, deadline=None)
    @given(text=st.one_of(texts, st.lists(long_words, min_size=1, max_size=5).map("".join)))
    def check(text):
        assert fewest_tokens(text, characters) <= len(tokenizer.encode(text, add_special_tokens=False).ids)

    check()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_common_tokenizers_have_a_bound(name):
    """Other tokenizers may drop spaces or map any number of characters to one unknown token."""
    assert (characters_per_token(layout_of(made(name).to_str())) is not None) == (name in BOUNDED)


def test_composition_leaves_a_byte_of_two_characters():
    """`NFC_CHARACTERS_PER_BYTE` is a property of Unicode, checked here for every composed character."""
    for point in range(0x110000):
        if not 0xD800 <= point < 0xE000:
            decomposed = unicodedata.normalize("NFD", chr(point))
            assert len(decomposed) <= NFC_CHARACTERS_PER_BYTE * len(chr(point).encode())
