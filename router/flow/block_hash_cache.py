"""Block hashes of prompts that begin as earlier ones did, without hashing their blocks again.

A prompt is cut into spans of blocks. One digest names a span together with all before it, and under that name the
hashes of its blocks are kept: the next turn of a conversation then costs one digest a span, a twelfth of hashing its
blocks. Pure state, bounded in bytes, least recently used goes first. Tenants have different roots, and so no span in
common: how long a prompt takes tells nobody what another has sent.
"""

from collections import OrderedDict

from ...kvcache.hashing import HASH_BYTES, TOKEN_BYTES, BlockHash, BlockHasher, join_hashes

#: Long enough to save most of the work, short enough that a prompt of some hundred tokens has one.
SPAN_BLOCKS = 32
#: Of a span beside its hashes: two objects and a place in the dict.
ENTRY_BYTES = 200
#: Spans of 4 million tokens at 16 tokens a block.
CAPACITY_BYTES = 6 * 2**20


class ChainBook:
    """Chains of one hasher's blocks, as far as they came before."""

    def __init__(self, hasher: BlockHasher, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self._hasher = hasher
        self._span_bytes = SPAN_BLOCKS * hasher.block_size * TOKEN_BYTES
        self._room = capacity_bytes // (SPAN_BLOCKS * HASH_BYTES + ENTRY_BYTES)
        self._spans: OrderedDict[bytes, bytes] = OrderedDict()

    def hashes(self, root: BlockHash, tokens: bytes) -> bytes:
        """Hashes of the full blocks of `tokens` (uint32 LE) under `root`, as one bytes field."""
        size, whole = self._span_bytes, len(tokens) // self._span_bytes * self._span_bytes
        parts: list[bytes] = []
        name, parent = bytes(root), root
        for start in range(0, whole, size):
            content = tokens[start : start + size]
            name = self._hasher.digest(name + content)
            parts.append(self._spans.get(name) or self._learn(name, parent, content))
            self._spans.move_to_end(name)
            parent = BlockHash(parts[-1][-HASH_BYTES:])
        self._forget()
        parts.append(join_hashes(self._hasher.chain(parent, tokens[whole:])))
        return b"".join(parts)

    def __len__(self) -> int:
        """Spans that are kept."""
        return len(self._spans)

    def check(self) -> None:
        """Assert every invariant."""
        assert len(self._spans) <= self._room, f"{len(self._spans)} spans are kept, {self._room} have room"
        odd = {len(hashes) for hashes in self._spans.values()} - {SPAN_BLOCKS * HASH_BYTES}
        assert not odd, f"spans of {odd} bytes of hashes"

    def _learn(self, name: bytes, parent: BlockHash, content: bytes) -> bytes:
        hashes = self._spans[name] = join_hashes(self._hasher.chain(parent, content))
        return hashes

    def _forget(self) -> None:
        while len(self._spans) > self._room:
            self._spans.popitem(last=False)
