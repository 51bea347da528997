"""Cache of prompts' block hashes: a prefix that an earlier prompt had is not hashed block by block again.

A prompt is cut into spans of blocks. The digest of a span and everything before it is the key under which the hashes of
the span's blocks are cached. The next turn of a conversation then costs one digest per span, a twelfth of hashing its
blocks. Pure state, bounded in bytes; the least recently used span is evicted first. Tenants have different roots and so
share no spans: the time a prompt takes reveals nothing about other tenants' prompts.
"""

from collections import OrderedDict

from ...kvcache.hashing import HASH_BYTES, TOKEN_BYTES, BlockHash, BlockHasher, adapter_root, join_hashes

#: Long enough to save most of the work, short enough that a prompt of a few hundred tokens fills one.
SPAN_BLOCKS = 32
#: Overhead of a cached span besides its hashes: two objects and a dict entry.
ENTRY_BYTES = 200
#: Room for the spans of 4 million tokens at 16 tokens per block.
CAPACITY_BYTES = 6 * 2**20
#: Maximum number of cached tenant roots; when it is reached, all are dropped at once.
MAX_ROOTS = 4096


class BlockHashCache:
    """Cached block hashes for one hasher and one model root."""

    def __init__(self, hasher: BlockHasher, model_root: BlockHash, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self._hasher = hasher
        self._model_root = model_root
        self._roots: dict[tuple[bytes, str], BlockHash] = {}  #: by salt and adapter
        self._span_bytes = SPAN_BLOCKS * hasher.block_size * TOKEN_BYTES
        self._capacity = capacity_bytes // (SPAN_BLOCKS * HASH_BYTES + ENTRY_BYTES)  #: in spans
        self._spans: OrderedDict[bytes, bytes] = OrderedDict()

    def root(self, salt: bytes, adapter: str = "") -> BlockHash:
        """Root of the block hashes under this salt and adapter. Deriving one costs as much as hashing ten blocks."""
        root = self._roots.get((salt, adapter))
        if root is None:
            if len(self._roots) >= MAX_ROOTS:
                self._roots.clear()
            root = self._roots[salt, adapter] = adapter_root(self._model_root, salt, adapter)
        return root

    def hashes(self, root: BlockHash, tokens: bytes) -> bytes:
        """Hashes of the full blocks of `tokens` (uint32 LE) under `root`, concatenated."""
        if len(tokens) < self._span_bytes:
            return join_hashes(self._hasher.chain(root, tokens))
        size, whole = self._span_bytes, len(tokens) // self._span_bytes * self._span_bytes
        parts: list[bytes] = []
        name, parent = bytes(root), root
        for start in range(0, whole, size):
            content = tokens[start : start + size]
            name = self._hasher.digest(name + content)
            hashes = self._spans.get(name)
            if hashes is None:
                hashes = self._spans[name] = join_hashes(self._hasher.chain(parent, content))
            self._spans.move_to_end(name)
            parts.append(hashes)
            parent = BlockHash(hashes[-HASH_BYTES:])
        while len(self._spans) > self._capacity:
            self._spans.popitem(last=False)
        parts.append(join_hashes(self._hasher.chain(parent, tokens[whole:])))
        return b"".join(parts)

    def __len__(self) -> int:
        return len(self._spans)

    def check(self) -> None:
        assert len(self._spans) <= self._capacity, f"{len(self._spans)} spans are kept, of at most {self._capacity}"
        odd = {len(hashes) for hashes in self._spans.values()} - {SPAN_BLOCKS * HASH_BYTES}
        assert not odd, f"spans of {odd} bytes of hashes"
