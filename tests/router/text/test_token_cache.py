"""The cache of segments' token ids, and the division of texts into segments."""

from collections import OrderedDict
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from homing.router.text.token_cache import ENTRY_BYTES, Segmenter, TokenCache


def test_tenants_do_not_share_entries():
    """Otherwise a prompt's encoding time would reveal what another tenant had sent."""
    cache = TokenCache(10_000)
    cache.put((b"one", "text"), b"\x01\0\0\0")

    assert cache.get((b"one", "text")) == b"\x01\0\0\0"
    assert cache.get((b"two", "text")) is None


class TokenCacheMachine(RuleBasedStateMachine):
    """Compares the cache with an ordered dict that is trimmed to the capacity."""

    def __init__(self):
        super().__init__()
        self.cache = TokenCache(4 * ENTRY_BYTES)
        self.oracle: OrderedDict[tuple[bytes, str], bytes] = OrderedDict()

    @rule(text=st.text(max_size=4), count=st.integers(0, 100))
    def put(self, text, count):
        key, ids = (b"t", text), bytes(4 * count)
        self.cache.put(key, ids)
        self.oracle.setdefault(key, ids)
        while self.used() > 4 * ENTRY_BYTES:
            self.oracle.popitem(last=False)

    @rule(text=st.text(max_size=4))
    def get(self, text):
        key = (b"t", text)
        assert self.cache.get(key) == self.oracle.get(key)
        if key in self.oracle:
            self.oracle.move_to_end(key)

    def used(self) -> int:
        widths = {key: 1 if key[1].isascii() else 4 for key in self.oracle}
        return sum(ENTRY_BYTES + 1 + widths[key] * len(key[1]) + len(ids) for key, ids in self.oracle.items())

    @invariant()
    def agrees(self):
        assert len(self.cache) == len(self.oracle)
        assert self.cache.used_bytes == self.used() <= 4 * ENTRY_BYTES


TestTokenCache = TokenCacheMachine.TestCase
TestTokenCache.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_segment_larger_than_the_cache_is_not_kept():
    """Keeping it would evict everything else."""
    cache = TokenCache(1000)
    cache.put((b"", "a"), b"")

    cache.put((b"", "b" * 2000), b"")

    assert len(cache) == 1


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
    """A boundary that changes one id would make every later turn miss the replicas' caches."""
    made = TOKENIZERS[name]
    segmenter = Segmenter(made.to_str())

    @settings(max_examples=300, deadline=None)
    @given(text=texts)
    def check(text):
        parts = [made.encode(segment, add_special_tokens=False).ids for segment in segmenter.segments(text)]

        assert "".join(segmenter.segments(text)) == text
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
    """For such a tokenizer, texts are encoded whole."""
    segmenter = Segmenter(TOKENIZERS[name].to_str())

    assert segmenter.safe == safe
    assert len(segmenter.segments("a<|im|>b")) == (2 if safe else 1)


def test_a_turn_is_cut_where_it_begins():
    """The segments before a new turn then equal those of the previous request."""
    segmenter = Segmenter(TOKENIZERS["byte level"].to_str())

    assert segmenter.segments("<|im|>b\n<|im|> b <m> b") == ["<|im|>b\n", "<|im|> b <m> b"]
