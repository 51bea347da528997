"""Ids of text segments that came before, so that a conversation's next turn tokenizes its own words only.

Pure state, bounded in bytes, least recently used goes first. Entries are kept apart by tenant: otherwise how long a
prompt takes would tell one tenant what another has sent.
"""

from collections import OrderedDict

#: Of an entry beside its text and ids: two objects, a key, a place in the dict.
ENTRY_BYTES = 400

Key = tuple[bytes, str]


class TokenCache:
    """Segment to ids (uint32 LE). `capacity_bytes` 0 keeps nothing."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._entries: OrderedDict[Key, bytes] = OrderedDict()
        self.used_bytes = 0
        self.hit_tokens = 0
        self.miss_tokens = 0

    def get(self, key: Key) -> bytes | None:
        """The ids of a segment of a tenant; None when they are not known."""
        ids = self._entries.get(key)
        if ids is not None:
            self._entries.move_to_end(key)
            self.hit_tokens += len(ids) // 4
        return ids

    def put(self, key: Key, ids: bytes) -> None:
        """Remember a segment that was just tokenized."""
        self.miss_tokens += len(ids) // 4
        cost = _cost(key, ids)
        if cost > self._capacity or key in self._entries:
            return
        self._entries[key] = ids
        self.used_bytes += cost
        while self.used_bytes > self._capacity:
            self.used_bytes -= _cost(*self._entries.popitem(last=False))

    def __len__(self) -> int:
        return len(self._entries)

    def check(self) -> None:
        """Assert every invariant."""
        used = sum(_cost(key, ids) for key, ids in self._entries.items())
        assert used == self.used_bytes, f"{self.used_bytes} bytes noted, {used} used"
        assert used <= self._capacity, f"{used} bytes used of {self._capacity}"


def _cost(key: Key, ids: bytes) -> int:
    tenant, text = key
    width = 1 if text.isascii() else 4  # at most: CPython takes 1, 2 or 4 bytes a character
    return ENTRY_BYTES + len(tenant) + width * len(text) + len(ids)
