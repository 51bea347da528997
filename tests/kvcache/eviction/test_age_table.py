"""What is learned from cohorts, against traffic whose densities are known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.kvcache.eviction.age_table import AGES, EPOCHS_PER_TURNOVER, AgeTable

COHORT = 1_000
EPOCH_BLOCKS = 1_024


@pytest.fixture
def table():
    made = AgeTable(2, EPOCH_BLOCKS)
    yield made
    made.check()


def live(table: AgeTable, epochs: int, hit_after: dict[int, int]) -> None:
    """In each epoch a cohort in each lane; half of a lane's cohort is hit after so many epochs."""
    for _ in range(epochs):
        for lane in (0, 1):
            table.idle(lane, COHORT)
        table.advance()
        for lane, age in hit_after.items():
            if table.epoch >= age:
                table.hit(lane, table.epoch - age, COHORT // 2)


def test_nothing_is_expected_before_anything_was_seen(table: AgeTable):
    """All are equal then, and the oldest goes."""
    assert table.density(0, 0) == table.density(1, 0) == 0


def test_the_lane_that_is_hit_is_worth_more(table: AgeTable):
    """What prompts come back to must not give way to what they do not."""
    live(table, 10 * AGES, {1: 4})

    assert table.density(1, table.epoch) > 5 * table.density(0, table.epoch)


def test_after_the_age_of_hits_nothing_is_worth_waiting_for(table: AgeTable):
    """A finished conversation's blocks are as dead as those of one that never began, however often they were hit."""
    live(table, 10 * AGES, {1: 4})

    assert table.density(1, table.epoch - 4 - EPOCHS_PER_TURNOVER) < table.density(1, table.epoch) / 5


def test_a_hit_sooner_is_worth_more_than_a_hit_later(table: AgeTable):
    """The block is in the way for less time."""
    later = AgeTable(2, EPOCH_BLOCKS)
    live(table, 10 * AGES, {1: 2})
    live(later, 10 * AGES, {1: 20})

    assert table.density(1, table.epoch) > 2 * later.density(1, later.epoch)


def test_what_holds_no_more_is_forgotten(table: AgeTable):
    """Yesterday's traffic must not decide for ever."""
    live(table, 10 * AGES, {1: 4})
    before = table.density(1, table.epoch)
    live(table, 60 * AGES, {})

    assert table.density(1, table.epoch) < before / 20


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, AGES), st.integers(1, COHORT)), max_size=150))
def test_densities_fall_with_age_and_not_from_lane_to_lane(hits: list[tuple[int, int, int]]):
    """Prefixes stay closed by it, so it must hold for any traffic; `check` asserts it."""
    table = AgeTable(2, EPOCH_BLOCKS)
    left: dict[tuple[int, int], int] = {}
    for lane, age, count in hits:
        for each in (0, 1):
            table.idle(each, COHORT)
            left[each, table.epoch] = COHORT
        cohort = lane, max(0, table.epoch - age)
        hit = min(count, left[cohort])
        left[cohort] -= hit
        table.hit(*cohort, hit)
        table.advance()
        table.check()
