"""An external engine's cache events, translated to our block hashes."""

from collections import Counter
from collections.abc import Iterable
from hashlib import sha256
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from homing.events.wire.cache_events import Cleared, Removed, Stored
from homing.kvcache.hashing import BlockHash, BlockHasher, tenant_root, token_bytes, wire_hash
from homing.router.errors import ParityMismatch
from homing.router.replicas.external.block_keys import COPIES_PER_BLOCK, MAX_PLACES, ExternalBlocks, cache_salt
from homing.router.replicas.external.hit_rules import Hit

SIZE = 4
ROOT = BlockHash(bytes(range(16)))
HASHER = BlockHasher(SIZE, 7)


def keys(tokens: Iterable[int], *, salt: bytes = b"") -> list[int]:
    """Return the wire hashes by which a prompt of these tokens is looked up."""
    return [wire_hash(name) for name in HASHER.chain(tenant_root(ROOT, salt=salt), token_bytes(tokens))]


def stored(parent: int | None, handles: list[int], tokens: Iterable[int], **fields: object) -> Stored:
    """Build an event of the engine."""
    return Stored(parent, handles, list(tokens), SIZE, **fields)


@pytest.fixture
def chains():
    """External blocks whose invariants are checked after every test."""
    chains = ExternalBlocks("b0", HASHER, ROOT)
    yield chains
    chains.check()


def test_a_block_goes_by_the_hash_of_its_content(chains: ExternalBlocks) -> None:
    """The engine uses other hashes than ours: only the content shows which prompts hit."""
    first = chains.stored(stored(None, [900, 901], range(8)))
    second = chains.stored(stored(901, [902], range(8, 12)))

    assert first + second == keys(range(12))


def test_a_removal_names_the_handle_and_removes_the_content(chains: ExternalBlocks) -> None:
    """Removals contain only the engine's own hash."""
    chains.stored(stored(None, [900, 901], range(8)))

    assert chains.removed([901]) == keys(range(8))[1:]
    assert chains.removed([901]) == []


def test_a_block_is_held_until_its_last_copy_is_removed(chains: ExternalBlocks) -> None:
    """vLLM announces each physical copy and each removal of one."""
    chains.stored(stored(None, [900], range(4)))

    assert chains.stored(stored(None, [900, 901], range(8))) == keys(range(8))[1:]
    assert chains.removed([900]) == []
    assert chains.removed([900]) == keys(range(4))


def test_two_handles_of_one_content_are_two_references(chains: ExternalBlocks) -> None:
    """If an engine's hashes depend on more than the content, it may store one content twice and evict one copy."""
    chains.stored(stored(None, [900], range(4)))
    chains.stored(stored(None, [800], range(4)))

    assert chains.removed([900]) == []
    assert chains.removed([800]) == keys(range(4))


def test_a_chain_behind_an_unknown_parent_is_counted_and_earns_nothing(chains: ExternalBlocks) -> None:
    """Without the earlier blocks, the prompt is unknown; guessing would credit blocks that are not held."""
    assert chains.stored(stored(555, [900], range(4))) == []
    assert chains.stored(stored(900, [901], range(4, 8))) == []
    assert chains.unplaced["no_parent"] == 2

    chains.stored(stored(None, [555], range(20, 24)))
    assert chains.stored(stored(555, [900], range(4))) == keys([*range(20, 24), *range(4)])[1:]


def test_tokens_that_are_not_one_block_for_each_hash_name_nothing(chains: ExternalBlocks) -> None:
    """Sliding-window groups announce blocks without all of their tokens."""
    assert chains.stored(stored(None, [900, 901], range(4))) == []
    assert chains.stored(stored(None, [902], [-1, 0, 0, 0])) == []
    assert chains.unplaced["no_tokens"] == 3


def test_blocks_of_another_size_are_a_loud_refusal(chains: ExternalBlocks) -> None:
    """Otherwise no prompt would ever hit, without any error. Side groups may have other sizes."""
    with pytest.raises(ParityMismatch, match="block_size is 16"):
        chains.stored(Stored(None, [900], list(range(16)), 16))

    assert chains.stored(Stored(None, [900], list(range(16)), 16, group=1)) == keys(range(16))[3:]
    assert chains.stored(Stored(None, [901], list(range(6)), 6, group=2)) == []


def test_a_copy_in_slower_memory_that_remains_is_not_in_the_index(chains: ExternalBlocks) -> None:
    """It must be loaded first, so it is worth less than a copy in GPU memory."""
    chains.stored(stored(None, [900, 901], range(8), medium="GPU"))
    assert chains.hit(keys(range(8))) is None

    assert chains.stored(stored(None, [900, 901], range(8), medium="CPU")) == []
    assert chains.removed([901], "GPU") == keys(range(8))[1:]

    assert chains.hit(keys(range(8))) == Hit(2, (("CPU", 1),))


@pytest.mark.parametrize("group", [None, 0])
def test_a_placeholder_names_copies_by_their_handles_alone(chains: ExternalBlocks, group: int | None) -> None:
    """vLLM's offloading connector sends no tokens and block size 0: no reason to refuse a healthy engine."""
    placeholder = Stored(None, [900, 901, 555], [], 0, "CPU", group)
    chains.stored(stored(None, [900, 901], range(8)))

    assert chains.stored(placeholder) == []
    assert chains.unplaced["no_tokens"] == 1
    chains.removed([900, 901])

    assert chains.hit(keys(range(8))) == Hit(2, (("CPU", 2),))
    assert chains.removed([900, 901, 555], "CPU") == []
    assert chains.hit(keys(range(8))) is None


def test_a_placeholder_that_comes_first_counts_once_its_content_is_known(chains: ExternalBlocks) -> None:
    """The engine chooses the order of events from two media."""
    chains.stored(Stored(None, [900], [], 0, "CPU"))
    assert chains.hit(keys(range(4))) is None

    chains.stored(stored(None, [900], range(4), medium="GPU"))
    chains.removed([900], "GPU")

    assert chains.hit(keys(range(4))) == Hit(1, (("CPU", 1),))


def test_copies_of_several_blocks_each_in_slower_memory_continue_a_hit(chains: ExternalBlocks) -> None:
    """Connectors may be configured with longer blocks than the engine's."""
    chains.stored(stored(None, [900, 901, 902, 903], range(16)))
    chains.stored(Stored(None, [901, 903], list(range(16)), 8, "CPU"))
    chains.removed([901, 902, 903])

    assert chains.hit(keys(range(16))) == Hit(4, (("CPU", 3),))


def test_a_group_of_sliding_windows_needs_its_last_window_only(chains: ExternalBlocks) -> None:
    """Earlier blocks are skipped, so it has fewer handles than blocks; the main group supplies their content."""
    window = {"group": 1, "kind": "sliding_window", "window": 5}
    chains.stored(stored(901, [902, 903], range(12), **window))
    chains.stored(stored(None, [900, 901, 902, 903], range(16), group=0))

    assert chains.hit(keys(range(16))) == Hit(4)
    chains.removed([903], None, 1)
    assert chains.hit(keys(range(16))) == Hit(3)
    chains.removed([902], None, 1)
    assert chains.hit(keys(range(16))) == Hit(0)


def test_a_group_of_mamba_layers_needs_its_last_state_only(chains: ExternalBlocks) -> None:
    """A state at the end of a prefix covers the whole prefix; between two states nothing is cached."""
    chains.stored(stored(None, [900, 901, 902], range(12), group=0))
    chains.stored(Stored(None, [901], [], SIZE, "GPU", 1, kind="mamba"))

    assert chains.hit(keys(range(12))) == Hit(2)
    assert chains.hit(keys(range(4))) == Hit(0)


def test_ranks_hold_blocks_of_their_own(chains: ExternalBlocks) -> None:
    """If the engine chooses the rank, only blocks that every rank holds are certain hits."""
    chains.stored(stored(None, [900, 901], range(8)), 0)
    chains.stored(stored(None, [900], range(4)), 1)

    assert chains.hit(keys(range(8))) == Hit(1)
    assert chains.removed([900], rank=1) == []
    assert chains.hit(keys(range(8))) == Hit(0)
    assert chains.cleared(0) == keys(range(8))


def test_where_one_rank_is_asked_the_others_do_not_count() -> None:
    """Each rank is a separate replica."""
    chains = ExternalBlocks("b0", HASHER, ROOT, rank=1)

    assert chains.stored(stored(None, [900], range(4)), 0) == []
    assert chains.stored(stored(None, [900], range(4)), 1) == keys(range(4))
    assert chains.removed([900], rank=0) == []
    assert chains.cleared(0) == []
    assert len(chains) == 1


def test_an_adapter_or_an_image_makes_other_blocks_of_the_same_tokens(chains: ExternalBlocks) -> None:
    """Equal tokens under another adapter or around another image have different KV: no hit for a plain prompt."""
    plain = chains.stored(stored(None, [1], range(4)))
    adapter = chains.stored(stored(None, [2], range(4), lora_name="poet"))
    image = chains.stored(stored(None, [3], range(4), extra_keys=[["a picture", 0]]))
    other_image = chains.stored(stored(None, [4], range(4), extra_keys=[["another", 0]]))

    assert len({*plain, *adapter, *image, *other_image}) == 4


def test_tenants_with_equal_tokens_are_told_apart_also_when_one_is_removed(chains: ExternalBlocks) -> None:
    """Merging them would promise one tenant's cache to another, and forget one's when the other's is evicted."""
    ann, bob, poet = (
        chains.stored(stored(None, [n], range(4), extra_keys=[[*names]], lora_name=lora))
        for n, names, lora in ((1, ("ann",), None), (2, ("bob",), None), (3, ("poet", "ann"), "poet"))
    )
    plain = chains.stored(stored(None, [4], range(4)))

    assert len({*ann, *bob, *poet, *plain}) == 4
    assert chains.removed([1]) == ann
    assert len(chains) == 3


def test_an_adapters_name_in_each_block_adds_nothing_to_its_root(chains: ExternalBlocks) -> None:
    """vLLM repeats it; a prompt for the adapter is looked up under the adapter's root, block by block."""
    repeated = chains.stored(stored(None, [1, 2], range(8), lora_name="poet", extra_keys=[["poet"], ["poet"]]))
    root = tenant_root(ROOT, lora_digest=sha256(b"poet").digest())

    assert repeated == [wire_hash(name) for name in HASHER.chain(root, token_bytes(range(8)))]


def test_a_tenants_salt_comes_back_as_the_tenants_root(chains: ExternalBlocks) -> None:
    """The engine separates tenants by the salt that the router sent, and so does the index."""
    salt = bytes(range(16))
    told = [[cache_salt(tenant_root(ROOT, salt=salt))]]

    assert chains.stored(stored(None, [1], range(4), extra_keys=told)) == keys(range(4), salt=salt)
    assert chains.stored(stored(1, [2], range(4, 8), extra_keys=[None])) == keys(range(8), salt=salt)[1:]
    assert chains.stored(stored(None, [3], range(4), extra_keys=[["homing-no hex"]])) not in (
        keys(range(4)),
        keys(range(4), salt=salt),
    )


class Engine(RuleBasedStateMachine):
    """An engine that announces every copy, some after their parents' hashes were lost, compared with a plain multiset.

    The oracle hashes each block's whole prompt again and does not use handles.
    """

    @initialize(seed=st.integers(0, 1 << 16))
    def begin(self, seed: int) -> None:
        self.rng = Random(seed)
        self.chains = ExternalBlocks("b0", HASHER, ROOT)
        self.index: set[int] = set()
        self.handles: dict[tuple[int, ...], int] = {}
        self.copies: Counter[tuple[str, tuple[int, ...]]] = Counter()
        #: contents with a known hash: announced with all earlier blocks, and not removed since
        self.named: set[tuple[int, ...]] = set()

    def handle(self, content: tuple[int, ...]) -> int:
        return self.handles.setdefault(content, self.rng.getrandbits(64))

    def tell(self, event: Stored | Removed | Cleared) -> None:
        match event:
            case Stored():
                added = self.chains.stored(event)
                assert not self.index.intersection(added)
                self.index.update(added)
            case Removed():
                self.take_out(self.chains.removed(event.hashes, event.medium, event.group))
            case Cleared():
                self.take_out(self.chains.cleared())

    def take_out(self, gone: list[int]) -> None:
        assert self.index.issuperset(gone)
        self.index.difference_update(gone)

    def held(self) -> set[tuple[int, ...]]:
        return {content for (_, content), count in self.copies.items() if count}

    @rule(
        start=st.integers(0, 3),
        letters=st.lists(st.integers(0, 1), min_size=1, max_size=4),
        medium=st.sampled_from(["GPU", "CPU"]),
    )
    def store(self, start: int, letters: list[int], medium: str) -> None:
        start = min(start, len(letters) - 1)
        contents = [tuple(letters[: end + 1]) for end in range(len(letters))]
        new = contents[start:]
        for content in new:
            self.copies[medium, content] += 1
        parent = contents[start - 1] if start else None
        if parent is None or parent in self.named:
            self.named.update(new)
        tokens = [letter for letter in letters[start:] for _ in range(SIZE)]
        self.tell(
            stored(None if parent is None else self.handle(parent), list(map(self.handle, new)), tokens, medium=medium)
        )

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        copy = data.draw(st.sampled_from(sorted(copy for copy, count in self.copies.items() if count)))
        self.copies[copy] -= 1
        self.named &= self.held()
        self.tell(Removed([self.handle(copy[1])], copy[0]))

    @rule(handle=st.integers(0, 99))
    def remove_the_unknown(self, handle: int) -> None:
        self.tell(Removed([handle], "GPU"))

    @rule()
    def clear(self) -> None:
        self.copies.clear()
        self.named.clear()
        self.tell(Cleared())

    @invariant()
    def the_index_holds_what_can_be_named(self) -> None:
        on_gpu = {content for (medium, content), count in self.copies.items() if count and medium == "GPU"}
        assert self.index == {self.key(content) for content in self.named & on_gpu}
        self.chains.check()

    @invariant()
    def a_hit_is_what_the_engine_would_find(self) -> None:
        """A hit is the prefix in GPU memory, then the blocks that continue it in slower memory."""
        for prompt in self.held():
            blocks = 0
            media = []
            for end in range(1, len(prompt) + 1):
                held = [medium for medium in ("GPU", "CPU") if self.copies[medium, prompt[:end]]]
                usable = [medium for medium in held if medium == "CPU" or "CPU" not in media]
                if not usable or prompt[:end] not in self.named:
                    break
                media.append(usable[0])
                blocks = end
            hit = self.chains.hit([self.key(prompt[:end]) for end in range(1, len(prompt) + 1)])
            slower = (("CPU", media.count("CPU")),) if "CPU" in media else ()
            assert hit == Hit(blocks, slower) if hit is not None else "CPU" not in media

    def key(self, content: tuple[int, ...]) -> int:
        return keys([letter for letter in content for _ in range(SIZE)])[-1]


TestEngine = Engine.TestCase
TestEngine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("with_tokens", [True, False])
@pytest.mark.parametrize("medium", ["GPU", "CPU"])
def test_an_engine_that_announces_without_end_is_bounded(
    chains: ExternalBlocks, medium: str, with_tokens: bool
) -> None:
    """One that never announces removals would fill the router's memory, whatever it says of the blocks."""
    chains.capacity, held, given = 8, set(), 200
    for number in range(given):
        tokens = range(number * 4, number * 4 + 4) if with_tokens else ()
        held.update(chains.stored(Stored(None, [number], list(tokens), 4 if with_tokens else 0, medium)))
        held.difference_update(chains.trimmed())
        chains.check()

    kept = 8 if medium == "GPU" and with_tokens else 8 * COPIES_PER_BLOCK
    assert chains.dropped == given - kept
    newest = [keys(range(number * 4, number * 4 + 4))[0] for number in range(given - 8, given)]
    assert held == (set(newest) if medium == "GPU" and with_tokens else set())
    assert all(key in chains for key in held)


def test_an_event_larger_than_the_engine_leaves_its_first_blocks(chains: ExternalBlocks) -> None:
    """Without the blocks before them, the last ones are worth nothing."""
    chains.capacity = 2

    new = chains.stored(stored(None, [1, 2, 3, 4], range(16)))

    assert sorted(chains.trimmed()) == sorted(keys(range(16))[2:])
    assert [key in chains for key in new] == [True, True, False, False]
    assert chains.removed([3, 4]) == []
    assert chains.removed([1, 2]) == keys(range(16))[:2]


@pytest.mark.parametrize("capacity", [5, 40])
def test_a_prefix_in_use_outlives_chains_that_are_not(chains: ExternalBlocks, capacity: int) -> None:
    """A system prompt is stored once, before all chats that begin with it: the oldest blocks are the most useful."""
    system, chats = range(1000, 1012), 200
    chains.capacity = capacity
    chains.stored(stored(None, [1, 2, 3], system))
    for number in range(chats):
        chains.stored(stored(3, [100 + number], range(number * 4, number * 4 + 4)))
        chains.trimmed()

    assert [key in chains for key in keys(system)] == [True] * 3
    newest = keys([*system, *range(chats * 4 - 4, chats * 4)])
    assert newest[-1] in chains
    assert capacity * 7 // 8 <= len(chains) <= capacity


def test_blocks_that_form_a_circle_are_dropped_like_others(chains: ExternalBlocks) -> None:
    """No engine means that, but a router must not search it for ever."""
    chains.capacity = 1
    chains.stored(stored(None, [1], range(4)))
    chains.stored(stored(1, [2], range(4, 8)))
    chains.removed([1])
    chains.stored(stored(2, [1], range(8, 12)))

    assert len(chains.trimmed()) == 1


def test_places_are_bounded(chains: ExternalBlocks) -> None:
    """An engine that invents a medium for each event would make each look-up slower."""
    for number in range(MAX_PLACES + 5):
        chains.stored(stored(None, [number], range(4), medium=f"M{number}"))

    assert chains.unplaced["no_place"] == 5
    chains.check()


def test_places_that_were_cleared_count(chains: ExternalBlocks) -> None:
    """An engine that invents ranks and clears each of them would still add ranks, rules and sizes without end."""
    for rank in range(MAX_PLACES + 5):
        chains.stored(stored(None, [1], range(4)), rank)
        chains.cleared(rank)

    assert chains.unplaced["no_place"] == 5
    assert len(chains) == 0
