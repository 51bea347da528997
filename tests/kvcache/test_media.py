"""Items inside a prompt: which blocks they change, and what must not be taken for the same."""

from hypothesis import given
from hypothesis import strategies as st

from homing.kvcache import BlockHash, BlockHasher, MediaItem, block_extras, token_bytes

BLOCK_SIZE = 4
ROOT = BlockHash(b"root-of-tenant-a")
PLACEHOLDER = 9
HASHER = BlockHasher(BLOCK_SIZE, seed=7)
FOX, OWL = b"fox" * 10, b"owl" * 10


def hashes(items: list[MediaItem], num_tokens: int = 16) -> list[BlockHash]:
    """Of a prompt of placeholders alone, so that items alone make the difference."""
    return HASHER.chain(ROOT, token_bytes([PLACEHOLDER] * num_tokens), block_extras(items, BLOCK_SIZE))


def test_another_image_changes_its_first_block_and_all_after_it():
    """Same words, same placeholders, other picture: sharing would answer about the wrong one."""
    fox, owl = hashes([MediaItem(FOX, 5, 6)]), hashes([MediaItem(OWL, 5, 6)])

    assert fox[0] == owl[0]
    assert not set(fox[1:]) & set(owl[1:])


def test_the_same_image_at_the_same_place_is_shared():
    """What the digest is for: an upload and its copy are one."""
    assert hashes([MediaItem(FOX, 5, 6)]) == hashes([MediaItem(bytes(FOX), 5, 6)])


def test_blocks_between_items_carry_none_of_them():
    """An extra stands for an overlap only; the chain carries what came before."""
    extras = block_extras([MediaItem(FOX, 0, 4), MediaItem(OWL, 12, 1)], BLOCK_SIZE)

    assert sorted(extras) == [0, 3]


def test_two_items_in_one_block_are_told_from_their_exchange():
    """Order and border count, in whatever order they are listed."""
    first = [MediaItem(FOX, 0, 2), MediaItem(OWL, 2, 2)]

    assert hashes(first) == hashes(first[::-1])
    assert len({tuple(hashes(items)) for items in (first, exchanged(), moved())}) == 3


def exchanged() -> list[MediaItem]:
    return [MediaItem(OWL, 0, 2), MediaItem(FOX, 2, 2)]


def moved() -> list[MediaItem]:
    return [MediaItem(FOX, 0, 1), MediaItem(OWL, 1, 3)]


@given(st.lists(st.tuples(st.sampled_from([FOX, OWL]), st.integers(0, 20), st.integers(1, 12)), max_size=4))
def test_every_overlapped_block_and_no_other_has_an_extra(given_items: list[tuple[bytes, int, int]]):
    """Against the definition, token by token."""
    items = [MediaItem(*each) for each in given_items]
    covered = {place // BLOCK_SIZE for item in items for place in range(item.start, item.stop)}

    extras = block_extras(items, BLOCK_SIZE)

    assert set(extras) == covered
    for block, extra in extras.items():
        assert all((item.digest in extra) == overlaps(block, item.digest, items) for item in items)


def overlaps(block: int, digest: bytes, items: list[MediaItem]) -> bool:
    begin, end = block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE
    return any(item.start < end and item.stop > begin for item in items if item.digest == digest)
