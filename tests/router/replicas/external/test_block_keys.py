"""A foreign engine's announcements in our names."""

from collections import Counter
from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from homing.events.follow.residency import CountedResidency
from homing.events.wire.cache_events import Cleared, Removed, Stored
from homing.kvcache.hashing import BlockHash, BlockHasher, tenant_root, token_bytes, wire_hash
from homing.router.errors import ParityMismatch
from homing.router.replicas.external.block_keys import ExternalBlocks, cache_salt

SIZE = 4
ROOT = BlockHash(bytes(range(16)))
HASHER = BlockHasher(SIZE, 7)


def keys(tokens: Iterable[int], *, salt: bytes = b"") -> list[int]:
    """What a prompt of these tokens is looked up by."""
    return [wire_hash(name) for name in HASHER.chain(tenant_root(ROOT, salt=salt), token_bytes(tokens))]


def stored(parent: int | None, handles: list[int], tokens: Iterable[int], **fields: object) -> Stored:
    """An event of the engine."""
    return Stored(parent, handles, list(tokens), SIZE, **fields)


@pytest.fixture
def chains():
    """Checked after every test."""
    chains = ExternalBlocks("b0", HASHER, ROOT)
    yield chains
    chains.check()


def test_a_block_goes_by_the_hash_of_its_content(chains: ExternalBlocks) -> None:
    """The engine's own hashes are of another kind: only the content tells which prompt hits."""
    first = chains.stored(stored(None, [900, 901], range(8)))
    second = chains.stored(stored(901, [902], range(8, 12)))

    assert first + second == keys(range(12))


def test_a_removal_names_the_handle_and_removes_the_content(chains: ExternalBlocks) -> None:
    """Removals carry nothing but the engine's own hash."""
    chains.stored(stored(None, [900, 901], range(8)))

    assert chains.removed([901]) == keys(range(8))[1:]
    assert chains.removed([901]) == []
    assert chains.unknown_removals == 1


def test_what_was_stored_twice_is_new_once(chains: ExternalBlocks) -> None:
    """vLLM announces each physical copy."""
    chains.stored(stored(None, [900], range(4)))

    assert chains.stored(stored(None, [900, 901], range(8))) == keys(range(8))[1:]


def test_two_handles_of_one_content_are_two_references(chains: ExternalBlocks) -> None:
    """An engine whose hashes depend on more than the content has it twice, and may give up one of both."""
    chains.stored(stored(None, [900], range(4)))
    chains.stored(stored(None, [800], range(4)))

    assert chains.removed([900]) == []
    assert chains.removed([800]) == keys(range(4))


def test_a_chain_behind_an_unknown_parent_is_counted_and_earns_nothing(chains: ExternalBlocks) -> None:
    """Without its beginning nobody knows which prompt it belongs to; guessing would credit what is not there."""
    assert chains.stored(stored(555, [900], range(4))) == []
    assert chains.stored(stored(900, [901], range(4, 8))) == []
    assert chains.unplaced["no_parent"] == 2

    chains.stored(stored(None, [555], range(20, 24)))
    assert chains.stored(stored(555, [900], range(4))) == keys([*range(20, 24), *range(4)])[1:]


def test_tokens_that_are_not_one_block_for_each_hash_name_nothing(chains: ExternalBlocks) -> None:
    """Groups of sliding windows announce blocks without all of their tokens."""
    assert chains.stored(stored(None, [900, 901], range(4))) == []
    assert chains.stored(stored(None, [902], [-1, 0, 0, 0])) == []
    assert chains.unplaced["no_tokens"] == 3


def test_blocks_of_another_size_are_a_loud_refusal(chains: ExternalBlocks) -> None:
    """No prompt would ever hit, silently. Side groups may have sizes of their own."""
    with pytest.raises(ParityMismatch, match="block_size is 16"):
        chains.stored(Stored(None, [900], list(range(16)), 16))

    assert chains.stored(Stored(None, [900], list(range(16)), 16, group=1)) == []


def test_an_adapter_or_an_image_makes_other_blocks_of_the_same_tokens(chains: ExternalBlocks) -> None:
    """Equal tokens under another adapter or around another image have other KV: no hit for a plain prompt."""
    plain = chains.stored(stored(None, [1], range(4)))
    adapter = chains.stored(stored(None, [2], range(4), lora_name="poet"))
    image = chains.stored(stored(None, [3], range(4), extra_keys=[["a picture", 0]]))
    other_image = chains.stored(stored(None, [4], range(4), extra_keys=[["another", 0]]))

    assert len({*plain, *adapter, *image, *other_image}) == 4


def test_a_tenants_salt_comes_back_as_the_tenants_root(chains: ExternalBlocks) -> None:
    """The engine keeps tenants apart by the salt that the router gave it, and so does the index."""
    salt = bytes(range(16))
    told = [[cache_salt(tenant_root(ROOT, salt=salt))]]

    assert chains.stored(stored(None, [1], range(4), extra_keys=told)) == keys(range(4), salt=salt)
    assert chains.stored(stored(1, [2], range(4, 8), extra_keys=[None])) == keys(range(8), salt=salt)[1:]
    assert chains.stored(stored(None, [3], range(4), extra_keys=[["homing-no hex"]])) not in (
        keys(range(4)),
        keys(range(4), salt=salt),
    )


class Engine(RuleBasedStateMachine):
    """An engine that announces every copy, some of them after their parents' names were lost, against a plain bag.

    The oracle hashes each block's whole prompt anew and knows nothing of handles.
    """

    @initialize(seed=st.integers(0, 1 << 16))
    def begin(self, seed: int) -> None:
        self.rng = Random(seed)
        self.residency, self.chains = CountedResidency(), ExternalBlocks("b0", HASHER, ROOT)
        self.index: set[int] = set()
        self.handles: dict[tuple[int, ...], int] = {}
        self.copies: Counter[tuple[str, tuple[int, ...]]] = Counter()
        #: contents that can be named: told with their beginning, and not gone since
        self.named: set[tuple[int, ...]] = set()

    def handle(self, content: tuple[int, ...]) -> int:
        return self.handles.setdefault(content, self.rng.getrandbits(64))

    def tell(self, event: Stored | Removed | Cleared) -> None:
        for left in self.residency.apply([event]):
            match left:
                case Stored():
                    added = self.chains.stored(left)
                    assert not self.index.intersection(added)
                    self.index.update(added)
                case Removed():
                    gone = self.chains.removed(left.hashes)
                    assert self.index.issuperset(gone)
                    self.index.difference_update(gone)
                case Cleared():
                    self.chains.clear()
                    self.index.clear()

    def held(self) -> set[tuple[int, ...]]:
        return {content for (_, content), count in self.copies.items() if count}

    @rule(
        start=st.integers(0, 3),
        letters=st.lists(st.integers(0, 1), min_size=1, max_size=4),
        medium=st.sampled_from("GC"),
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
        self.tell(Removed([handle], "G"))

    @rule()
    def clear(self) -> None:
        self.copies.clear()
        self.named.clear()
        self.tell(Cleared())

    @invariant()
    def the_index_holds_what_can_be_named(self) -> None:
        expected = {keys([letter for letter in content for _ in range(SIZE)])[-1] for content in self.named}
        assert self.index == expected
        self.chains.check()
        self.residency.check()


TestEngine = Engine.TestCase
TestEngine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
