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


@st.composite
def histories(draw: st.DrawFn) -> tuple[set[int], list[Step]]:
    """A set of resident blocks, and steps that announce only first stores and last removals."""
    resident = draw(st.sets(NUMBERS))
    held, steps = set(resident), []
    for _ in range(draw(st.integers(1, 4))):
        step: Step = []
        for _ in range(draw(st.integers(1, 6))):
            step.append(_draw_change(draw, held))
        steps.append(step)
    return resident, steps


def _draw_change(draw: st.DrawFn, held: set[int]) -> Change:
    kind = draw(st.integers(0, 9))
    if kind == 0:
        held.clear()
        return AllCleared()
    chosen = draw(st.sets(NUMBERS, min_size=1, max_size=4))
    if kind < 5 and chosen & held:
        gone = sorted(chosen & held)
        held.difference_update(gone)
        return RemovedBlocks(tuple(block(n) for n in gone))
    fresh = sorted(chosen - held)
    held.update(fresh)
    return StoredBlocks(None, tuple(block(n) for n in fresh), tokens(*fresh))


def fold(held: set[bytes], step: Step) -> set[bytes]:
    """The set after applying the changes in order."""
    held = set(held)
    for change in step:
        match change:
            case StoredBlocks(_, hashes, _, _):
                held |= set(hashes)
            case RemovedBlocks(hashes):
                held -= set(hashes)
            case AllCleared():
                held = set()
    return held


@given(histories())
def test_an_arranged_step_has_the_same_effect_and_coalesced_removals(history: tuple[set[int], list[Step]]) -> None:
    """Readers apply a batch in order, so blocks stored and removed in one step must end in the same state."""
    resident, steps = history
    held = {block(n) for n in resident}
    for step in steps:
        arranged = net_changes(step)

        assert fold(held, arranged) == fold(held, step)
        kinds = [type(change) for change in arranged]
        assert kinds.count(RemovedBlocks) <= 2
        assert kinds.count(AllCleared) <= 1
        held = fold(held, step)


@given(histories())
def test_a_loss_keeps_the_net_effect_of_all_its_steps(history: tuple[set[int], list[Step]]) -> None:
    """The publisher's own record must stay exact although the batches are never sent."""
    resident, steps = history
    held, lost = {block(n) for n in resident}, LostSteps()
    expected = held
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
