"""Changes passed from the engine's thread to the publisher's: arranged, merged into losses, never blocking."""

from hypothesis import given
from hypothesis import strategies as st

from homing.events.publish.step_changes import (
    AllCleared,
    Change,
    LostSteps,
    Mailbox,
    RemovedBlocks,
    Step,
    StoredBlocks,
    net_changes,
)

from ..fakes import block, tokens

NUMBERS = st.integers(0, 12)
MEDIA = ("GPU", "CPU")
#: A block in a medium.
Copy = tuple[str, bytes]
COPIES = st.tuples(st.sampled_from(MEDIA), NUMBERS.map(block))


@st.composite
def histories(draw: st.DrawFn) -> tuple[set[Copy], list[Step]]:
    """A set of resident blocks, and steps that announce only first stores and last removals in each medium."""
    resident = draw(st.sets(COPIES))
    held, steps = set(resident), []
    for _ in range(draw(st.integers(1, 4))):
        step: Step = []
        for _ in range(draw(st.integers(1, 6))):
            step.append(_draw_change(draw, held))
        steps.append(step)
    return resident, steps


def _draw_change(draw: st.DrawFn, held: set[Copy]) -> Change:
    kind, medium = draw(st.integers(0, 9)), draw(st.sampled_from(MEDIA))
    if kind == 0:
        held.clear()
        return AllCleared()
    chosen = {(medium, block(number)) for number in draw(st.sets(NUMBERS, min_size=1, max_size=4))}
    if kind < 5 and chosen & held:
        gone = sorted(chosen & held)
        held.difference_update(gone)
        return RemovedBlocks(tuple(name for _, name in gone), medium)
    fresh = sorted(chosen - held)
    held.update(fresh)
    names = tuple(name for _, name in fresh)
    return StoredBlocks(None, names, tokens(*[name[-1] for name in names]), medium=medium)


def fold(held: set[Copy], step: Step) -> set[Copy]:
    """The set after applying the changes in order."""
    held = set(held)
    for change in step:
        match change:
            case StoredBlocks(hashes=hashes, medium=medium):
                held |= {(medium, name) for name in hashes}
            case RemovedBlocks(hashes, medium):
                held -= {(medium, name) for name in hashes}
            case AllCleared():
                held = set()
    return held


@given(histories())
def test_an_arranged_step_has_the_same_effect_and_coalesced_removals(history: tuple[set[Copy], list[Step]]) -> None:
    """Readers apply a batch in order, so blocks stored and removed in one step must end in the same state."""
    resident, steps = history
    held = resident
    for step in steps:
        arranged = net_changes(step)

        assert fold(held, arranged) == fold(held, step)
        removals = [change.medium for change in arranged if isinstance(change, RemovedBlocks)]
        assert all(removals.count(medium) <= 2 for medium in MEDIA)
        assert sum(isinstance(change, AllCleared) for change in arranged) <= 1
        held = fold(held, step)


@given(histories())
def test_a_loss_keeps_the_net_effect_of_all_its_steps(history: tuple[set[Copy], list[Step]]) -> None:
    """The publisher's own record must stay exact although the batches are never sent."""
    resident, steps = history
    held, expected, lost = resident, resident, LostSteps()
    for step in steps:
        lost.add(step)
        expected = fold(expected, step)

    assert fold(held, lost.changes()) == expected
    assert lost.batches == len(steps)


def test_a_loss_keeps_the_salt_with_the_first_block_of_its_chain() -> None:
    """A snapshot after the loss must still distinguish tenants."""
    lost = LostSteps()
    lost.add([StoredBlocks(None, (block(1), block(2)), tokens(1, 2), "ann")])

    assert [(change.hashes, change.salt) for change in lost.changes() if isinstance(change, StoredBlocks)] == [
        ((block(1),), "ann"),
        ((block(2),), ""),
    ]


def test_a_loss_is_bounded_by_the_cache_and_not_by_time() -> None:
    """A publisher that hangs for minutes must not fill the engine's memory."""
    lost = LostSteps()
    for n in range(10_000):
        lost.add([StoredBlocks(None, (block(n),), tokens(n)), RemovedBlocks((block(n),))])

    assert lost.changes() == []
    assert lost.batches == 10_000


def test_a_full_mailbox_melts_steps_into_a_numbered_loss_in_its_place() -> None:
    """The engine never waits, and a step after the loss is delivered after it."""
    mailbox = Mailbox(2)
    steps: list[Step] = [[StoredBlocks(None, (block(n),), b"")] for n in range(5)]
    assert [mailbox.put(step) for step in steps[:4]] == [True, True, False, False]
    assert mailbox.take() == steps[0]
    assert mailbox.take() == steps[1]
    assert mailbox.put(steps[4])

    lost = mailbox.take()
    assert isinstance(lost, LostSteps)
    assert lost.batches == mailbox.lost_batches == 2
    assert lost.changes() == [StoredBlocks(None, (block(n),), b"") for n in (2, 3)]
    assert mailbox.take() == steps[4]
    assert mailbox.take() is None
