"""The cache of segment ids: bounded, least recently used first, apart by tenant."""

from collections import OrderedDict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from homing.router.text.token_cache import ENTRY_BYTES, TokenCache


def test_tenants_do_not_share_entries():
    """Else the time that a prompt takes would tell what another tenant sent."""
    cache = TokenCache(10_000)
    cache.put((b"one", "text"), b"\x01\0\0\0")

    assert cache.get((b"one", "text")) == b"\x01\0\0\0"
    assert cache.get((b"two", "text")) is None
    assert (cache.hit_tokens, cache.miss_tokens) == (1, 1)


class TokenCacheMachine(RuleBasedStateMachine):
    """Against an ordered dict that is cut to size."""

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
        self.cache.check()
        assert len(self.cache) == len(self.oracle)
        assert self.cache.used_bytes == self.used()


TestTokenCache = TokenCacheMachine.TestCase
TestTokenCache.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_segment_larger_than_the_cache_is_not_kept():
    """It would throw everything else out."""
    cache = TokenCache(1000)
    cache.put((b"", "a"), b"")

    cache.put((b"", "b" * 2000), b"")

    assert len(cache) == 1
