"""Block hashes, compared with an independent XXH3, with hashlib, and with the example in docs/kvcache.md."""

import re
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.kvcache.hashing import (
    BlockHash,
    BlockHasher,
    CacheIdentity,
    HashAlgorithm,
    canonical,
    join_hashes,
    model_root,
    split_hashes,
    tenant_root,
    token_array,
    token_bytes,
    wire_hash,
    wire_hashes,
)

DOC = Path(__file__).parents[2] / "docs" / "kvcache.md"
IDENTITY = CacheIdentity(
    model_fingerprint=sha256(b"a model").digest(), kv_dtype="bfloat16", block_size=4, hash_algorithm="xxh3_128"
)
ROOT = tenant_root(model_root(IDENTITY), salt=b"tenant-a")
SEED = 0x0123456789ABCDEF

# --- XXH3_128 of 17 to 128 bytes in plain arithmetic, from the published description of the algorithm ---------------

MASK = (1 << 64) - 1
PRIME_1, PRIME_2, PRIME_4 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x85EBCA77C2B2AE63
AVALANCHE = 0x165667919E3779F9
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
)


def read64(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def fold(left: int, right: int) -> int:
    product = left * right
    return (product & MASK) ^ (product >> 64)


def mix16(data: bytes, at: int, secret: int, seed: int) -> int:
    low = read64(data, at) ^ ((read64(SECRET, secret) + seed) & MASK)
    high = read64(data, at + 8) ^ ((read64(SECRET, secret + 8) - seed) & MASK)
    return fold(low, high)


def avalanche(value: int) -> int:
    value = (value ^ (value >> 37)) * AVALANCHE & MASK
    return value ^ (value >> 32)


def xxh3_128(data: bytes, seed: int) -> bytes:
    size = len(data)
    assert 17 <= size <= 128
    low, high = size * PRIME_1 & MASK, 0
    for step in reversed(range((size - 1) // 32 + 1)):
        front, back, secret = step * 16, size - 16 - step * 16, step * 32
        low = (low + mix16(data, front, secret, seed)) & MASK
        low ^= (read64(data, back) + read64(data, back + 8)) & MASK
        high = (high + mix16(data, back, secret + 16, seed)) & MASK
        high ^= (read64(data, front) + read64(data, front + 8)) & MASK
    first = avalanche((low + high) & MASK)
    second = -avalanche((low * PRIME_1 + high * PRIME_4 + (size - seed) * PRIME_2) & MASK) & MASK
    return second.to_bytes(8, "big") + first.to_bytes(8, "big")


# --- hashes --------------------------------------------------------------------------------------------------------

ids_lists = st.lists(st.integers(0, 2**32 - 1), max_size=60)
seeds = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize("block_size", [1, 4, 8, 12, 16, 20, 28])
@given(ids=ids_lists, seed=seeds)
def test_a_chain_is_xxh3_of_parent_and_tokens(block_size: int, ids: list[int], seed: int):
    """Compared with an implementation that shares no code with the library."""
    expected, previous = [], bytes(ROOT)
    for start in range(0, len(ids) // block_size * block_size, block_size):
        block = b"".join(token.to_bytes(4, "little") for token in ids[start : start + block_size])
        previous = xxh3_128(previous + block, seed)
        expected.append(previous)

    assert BlockHasher(block_size, seed).chain(ROOT, token_bytes(ids)) == expected


@given(ids=ids_lists, seed=seeds)
def test_the_sha256_chain_is_seeded_and_cut_to_16_bytes(ids: list[int], seed: int):
    """SHA-256 follows the same rules as the default algorithm."""
    expected, previous = [], bytes(ROOT)
    for start in range(0, len(ids) // 4 * 4, 4):
        block = b"".join(token.to_bytes(4, "little") for token in ids[start : start + 4])
        previous = sha256(seed.to_bytes(8, "little") + previous + block).digest()[:16]
        expected.append(previous)

    assert BlockHasher(4, seed, "sha256").chain(ROOT, token_bytes(ids)) == expected


@pytest.mark.parametrize("algorithm", ["xxh3_128", "sha256"])
def test_a_chain_can_be_continued_from_its_last_hash(algorithm: HashAlgorithm):
    """A growing answer only hashes its new blocks."""
    hasher = BlockHasher(4, SEED, algorithm)
    tokens = token_bytes(range(20))
    whole = hasher.chain(ROOT, tokens)

    assert whole == [*hasher.chain(ROOT, tokens[:32]), *hasher.chain(whole[1], tokens[32:])]


@pytest.mark.parametrize("algorithm", ["xxh3_128", "sha256"])
def test_a_view_hashes_like_the_bytes(algorithm: HashAlgorithm):
    """Callers pass slices of a request's tokens without copying them."""
    hasher = BlockHasher(4, SEED, algorithm)
    tokens = token_bytes(range(12))

    assert hasher.chain(ROOT, memoryview(tokens)) == hasher.chain(ROOT, tokens)


def test_a_part_of_a_block_has_no_hash():
    """Only full blocks are shared."""
    assert len(BlockHasher(4, SEED).chain(ROOT, token_bytes(range(11)))) == 2


@pytest.mark.parametrize("algorithm", ["xxh3_128", "sha256"])
def test_an_extra_changes_its_block_and_all_after_it(algorithm: HashAlgorithm):
    """Equal placeholder tokens of different images are different prefixes."""
    hasher = BlockHasher(4, SEED, algorithm)
    tokens = token_bytes([0] * 12)
    plain, extra = hasher.chain(ROOT, tokens), hasher.chain(ROOT, tokens, {1: b"image"})

    assert extra[0] == plain[0]
    assert extra[1] != plain[1]
    assert extra[2] != plain[2]


def test_an_extra_of_a_part_of_a_block_is_passed_over():
    """An image at the end of a prompt may overlap a block that is not full yet."""
    hasher = BlockHasher(4, SEED)
    tokens = token_bytes(range(10))

    assert hasher.chain(ROOT, tokens, {2: b"image"}) == hasher.chain(ROOT, tokens)


@pytest.mark.parametrize("algorithm", ["xxh3_128", "sha256"])
def test_clusters_with_different_seeds_share_no_hash(algorithm: HashAlgorithm):
    """Knowledge of one cluster's hashes must be useless against another."""
    tokens = token_bytes(range(12))
    one, two = (set(BlockHasher(4, seed, algorithm).chain(ROOT, tokens)) for seed in (1, 2))

    assert not one & two


def test_everything_that_changes_kv_changes_the_root():
    """Equal tokens with another model, type, block size, algorithm, adapter or tenant are a different prefix."""
    changed = [
        CacheIdentity(model_fingerprint=b"another", kv_dtype="bfloat16", block_size=4, hash_algorithm="xxh3_128"),
        CacheIdentity(
            model_fingerprint=IDENTITY.model_fingerprint, kv_dtype="float16", block_size=4, hash_algorithm="xxh3_128"
        ),
        CacheIdentity(
            model_fingerprint=IDENTITY.model_fingerprint, kv_dtype="bfloat16", block_size=8, hash_algorithm="xxh3_128"
        ),
        CacheIdentity(
            model_fingerprint=IDENTITY.model_fingerprint, kv_dtype="bfloat16", block_size=4, hash_algorithm="sha256"
        ),
    ]
    base = model_root(IDENTITY)
    roots = [base, *map(model_root, changed), tenant_root(base), ROOT, tenant_root(base, salt=b"tenant-b")]
    roots += [tenant_root(base, lora_digest=b"tenant-a"), tenant_root(base, salt=b"tenant-a", lora_digest=b"x")]

    assert len(set(roots)) == len(roots)


@given(st.lists(st.binary(max_size=9), max_size=4), st.lists(st.binary(max_size=9), max_size=4))
def test_different_fields_never_encode_alike(one: list[bytes], two: list[bytes]):
    """Otherwise a salt could be chosen to run into the next field."""
    assert (canonical(*one) == canonical(*two)) == (one == two)


@given(ids_lists)
def test_token_bytes_come_back(ids: list[int]):
    """Token ids are sent as bytes from the router to the engine."""
    assert token_array(token_bytes(ids)).tolist() == ids
    assert token_bytes(ids) == b"".join(token.to_bytes(4, "little") for token in ids), sys.byteorder


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_an_id_outside_32_bits_is_refused(bad: int):
    """Invalid arguments are reported early."""
    with pytest.raises(OverflowError):
        token_bytes([bad])


def test_a_torn_list_of_ids_or_hashes_is_refused():
    """A frame from the network may be truncated anywhere."""
    with pytest.raises(ValueError, match="multiple"):
        token_array(b"12345")
    with pytest.raises(ValueError, match="17 bytes"):
        split_hashes(b"x" * 17)


@given(st.lists(st.binary(min_size=16, max_size=16).map(BlockHash), max_size=5))
def test_hashes_travel_joined_and_come_back(hashes: list[BlockHash]):
    """Requests carry hashes joined into one field; the event stream carries their last 8 bytes as integers."""
    assert split_hashes(join_hashes(hashes)) == hashes
    assert list(wire_hashes(join_hashes(hashes))) == [wire_hash(block_hash) for block_hash in hashes]


# --- the worked example ----------------------------------------------------------------------------------------------


def documented() -> dict[str, str]:
    """`name = value` lines of the example in docs/kvcache.md."""
    text = DOC.read_text(encoding="utf-8")
    example = text[text.index("## A worked example") :]
    return dict(re.findall(r"^(\w+) += ([0-9a-f]+)$", example, flags=re.MULTILINE))


def test_the_worked_example_is_right():
    """Authors of subscribers in other languages check their code against this example."""
    values = documented()
    hashes = BlockHasher(4, SEED).chain(ROOT, token_bytes(range(1, 10)))

    assert values["model_root"] == model_root(IDENTITY).hex()
    assert values["root"] == ROOT.hex()
    assert values["input_0"] == (ROOT + token_bytes([1, 2, 3, 4])).hex()
    assert [values["h_0"], values["h_1"]] == [block_hash.hex() for block_hash in hashes]
    assert [int(values["wire_0"]), int(values["wire_1"])] == [wire_hash(block_hash) for block_hash in hashes]


def test_the_worked_example_needs_none_of_our_code():
    """The documented hashes follow from the documented bytes by XXH3 alone."""
    values = documented()
    first = xxh3_128(bytes.fromhex(values["input_0"]), SEED)
    second = xxh3_128(first + bytes.fromhex("05000000060000000700000008000000"), SEED)

    assert [values["h_0"], values["h_1"]] == [first.hex(), second.hex()]
