"""The guard uses LRU's order while the learned order has had fewer hits."""

import pytest

from homing.kvcache.eviction.lru_guard import LONGEST_REST, SHORTEST_REST, WARM_UP, LruGuard


@pytest.fixture
def guard():
    guard = LruGuard()
    for _ in range(WARM_UP):
        guard.turnover(100, 4.0)
    yield guard
    guard.check()


def pass_turnover(guard: LruGuard, *, own: int, lru: int) -> None:
    """One turnover with `own` hits on resident blocks and `lru` hits that LRU would have had."""
    guard.hit(1, min(own, lru), resident=True)
    guard.hit(9, max(0, own - lru), resident=True)
    guard.hit(1, max(0, lru - own), resident=False)
    guard.turnover(100, 4.0)


def rest(guard: LruGuard) -> int:
    """Number of turnovers until the learned order is used again."""
    turnovers = 0
    while not guard.learned:
        pass_turnover(guard, own=50, lru=50)
        turnovers += 1
    return turnovers


def test_the_learned_order_rules_while_it_is_ahead(guard: LruGuard):
    """One bad turnover after good ones must not switch the order."""
    for own in (60, 60, 60, 30):
        pass_turnover(guard, own=own, lru=50)

    assert guard.learned


def test_lru_rules_once_the_learned_order_is_behind(guard: LruGuard):
    """Each relapse doubles the rest, up to a limit."""
    rests = []
    for _ in range(7):
        pass_turnover(guard, own=40, lru=50)
        assert not guard.learned
        rests.append(rest(guard))

    assert rests[:3] == [SHORTEST_REST, 2 * SHORTEST_REST, 4 * SHORTEST_REST]
    assert rests[-1] == LONGEST_REST


def test_a_lead_earns_shorter_rests(guard: LruGuard):
    """Traffic changes, so the cause of the relapses may be gone."""
    for _ in range(3):
        pass_turnover(guard, own=40, lru=50)
        rest(guard)
    for _ in range(8):
        pass_turnover(guard, own=60, lru=50)
    for _ in range(20):
        pass_turnover(guard, own=30, lru=50)
        if not guard.learned:
            break

    assert rest(guard) == SHORTEST_REST


def test_nothing_is_judged_before_the_cache_gives_blocks_up():
    """Before the first eviction, the age at which LRU evicts is unknown."""
    guard = LruGuard()
    for _ in range(WARM_UP):
        pass_turnover(guard, own=0, lru=50)

    assert guard.learned
    guard.check()


def test_a_hit_at_the_very_age_counts_by_its_share():
    """Ages are whole epochs, but LRU's limit lies within one, so hits at that age count in part."""
    guard = LruGuard()
    guard.turnover(100, 2.25)

    for age, share in ((1, 1.0), (2, 0.25), (3, 0.0)):
        before = guard.lru_hits
        guard.hit(age, 8, resident=True)
        assert guard.lru_hits - before == 8 * share
