"""The bytes of a KV file: a header, one record per slot, then the slots. Pure functions of bytes.

    0            header: what the KV depends on, the sizes, and a number drawn when the file was formatted
    4096         one record per slot: hash, parent, tokens, generation, and the checksum of the slot's KV
    data_offset  the slots, each at a multiple of 4096 bytes, as O_DIRECT requires

A restart reads only header and records; KV is checked when it is loaded. Every checksum covers the number drawn at
formatting, so that nothing of a file's former contents can be taken for valid. A record of zeros is a free slot.
"""

from dataclasses import dataclass
from struct import Struct

import msgspec
import xxhash

from ...kvcache.hashing import TOKEN_BYTES, BlockHash

MAGIC = b"homingKV"
#: Files of another version are not read.
VERSION = 1
#: Alignment of the slots and size of the header.
PAGE_BYTES = 4096
#: Blocks that start a chain are kept only under salts of at most so many bytes; those of tenants with a key have 39.
MAX_SALT_BYTES = 128
#: A tier of fewer blocks would evict each before it is used again.
LEAST_SLOTS = 16

_MASK = (1 << 64) - 1
#: Checksum of what follows it, generation, checksum of the KV, hash, parent, whether it starts a chain, bytes of salt.
_FIXED = Struct("<QQQ16s16sBB6x")
_PREFIX = Struct("<8sQI")


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What a block's bytes depend on, apart from its hash."""

    model: str  #: for people
    root: str  #: hex; covers weights, dtypes, block size and hash algorithm
    seed: str  #: a digest of the seed of the hashes
    layout: str  #: how a block's bytes are arranged
    block_size: int  #: tokens
    block_bytes: int  #: one rank's share
    ranks: int = 1

    def digest(self) -> bytes:
        encoded = msgspec.json.encode((VERSION, self))
        return xxhash.xxh3_128_digest(encoded)


class Header(msgspec.Struct, frozen=True, kw_only=True):
    identity: Identity
    rank: int
    slots: int
    drawn: int  #: a random number of 64 bits
    version: int = VERSION


@dataclass(slots=True, frozen=True)
class DiskEntry:
    """A block in a slot."""

    slot: int
    generation: int  #: positive, and greater than that of any block that was in the slot before
    block_hash: BlockHash
    parent: BlockHash  #: hash of the block before, or the root
    first: bool  #: whether it starts a chain
    tokens: bytes  #: uint32 little-endian
    salt: str = ""  #: of a chain's first block, else empty


@dataclass(slots=True, frozen=True)
class Layout:
    """Where everything is in a file of so many slots, in bytes."""

    block_size: int
    block_bytes: int
    slots: int

    @property
    def record_bytes(self) -> int:
        exact = _FIXED.size + self.block_size * TOKEN_BYTES + MAX_SALT_BYTES
        return -(-exact // 64) * 64

    @property
    def slot_bytes(self) -> int:
        return -(-self.block_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def data_offset(self) -> int:
        return PAGE_BYTES + -(-self.slots * self.record_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def file_bytes(self) -> int:
        return self.data_offset + self.slots * self.slot_bytes

    def record_at(self, slot: int) -> int:
        return PAGE_BYTES + slot * self.record_bytes

    def data_at(self, slot: int) -> int:
        return self.data_offset + slot * self.slot_bytes

    @classmethod
    def within(cls, file_bytes: int, block_size: int, block_bytes: int) -> "Layout":
        """The layout of the largest file of at most `file_bytes`; it may have no slots."""
        one = cls(block_size, block_bytes, 1)
        slots = max(0, (file_bytes - 2 * PAGE_BYTES) // (one.record_bytes + one.slot_bytes))
        return cls(block_size, block_bytes, slots)


def encode_header(header: Header) -> bytes:
    """One page. The identity must leave room for it."""
    text = msgspec.json.encode(header)
    page = (_PREFIX.pack(MAGIC, xxhash.xxh3_64_intdigest(text), len(text)) + text).ljust(PAGE_BYTES, b"\0")
    assert len(page) == PAGE_BYTES, f"a header of {len(text)} bytes"
    return page


def decode_header(page: bytes) -> Header | None:
    """The header in a file's first page, of any version; None if it is damaged or cannot be read by this one."""
    if len(page) < PAGE_BYTES:
        return None
    magic, check, length = _PREFIX.unpack_from(page)
    text = page[_PREFIX.size : _PREFIX.size + length]
    if magic != MAGIC or xxhash.xxh3_64_intdigest(text) != check:
        return None
    try:
        return msgspec.json.decode(text, type=Header)
    except msgspec.DecodeError:
        return None


def is_ours(page: bytes) -> bool:
    """Whether a file that begins like this was written as a KV file, of whatever version; an empty one may be."""
    return page.startswith(MAGIC) or not page.strip(b"\0")


def encode_record(layout: Layout, drawn: int, entry: DiskEntry, data_check: int) -> bytes:
    salt = entry.salt.encode()
    assert len(entry.tokens) == layout.block_size * TOKEN_BYTES, f"{len(entry.tokens)} bytes of tokens"
    assert len(salt) <= MAX_SALT_BYTES, f"a salt of {len(salt)} bytes"
    fixed = _FIXED.pack(0, entry.generation, data_check, entry.block_hash, entry.parent, 1 + entry.first, len(salt))
    body = (fixed[8:] + entry.tokens + salt).ljust(layout.record_bytes - 8, b"\0")
    return _record_check(body, drawn, entry.slot).to_bytes(8, "little") + body


def decode_record(layout: Layout, drawn: int, slot: int, record: bytes) -> tuple[DiskEntry, int] | None:
    """The entry and the checksum of its KV; None if the slot is free or the record is damaged or another slot's."""
    check, generation, data_check, block_hash, parent, kind, salt_bytes = _FIXED.unpack_from(record)
    if kind not in (1, 2) or _record_check(record[8:], drawn, slot) != check:
        return None
    start = _FIXED.size + layout.block_size * TOKEN_BYTES
    tokens, salt = record[_FIXED.size : start], record[start : start + salt_bytes]
    entry = DiskEntry(slot, generation, BlockHash(block_hash), BlockHash(parent), kind == 2, tokens, salt.decode())
    return entry, data_check


def data_check(data: bytes | memoryview, drawn: int, block_hash: BlockHash, generation: int) -> int:
    """The checksum of a block's KV, which is another one for other blocks and at other times."""
    seed = (drawn ^ int.from_bytes(block_hash[:8], "little") ^ generation * 0x9E3779B97F4A7C15) & _MASK
    return xxhash.xxh3_64_intdigest(data, seed)


def _record_check(body: bytes, drawn: int, slot: int) -> int:
    return xxhash.xxh3_64_intdigest(body, (drawn + slot) & _MASK)
