"""Block hashes: identifiers of prefixes, computed identically by router and replica.

Pure functions over bytes that do not depend on pools, models or sockets.

    root    = sha256(canonical encoding of everything other than tokens that KV depends on)[:16]
    h_{-1}  = root
    h_i     = XXH3_128(h_{i-1} ‖ tokens_i as uint32 little-endian ‖ extra_i, seed = cluster_seed)

Only full blocks have a hash. XXH3 (xxhash.com, canonical big-endian digest) is fast but not collision-resistant, so
hits are verified against the tokens (`PrefixCache.match`); `sha256` is a slower alternative in the same class.
"""

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b, sha256
from struct import Struct
from typing import Literal, NewType, cast

import msgspec
import xxhash

#: 16 bytes. Equal hashes under one root mean equal prefixes, except for collisions, which verifying a hit detects.
BlockHash = NewType("BlockHash", bytes)

HASH_BYTES = 16
TOKEN_BYTES = 4
FORMAT_VERSION = 1

HashAlgorithm = Literal["xxh3_128", "sha256"]

#: Created once: a slice literal in the loop would create one slice per block, 3 % of the loop's time.
_HEAD = slice(HASH_BYTES)


class CacheIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a deployment that change the KV of the same tokens."""

    model_fingerprint: bytes  #: digest of the model's configuration and weights index
    kv_dtype: str
    block_size: int
    hash_algorithm: HashAlgorithm


def canonical(*fields: bytes) -> bytes:
    """Join fields unambiguously: each is prefixed by its length, so different lists give different bytes."""
    return b"".join(len(field).to_bytes(8, "little") + field for field in fields)


def model_root(identity: CacheIdentity) -> BlockHash:
    """Return the digest of a deployment, from which the roots of all its tenants derive."""
    encoded = canonical(
        b"homing-root",
        FORMAT_VERSION.to_bytes(4, "little"),
        identity.model_fingerprint,
        identity.kv_dtype.encode(),
        identity.block_size.to_bytes(4, "little"),
        identity.hash_algorithm.encode(),
    )
    return BlockHash(sha256(encoded).digest()[:HASH_BYTES])


def tenant_root(model: BlockHash, *, salt: bytes = b"", lora_digest: bytes = b"") -> BlockHash:
    """Return the root of a tenant's chains. `salt` separates tenants; `lora_digest` identifies an adapter's content."""
    return BlockHash(sha256(canonical(b"homing-tenant", model, salt, lora_digest)).digest()[:HASH_BYTES])


def adapter_root(model: BlockHash, salt: bytes, adapter: str) -> BlockHash:
    """Return the root of a tenant's chains under an adapter of this name; empty: the model itself."""
    return tenant_root(model, salt=salt, lora_digest=sha256(adapter.encode()).digest() if adapter else b"")


def salt_text(salt: bytes) -> str:
    """A salt as text, as replicas and the event stream have it."""
    return salt.decode("utf-8", "backslashreplace")


def content_digest(before: bytes, tokens: bytes) -> bytes:
    """16 bytes that name a block and all blocks before it by content, where a block hash may be made to collide.

    `before` is the digest of the block before it, or the root; `tokens` are the block's ids (uint32 LE).
    """
    return blake2b(before + tokens, digest_size=16).digest()


def token_bytes(token_ids: Iterable[int]) -> bytes:
    """Encode token ids as uint32 little-endian, the form in which they are hashed, sent and stored.

    Raises OverflowError for an id outside 0 .. 2**32 - 1.
    """
    ids = array("I", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def token_array(data: bytes | memoryview) -> "array[int]":
    """Decode token ids into a growable array. Raises ValueError when `data` is not a whole number of ids."""
    ids = array("I")
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


class BlockHasher:
    """Hashes chains of blocks with one cluster's seed and block size."""

    __slots__ = ("_seeded", "_split", "_stride", "algorithm", "block_size", "seed")

    def __init__(self, block_size: int, seed: int, algorithm: HashAlgorithm = "xxh3_128") -> None:
        self.block_size = block_size
        self.seed = seed
        self.algorithm = algorithm
        # Copied for each block: a new hash object would make OpenSSL look up the algorithm again.
        self._seeded = sha256(seed.to_bytes(8, "little"))
        self._stride = block_size * TOKEN_BYTES
        self._split = Struct(f"{self._stride}s").iter_unpack

    def digest(self, data: bytes) -> bytes:
        """Return the 16-byte digest of `data` with the cluster's algorithm and seed."""
        if self.algorithm == "xxh3_128":
            return xxhash.xxh3_128_digest(data, self.seed)
        seeded = self._seeded.copy()
        seeded.update(data)
        return seeded.digest()[_HEAD]

    def chain(
        self, parent: BlockHash, tokens: bytes | memoryview, extras: Mapping[int, bytes] | None = None
    ) -> list[BlockHash]:
        """Return the hashes of the full blocks of `tokens` (uint32 LE), which continue the chain after `parent`.

        `extras[i]` holds the digests of the multimodal items that overlap the i-th of these blocks. A trailing partial
        block has no hash.
        """
        full = len(tokens) // self._stride * self._stride
        contents = self._split(tokens[:full])
        if extras:
            contents = ((content + extras.get(index, b""),) for index, (content,) in enumerate(contents))
        # One loop per algorithm and one cast at the end: a Python function call per block would double the cost.
        previous: bytes = parent
        if self.algorithm == "xxh3_128":
            digest, seed = xxhash.xxh3_128_digest, self.seed
            return cast(list[BlockHash], [previous := digest(previous + content, seed) for (content,) in contents])
        hashes: list[bytes] = []
        append, seeded = hashes.append, self._seeded.copy
        for (content,) in contents:
            block = seeded()
            block.update(previous)
            block.update(content)
            previous = block.digest()[_HEAD]
            append(previous)
        return cast(list[BlockHash], hashes)


def join_hashes(hashes: Sequence[BlockHash]) -> bytes:
    """Join hashes into one bytes field, the form in which a request carries them."""
    return b"".join(hashes)


def split_hashes(data: bytes) -> list[BlockHash]:
    """Inverse of `join_hashes`. Raises ValueError when `data` is not a whole number of hashes."""
    if len(data) % HASH_BYTES:
        raise ValueError(f"block hashes: {len(data)} bytes are not a whole number of {HASH_BYTES}-byte hashes")
    return [BlockHash(data[start : start + HASH_BYTES]) for start in range(0, len(data), HASH_BYTES)]


def wire_hash(block_hash: bytes) -> int:
    """Return a hash as the event stream carries it: its last 8 bytes, as a big-endian unsigned integer."""
    return int.from_bytes(block_hash[-8:], "big")


def wire_hashes(joined: bytes) -> tuple[int, ...]:
    """Return the `wire_hash` of each of the joined 16-byte hashes."""
    numbers = array("Q", joined)
    if sys.byteorder == "little":
        numbers.byteswap()
    return tuple(numbers[1::2])
