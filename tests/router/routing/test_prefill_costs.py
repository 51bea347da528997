"""The cost of a prefill on each replica, from the measurements of all replicas."""

import random

import pytest

from homing.events.load_report import SUMS, PrefillSums
from homing.events.wire.messages import PrefillCost, PrefillWork
from homing.router.routing.prefill_costs import MEMORY_S, CostPool

COST = PrefillCost(prompt_s=0.01, token_s=2e-5, pair_s=2e-9, context_s=0.0)
RATE = 40_000.0


class Measured:
    """A replica that takes `slowness` times as long as COST says, and reports to `pool`."""

    def __init__(self, pool: CostPool, name: str, slowness: float = 1.0) -> None:
        self.pool, self.name, self.slowness = pool, name, slowness
        self.sums = PrefillSums()

    def run(self, now: float, *prompts: int) -> None:
        for tokens in prompts:
            work = PrefillWork(1, tokens, tokens * tokens / 2, 0.0)
            self.sums.observe(work, COST.total(work) * self.slowness)
        self.pool.report(self.name, self.sums.values, RATE, now)


def costs_of(pool: CostPool) -> dict[str, PrefillCost]:
    """Fit to the end."""
    return dict(filter(None, pool.fitting()))


SHORT = (20, 100, 300, 700) * 10
LONG = (500, 2_000, 8_000) * 10


@pytest.fixture
def pool() -> CostPool:
    return CostPool()


def test_a_replica_knows_of_long_prompts_what_another_has_computed(pool: CostPool) -> None:
    """Its own short prompts do not show it; extrapolations on two replicas would differ by seconds."""
    Measured(pool, "r0").run(0.0, *SHORT)
    Measured(pool, "r1").run(0.0, *LONG)

    costs = costs_of(pool)

    assert costs["r0"].seconds(0, 100_000) == pytest.approx(COST.seconds(0, 100_000), rel=0.05)
    assert costs["r0"].seconds(0, 100_000) == pytest.approx(costs["r1"].seconds(0, 100_000), rel=0.01)


def test_a_replica_that_really_is_slower_stays_so(pool: CostPool) -> None:
    """Machines differ; the pool must not hide this when there is fresh evidence from many steps."""
    replicas = [Measured(pool, "r0"), Measured(pool, "r1"), Measured(pool, "r2", slowness=3.0)]
    for second in range(300):
        for replica in replicas:
            replica.run(float(second), 200, 4_000)
        costs = costs_of(pool)

    assert costs["r2"].seconds(0, 4_000) == pytest.approx(3 * COST.seconds(0, 4_000), rel=0.15)
    assert costs["r0"].seconds(0, 4_000) == pytest.approx(COST.seconds(0, 4_000), rel=0.1)


def test_a_replica_that_was_slow_once_is_taken_for_as_fast_as_the_others_in_the_end(pool: CostPool) -> None:
    """It gets no requests while it seems slow, so no measurement would ever correct it."""
    fast, once = Measured(pool, "r0"), Measured(pool, "r1", slowness=3.0)
    once.run(0.0, *LONG)
    fast.run(0.0, *LONG)
    before = costs_of(pool)
    for second in range(1, round(6 * MEMORY_S)):
        fast.run(float(second), 200, 4_000)
        after = costs_of(pool)

    assert before["r1"].token_s > 2 * before["r0"].token_s
    assert after["r1"].token_s == pytest.approx(after["r0"].token_s, rel=0.05)


def test_new_evidence_outweighs_what_was_long_ago(pool: CostPool) -> None:
    """Otherwise the first request after a slow period would restore the old estimate in full."""
    fast, once = Measured(pool, "r0"), Measured(pool, "r1", slowness=3.0)
    fast.run(0.0, *LONG)
    once.run(0.0, *LONG)
    costs_of(pool)
    fast.run(6 * MEMORY_S, *LONG)
    once.slowness = 1.0
    once.run(6 * MEMORY_S, 200, 4_000)

    costs = costs_of(pool)

    assert costs["r1"].token_s == pytest.approx(costs["r0"].token_s, rel=0.05)


def test_while_all_rest_nothing_is_forgotten(pool: CostPool) -> None:
    """A quiet night must not make different machines look alike."""
    Measured(pool, "r0").run(0.0, *LONG)
    Measured(pool, "r1", slowness=3.0).run(0.0, *LONG)

    costs = costs_of(pool)

    assert costs["r1"].token_s > 2 * costs["r0"].token_s
    assert costs_of(pool) == {}


def test_a_start_anew_and_lost_reports_do_not_matter(pool: CostPool) -> None:
    """Sums cover all steps since the start, so one report includes everything that lost ones contained."""
    Measured(pool, "r0").run(0.0, *LONG, *LONG, *LONG, *LONG, *LONG)
    Measured(pool, "r0").run(1.0, *LONG)

    assert costs_of(pool)["r0"].seconds(0, 8_000) == pytest.approx(COST.seconds(0, 8_000), rel=0.02)


def test_who_has_left_counts_no_longer(pool: CostPool) -> None:
    """Its machine is gone with it."""
    Measured(pool, "r0").run(0.0, *LONG)
    Measured(pool, "r1").run(0.0, *LONG)
    pool.leave("r1")
    pool.leave("never heard of")

    assert list(costs_of(pool)) == ["r0"]


def test_sums_of_another_width_are_left_alone(pool: CostPool) -> None:
    """A replica of a later version may report more sums; its own cost still comes with its load report."""
    pool.report("r0", [1.0] * 21, RATE, now=0.0)

    assert costs_of(pool) == {}


def test_sums_that_no_steps_can_have_neither_raise_nor_change_what_is_known_of_others(pool: CostPool) -> None:
    rng, honest = random.Random(1), Measured(pool, "r0")
    odd = (-1.0, 0.0, 1e-300, 1.0, 7.0, 1e9, 1e300, float("nan"), float("inf"), float("-inf"))
    for turn in range(3_000):
        values = odd if turn % 2 else (0.0, 1e-300, 1.0, 7.0, 1e9)
        pool.report("r1", [rng.choice(values) for _ in range(SUMS)], rng.choice((RATE, *odd)), turn / 10)
        if turn % 100 == 0:
            honest.run(turn / 10, *SHORT, *LONG)
        for cost in costs_of(pool).values():
            assert 0 < cost.seconds(0, 4_000) < float("inf")
        if turn % 7 == 0:
            pool.leave("r1")

    pool.leave("r1")
    honest.run(300.0, *SHORT, *LONG)

    assert costs_of(pool)["r0"].seconds(0, 4_000) == pytest.approx(COST.seconds(0, 4_000), rel=0.05)


def test_a_new_replica_costs_what_the_others_do(pool: CostPool) -> None:
    """Its own guess would draw prompts away from their caches, or make the others look slow."""
    Measured(pool, "r0").run(0.0, *LONG)
    before = costs_of(pool)["r0"]

    pool.report("new", PrefillSums().values, RATE / 20, 1.0)
    costs = costs_of(pool)

    assert costs["new"].seconds(0, 1_000) == pytest.approx(before.seconds(0, 1_000), rel=1e-3)
    assert costs["r0"].seconds(0, 1_000) == pytest.approx(before.seconds(0, 1_000), rel=1e-3)


def test_replicas_that_have_measured_nothing_keep_what_they_say(pool: CostPool) -> None:
    """There is nothing better yet."""
    pool.report("r0", PrefillSums().values, RATE, 0.0)
    pool.report("r1", PrefillSums().values, RATE, 0.0)

    assert costs_of(pool) == {}
