"""Hot prefixes: requested repeatedly, kept by some replica, and no more of them than fit."""

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from homing.kvcache.hashing import BlockHash, BlockHasher, join_hashes, token_bytes, wire_hashes
from homing.router.flow.hot_prefixes import ENTRY_BYTES, MIN_REQUESTS, HotPrefix, HotPrefixes

BLOCK = 128  #: one step of `HotPrefixes` is one block
HASHER = BlockHasher(BLOCK, 7)
ROOTS = [BlockHash(bytes([index]) * 16) for index in range(2)]


def prompt(*parts: int) -> bytes:
    """Return one block for each part, and another half block."""
    return token_bytes([part for part in parts for _ in range(BLOCK)] + [0] * (BLOCK // 2))


class World:
    """A `HotPrefixes`, and the blocks of the prompts added to it."""

    def __init__(self, capacity_bytes: int = 1 << 20, block_size: int = BLOCK) -> None:
        self.book = HotPrefixes(block_size, capacity_bytes)
        self.asked: Counter[int] = Counter()
        self.sizes: list[tuple[int, tuple[int, ...]]] = []  #: bytes and block hashes of each prompt, oldest first

    def ask(self, *parts: int, root: BlockHash = ROOTS[0]) -> tuple[int, ...]:
        tokens = prompt(*parts)
        hashes = join_hashes(HASHER.chain(root, tokens))
        self.book.add(root, tokens, hashes)
        self.asked.update(wire_hashes(hashes))
        self.sizes.append((len(tokens) + len(hashes) + ENTRY_BYTES, wire_hashes(hashes)))
        return wire_hashes(hashes)

    def hottest(self, room: int = 100, held: Sequence[int] = (), gone: Sequence[int] = ()) -> list[HotPrefix]:
        self.book.check()
        return self.book.hottest(room, held=lambda name: name in held, kept=lambda name: name not in gone)


def parts(prefix: HotPrefix) -> list[int]:
    return list(memoryview(prefix.tokens).cast("I")[::BLOCK])


def test_what_prompts_share_is_hot_and_what_one_alone_has_is_not() -> None:
    """A prefix used once may never be used again. The hottest comes first, because a warm-up may be cut short."""
    world = World()
    world.ask(5, 6, 1)
    world.ask(5, 6, 2)
    for own in range(6):
        world.ask(7, own)

    assert [(parts(each), each.requests) for each in world.hottest()] == [([7], 6), ([5, 6], 2)]


def test_of_two_that_are_as_hot_the_newest_goes_first() -> None:
    """The newer one is more likely to be requested again."""
    world = World()
    for part in (1, 2):
        world.ask(part, 8)
        world.ask(part, 9)

    assert [parts(each) for each in world.hottest()] == [[2], [1]]


def test_a_shared_prefix_is_chosen_once() -> None:
    """Conversations share a system prompt; the rest of the room is for what each of them adds."""
    world = World()
    for chat in range(3):
        world.ask(1, 2, 3, 10 + chat)
        world.ask(1, 2, 3, 10 + chat, 20)

    assert [parts(each) for each in world.hottest(room=5)] == [[1, 2, 3], [1, 2, 3, 12], [1, 2, 3, 11]]


def test_what_the_replica_holds_costs_nothing_and_what_nobody_kept_is_not_hot() -> None:
    """Two routers may warm up one replica; and a prefix that was evicted everywhere was not worth its room."""
    world = World()
    names = [world.ask(part, part, own) for part in (1, 2) for own in range(3)]

    assert [parts(each) for each in world.hottest(held=names[0][:2])] == [[2, 2]]
    assert [parts(each) for each in world.hottest(room=1, held=names[0][:1], gone=names[3][1:])] == [[2]]


def test_tenants_have_nothing_in_common() -> None:
    """A prefix is warmed up only under the root of the tenant that requested it twice."""
    world = World()
    for root in (ROOTS[0], ROOTS[1], ROOTS[1]):
        world.ask(1, root=root)

    (only,) = world.hottest()
    assert only.root == ROOTS[1]
    assert only.hashes == join_hashes(HASHER.chain(ROOTS[1], only.tokens))


def test_short_beginnings_and_prompts_beyond_the_memory_are_not_kept() -> None:
    """Short prefixes are faster to compute than to request; prompts larger than the memory cannot fit."""
    world = World(capacity_bytes=ENTRY_BYTES + 1000)
    for _ in range(2):
        world.ask()
        world.ask(1, 2, 3)

    assert len(world.book) == 0
    assert world.hottest() == []


def test_only_whole_grains_are_looked_at() -> None:
    """Blocks of 16 tokens are examined eight at a time: an eighth of the work, which blocks the event loop."""
    hasher, book = BlockHasher(16, 7), HotPrefixes(16, 1 << 20)
    tokens = token_bytes(range(300))
    for _ in range(2):
        book.add(ROOTS[0], tokens, join_hashes(hasher.chain(ROOTS[0], tokens)))

    (only,) = book.hottest(100, held=lambda _: False, kept=lambda _: True)

    assert len(wire_hashes(only.hashes)) == 16
    assert only.tokens == tokens[: 256 * 4]
    assert wire_hashes(only.hashes) == wire_hashes(join_hashes(hasher.chain(ROOTS[0], tokens)))[:16]


@given(
    asked=st.lists(st.tuples(st.sampled_from(ROOTS), st.lists(st.integers(0, 2), max_size=5)), max_size=30),
    room=st.integers(0, 12),
    entries=st.integers(1, 20),
)
def test_no_more_than_the_room_and_nothing_left_out_that_is_hotter(
    asked: list[tuple[BlockHash, list[int]]], room: int, entries: int
) -> None:
    """Compared with a naive count over the prompts that are still in memory."""
    world = World(capacity_bytes=entries * (ENTRY_BYTES + 600))
    for root, each in asked:
        world.ask(*each, root=root)
    kept, left_bytes = Counter[int](), entries * (ENTRY_BYTES + 600)
    for size, names in reversed([(size, names) for size, names in world.sizes if names and size <= left_bytes]):
        left_bytes -= size
        if left_bytes < 0:
            break
        kept.update(names)

    found = world.hottest(room)

    chosen = {name for each in found for name in wire_hashes(each.hashes)}
    left = [count for name, count in kept.items() if name not in chosen]
    assert len(chosen) <= room
    assert all(kept[name] >= MIN_REQUESTS for name in chosen)
    assert len(chosen) == min(room, sum(count >= MIN_REQUESTS for count in kept.values()))
    assert not chosen or max(left, default=0) < 2 * max(2, min(kept[name] for name in chosen)) + 1
    assert all(join_hashes(HASHER.chain(each.root, each.tokens)) == each.hashes for each in found)
