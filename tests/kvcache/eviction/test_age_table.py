"""Hit densities learned from cohorts, compared with traffic of known density."""

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
    """Each epoch adds a cohort to each lane; half of a lane's cohort is hit after that lane's number of epochs."""
    for _ in range(epochs):
        for lane in (0, 1):
            table.idle(lane, COHORT)
        table.advance()
        for lane, age in hit_after.items():
            if table.epoch >= age:
                table.hit(lane, table.epoch - age, COHORT // 2)


def test_nothing_is_expected_before_anything_was_seen(table: AgeTable):
    """All densities are then equal, and the oldest block is evicted."""
    assert table.density(0, 0) == table.density(1, 0) == 0


def test_the_lane_that_is_hit_is_worth_more(table: AgeTable):
    """Blocks that prompts reuse must stay longer than blocks that they do not."""
    live(table, 10 * AGES, {1: 4})

    assert table.density(1, table.epoch) > 5 * table.density(0, table.epoch)


def test_after_the_age_of_hits_nothing_is_worth_waiting_for(table: AgeTable):
    """Blocks of a finished conversation are useless, however often they were hit before."""
    live(table, 10 * AGES, {1: 4})

    assert table.density(1, table.epoch - 4 - EPOCHS_PER_TURNOVER) < table.density(1, table.epoch) / 5


def test_a_hit_sooner_is_worth_more_than_a_hit_later(table: AgeTable):
    """A block that is hit sooner occupies its space for less time."""
    later = AgeTable(2, EPOCH_BLOCKS)
    live(table, 10 * AGES, {1: 2})
    live(later, 10 * AGES, {1: 20})

    assert table.density(1, table.epoch) > 2 * later.density(1, later.epoch)


def test_what_holds_no_more_is_forgotten(table: AgeTable):
    """Old traffic must not determine the order for ever."""
    live(table, 10 * AGES, {1: 4})
    before = table.density(1, table.epoch)
    live(table, 60 * AGES, {})

    assert table.density(1, table.epoch) < before / 20


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, AGES), st.integers(1, COHORT)), max_size=150))
def test_densities_fall_with_age_and_not_from_lane_to_lane(hits: list[tuple[int, int, int]]):
    """Evictions stay prefix-closed only if it holds for any traffic; `check` asserts it."""
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
