"""Cutting a text: the parts' ids put together are those of the whole, whatever the tokenizer."""

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from homing.router.text.segments import Cutter

WORDS = ["a", "b", "<", ">", "|", "▁", "Ġ", "ab", "▁a", "Ġa", "i", "m", "_"]
SPECIAL = [AddedToken("<|im|>", special=True), AddedToken("<|im|>a", special=True)]
SWALLOWS = AddedToken("<m>", special=True, lstrip=True, rstrip=True)
texts = st.lists(
    st.sampled_from(["<|im|>", "<m>", "<|", "a", "b", " ", "  ", "ab", "<|im|>a", "é", "\n"]), max_size=12
).map("".join)


def tokenizer(pre: object, *tokens: AddedToken, normalizer: object = None) -> Tokenizer:
    made = Tokenizer(models.BPE({word: place for place, word in enumerate(WORDS)}, [("a", "b")], unk_token="_"))
    made.pre_tokenizer = pre
    if normalizer is not None:
        made.normalizer = normalizer
    made.add_special_tokens([*SPECIAL, *tokens])
    return made


TOKENIZERS = {
    "byte level": tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=True), SWALLOWS),
    "metaspace": tokenizer(pre_tokenizers.Metaspace(prepend_scheme="always"), SWALLOWS),
    "metaspace at the beginning": tokenizer(pre_tokenizers.Metaspace(prepend_scheme="first")),
    "prepending normalizer": tokenizer(pre_tokenizers.Whitespace(), normalizer=normalizers.Prepend("▁")),
    "a token that is a word": tokenizer(pre_tokenizers.Whitespace(), AddedToken("ab", single_word=True, special=True)),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_segments_have_the_ids_of_the_whole(name):
    """A cut that changes one id would make every later turn miss the replicas' caches."""
    made = TOKENIZERS[name]
    cutter = Cutter(made.to_str())

    @settings(max_examples=300, deadline=None)
    @given(text=texts)
    def check(text):
        parts = [made.encode(segment, add_special_tokens=False).ids for segment in cutter.cut(text)]

        assert "".join(cutter.cut(text)) == text
        assert [*chain.from_iterable(parts)] == made.encode(text, add_special_tokens=False).ids

    check()


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("byte level", True),
        ("metaspace", True),
        ("prepending normalizer", True),
        ("metaspace at the beginning", False),
        ("a token that is a word", False),
    ],
)
def test_a_tokenizer_that_looks_further_is_not_cut(name, safe):
    """It falls back to whole texts."""
    cutter = Cutter(TOKENIZERS[name].to_str())

    assert cutter.safe == safe
    assert len(cutter.cut("a<|im|>b")) == (2 if safe else 1)


def test_a_turn_is_cut_where_it_begins():
    """So that all before it is what came before."""
    cutter = Cutter(TOKENIZERS["byte level"].to_str())

    assert cutter.cut("<|im|>b\n<|im|> b <m> b") == ["<|im|>b\n", "<|im|> b <m> b"]
