"""Blocks in the tiers of our replicas: what a request finds, what loading costs, what requests in flight bring up."""

from collections.abc import Mapping, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from homing.events.follow.block_set import Digest
from homing.events.follow.residency import SetResidency
from homing.events.wire.cache_events import CacheEvent, Cleared, Removed, Stored
from homing.events.wire.messages import TIER_MEDIA, TierLoad
from homing.router.backend import FeedState
from homing.router.flow.missing_blocks import evicted
from homing.router.routing.placement import Placement
from homing.router.routing.policy.base import Decision, Prompt
from homing.router.routing.policy.expected_ttft import EVICTING, ExpectedTtft

from ..fakes import description_of, report_of

BLOCK = 16
KEYS = range(1, 63)
PROMPT = Prompt(tokens=1000, blocks=62, block_size=BLOCK, hashes=KEYS)


def placement_of(load_block_s: Mapping[str, float], **report: object) -> Placement:
    """Two live replicas with these tiers, which compute a block in 16 ms."""
    placement = Placement(ExpectedTtft(), router_id="router", silence_s=5.0, rng=Random(1))
    tiers = tuple(TierLoad(medium, 1000, 0, seconds) for medium, seconds in load_block_s.items())
    for name in ("r0", "r1"):
        placement.join(structs.replace(description_of(name), prefill_tokens_per_s=1000.0), 0.0)
        placement.set_feed(name, FeedState.LIVE)
        placement.report(
            name, structs.replace(report_of(step=1, **report), prefill_tokens_per_s=1000.0, tiers=tiers), 0.0
        )
    return placement


def decide(placement: Placement, keys: Sequence[int] = KEYS) -> Decision:
    prompt = structs.replace(PROMPT, hashes=keys)
    return placement.decide(prompt, placement.candidates(keys, (), 0.0, usable=(prompt.tokens - 1) // BLOCK))


def naive(keys: Sequence[int], pool: set[int], tiers: Mapping[str, set[int]]) -> tuple[int, dict[str, int]]:
    """The prefix that a replica can serve, block by block."""
    length, loads = 0, dict[str, int]()
    for key in keys:
        medium = next((name for name in TIER_MEDIA if key in tiers[name]), None)
        if key in pool and not loads:
            length += 1
        elif medium is not None:
            length += 1
            loads[medium] = loads.get(medium, 0) + 1
        else:
            break
    return length, loads


SETS = st.sets(st.integers(1, 12))


@given(pool=st.integers(0, 12), host=SETS, disk=SETS)
def test_a_prefix_goes_on_in_the_tiers_where_the_pool_ends(pool: int, host: set[int], disk: set[int]) -> None:
    """Compared block by block. The pool is prefix-closed, the tiers are not, and may also hold what the pool holds."""
    placement, keys = placement_of({"CPU": 0.001, "DISK": 0.002}), range(1, 13)
    placement.stored("r0", keys[:pool])
    for medium, held in (("CPU", host), ("DISK", disk)):
        placement.stored("r0", sorted(held), medium)

    found = placement.candidates(keys, (), 0.0, usable=len(keys))[0]

    length, loads = naive(keys, set(keys[:pool]), {"CPU": host, "DISK": disk})
    placement.check()
    assert (found.held_blocks, found.pool_blocks, dict(found.slower_blocks)) == (length, pool, loads)
    assert found.expected_blocks == length


EVENTS = st.lists(
    st.one_of(
        st.builds(
            lambda hashes, medium: Stored(None, sorted(hashes), medium=medium),
            SETS,
            st.sampled_from(("GPU", *TIER_MEDIA)),
        ),
        st.builds(lambda hashes, medium: Removed(sorted(hashes), medium), SETS, st.sampled_from(("GPU", *TIER_MEDIA))),
        st.just(Cleared()),
        st.just(None),
    ),
    max_size=20,
)


@given(EVENTS)
def test_the_index_has_each_mediums_blocks_after_whatever_a_replica_announces(events: list[CacheEvent | None]) -> None:
    """None: the replica is lost and comes back empty."""
    placement, held = placement_of({"CPU": 0.001}), {medium: set[int]() for medium in ("GPU", *TIER_MEDIA)}

    def followed() -> SetResidency:
        return SetResidency(placement.blocks_of("r0"), tier=lambda medium: placement.blocks_of("r0", medium))

    reader = followed()
    for event in events:
        match event:
            case None:
                placement.leave("r0")
                placement.join(description_of("r0"), 0.0)
                reader = followed()
                held = {medium: set() for medium in held}
                continue
            case Stored(hashes=hashes, medium=medium):
                held[medium or "GPU"] |= set(hashes)
            case Removed(hashes=hashes, medium=medium):
                held[medium or "GPU"] -= set(hashes)
            case Cleared():
                held = {medium: set() for medium in held}
        reader.apply([event])

    def digest(blocks: set[int]) -> Digest:
        xor = 0
        for each in blocks:
            xor ^= each
        return Digest(len(blocks), xor)

    placement.check()
    assert reader.digest == placement.index.digest("r0") == digest(held["GPU"])
    assert reader.agrees({medium: digest(held[medium]) for medium in TIER_MEDIA if held[medium]})


@pytest.mark.parametrize(
    ("load_block_s", "chosen", "loads"), [(0.001, "r0", 62), (0.0159, "r0", 62), (0.017, "any", 0)]
)
def test_a_prefix_in_host_memory_is_loaded_exactly_if_that_is_faster(
    load_block_s: float, chosen: str, loads: int
) -> None:
    """A block takes 16 ms to compute. What takes longer to load is computed wherever there is less to do."""
    placement = placement_of({"CPU": load_block_s})
    placement.stored("r0", KEYS, "CPU")

    row = decide(placement).row

    assert row is not None
    assert sum(dict(row.candidate.slower_blocks).values()) == loads
    assert row.uncached_tokens == PROMPT.tokens - loads * BLOCK
    assert chosen == "any" or row.candidate.replica_id == chosen


@pytest.mark.parametrize("load_block_s", [0.0005, 0.004, 0.008, 0.012])
@pytest.mark.parametrize("queued_s", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.2, 2.0])
@pytest.mark.parametrize("blocks", [4, 16, 62])
def test_of_going_to_the_holder_and_computing_elsewhere_the_sooner_is_chosen(
    load_block_s: float, queued_s: float, blocks: int
) -> None:
    """A grid of costs, queues and lengths: never later than the better of the two by more than what counts as equal,
    and the work saved for others.
    """
    placement, keys = placement_of({"CPU": load_block_s}), range(1, blocks + 1)
    placement.stored("r0", keys, "CPU")
    queued = int(queued_s * 1000)
    report = structs.replace(
        report_of(step=2, waiting=1 if queued else 0),
        queued_prefill_tokens=queued,
        prefill_tokens_per_s=1000.0,
        tiers=(TierLoad("CPU", 1000, blocks, load_block_s),),
    )
    placement.report("r0", report, 0.0)
    prompt = Prompt(tokens=blocks * BLOCK + 8, blocks=blocks, block_size=BLOCK, hashes=keys)
    decision = placement.decide(prompt, placement.candidates(keys, (), 0.0, usable=blocks))

    rows = {row.candidate.replica_id: row for row in decision.table()}
    go_s = queued / 1000 + blocks * load_block_s + 0.008
    compute_s = (blocks * BLOCK + 8) / 1000
    assert rows["r0"].ttft_s == pytest.approx(go_s, rel=0.02)
    assert rows["r1"].ttft_s == pytest.approx(compute_s, rel=0.02)
    best = min(rows.values(), key=lambda row: row.cost_s)
    assert decision.row is not None
    assert decision.row.cost_s <= best.cost_s * 1.05 + 0.0005
    saved_s = blocks * (BLOCK / 1000 - load_block_s)
    if compute_s + EVICTING * saved_s < 0.9 * go_s:  # even if the saved work counted in full
        assert decision.row.candidate.replica_id == "r1"
    if go_s < 0.9 * compute_s:
        assert decision.row.candidate.replica_id == "r0"


def test_what_a_request_in_flight_brings_up_is_loaded_once() -> None:
    """The second request finds those blocks in the pool when it starts."""
    placement = placement_of({"CPU": 0.001})
    placement.stored("r0", KEYS[:10])
    placement.stored("r0", KEYS[10:40], "CPU")
    first = decide(placement)
    foreseen = placement.foresee(first)
    placement.book(1, first, KEYS, 0.0)
    placement.check()

    second = placement.candidates([*KEYS[:40], *range(100, 122)], (), 0.0)[0]

    assert (foreseen.blocks, foreseen.loads) == (40, (("CPU", 30),))
    assert (second.held_blocks, second.expected_blocks, second.slower_blocks) == (40, 40, ())
    placement.ended("r0", 1)
    placement.check()
    assert placement.candidates(KEYS, (), 0.0)[0].slower_blocks == (("CPU", 30),)


def test_a_block_counts_as_evicted_when_its_last_copy_goes() -> None:
    """Otherwise a miss would be blamed on its way down, long before it was gone."""
    placement = placement_of({"CPU": 0.001})
    placement.stored("r0", [1], "CPU")
    placement.stored("r0", [1])

    placement.removed("r0", [1], "CPU")
    assert evicted(1, 0, placement.past) is None
    placement.removed("r0", [1])

    assert evicted(1, 0, placement.past) is not None


def test_a_replica_that_leaves_takes_its_tiers_along() -> None:
    """It would be credited with them when it comes back, empty."""
    placement = placement_of({"CPU": 0.001})
    placement.stored("r0", KEYS, "CPU")
    placement.leave("r0")
    placement.join(description_of("r0"), 0.0)
    placement.check()

    assert [each.held_blocks for each in placement.candidates(KEYS, (), 0.0)] == [0, 0]
