"""Tenants' shares of a replica, counted in steps: what one tenant sends must not delay another's first token."""

import pytest

from homing.events.load_report import PrefillCost
from homing.replica.engine.request import RequestPhase, RequestState
from homing.replica.engine.throughput import StepAllowance

from .test_scheduler import Bench

GREEDY, POLITE, THIRD = b"greedy", b"polite", b"third"


def steps_to_first_token(bench: Bench, request: RequestState) -> int:
    """Steps until a request has its first token."""
    for step in range(1, 500):
        bench.step()
        bench.scheduler.check()
        if request.generated:
            return step
    raise AssertionError("no token in 500 steps")


@pytest.mark.parametrize(
    ("limits", "prompt", "asked"),
    [
        pytest.param({"blocks": 4096, "budget": 64}, 60, {"max_tokens": 1}, id="one token each"),
        pytest.param({"blocks": 4096, "budget": 64}, 500, {"max_tokens": 1}, id="prompts of many steps"),
        pytest.param(
            {"blocks": 4096, "budget": 64, "prefill_step": 16}, 60, {"max_tokens": 1}, id="steps of one prompt"
        ),
        pytest.param({"blocks": 4096, "budget": 64}, 4, {"max_tokens": 900}, id="every place taken"),
        pytest.param({"blocks": 64, "budget": 64}, 24, {"max_tokens": 90}, id="no block free"),
        pytest.param({"blocks": 64, "budget": 64}, 100, {"max_tokens": 20}, id="one request holds all blocks"),
        pytest.param({"blocks": 64, "budget": 64}, 124, {"max_tokens": 2}, id="a prompt that fills the pool"),
        pytest.param(
            {"blocks": 4096, "budget": 64}, 500, {"max_tokens": 1, "prompt_logprobs": 20}, id="logprobs of prompts"
        ),
    ],
)
@pytest.mark.parametrize("before", [0, 1, 3, 9])
def test_a_newcomers_short_prompt_is_in_the_next_step(limits: dict, prompt: int, asked: dict, before: int) -> None:
    """However much another tenant has queued or runs, and however long it has been served."""
    bench = Bench(running=8, **limits)
    for number in range(40):
        bench.add([number + 10] * prompt, tenant=GREEDY, **asked)
    for _ in range(before):
        bench.step()

    newcomer = bench.add([1, 2, 3], tenant=POLITE, max_tokens=1)

    assert steps_to_first_token(bench, newcomer) == 1


def test_one_short_prompt_after_another_is_in_the_next_step() -> None:
    """A tenant that uses less than its share never waits, whatever the other one sends."""
    bench = Bench(blocks=256, budget=32, running=8)
    for number in range(40):
        bench.add([number + 10] * 40, tenant=GREEDY, max_tokens=12)

    waits = [steps_to_first_token(bench, bench.add([1, place], tenant=POLITE, max_tokens=1)) for place in range(30)]

    assert set(waits) == {1}


def test_tenants_with_long_queues_get_tokens_by_weight() -> None:
    """Their work differs by at most one step's, whoever came first."""
    bench = Bench(blocks=4096, budget=32, running=8)
    for tenant, weight in ((GREEDY, 1.0), (POLITE, 3.0)):
        for _ in range(60):
            bench.add([ord(tenant[:1])] * 100, tenant=tenant, weight=weight, max_tokens=1, prompt_logprobs=0)
    computed = {GREEDY: 0, POLITE: 0}

    for _ in range(100):
        bench.step()
        for row in bench.rows:
            computed[row.request.tenant] += row.count

    assert abs(computed[POLITE] / 3 - computed[GREEDY]) <= 100


def test_a_step_computes_only_the_prompts_that_it_has_time_for() -> None:
    """A long chunk of one tenant's prompt would be a gap in the other's stream."""
    bench = Bench(blocks=4096, budget=512, running=8)
    bench.add([1, 2], tenant=POLITE, max_tokens=40)
    bench.step()
    bench.add([5] * 1000, tenant=GREEDY, max_tokens=1)
    bench.add([6] * 1000, tenant=THIRD, max_tokens=1)

    assert bench.scheduler.shared
    cost = PrefillCost(prompt_s=0.0, token_s=0.01, pair_s=0.0)
    assert [row.count for row in bench.scheduler.schedule(StepAllowance(0.105, 4, cost))] == [1, 10]
    assert [row.count for row in bench.scheduler.schedule(StepAllowance(0.0, 4, cost))] == [1, 4]
    assert [row.count for row in bench.scheduler.schedule(StepAllowance(0.0, 0, cost))] == [1]
    assert [row.count for row in bench.scheduler.schedule()] == [1, 511]


def test_an_idle_tenant_accumulates_no_credit() -> None:
    """Else one long quiet stream would entitle its tenant to stop all others."""
    bench = Bench(blocks=4096, budget=32, running=8)
    bench.add([3], tenant=THIRD, max_tokens=400)
    for number in range(20):
        bench.add([number + 10] * 100, tenant=GREEDY, max_tokens=1)
    for _ in range(30):
        bench.step()
    for number in range(20):
        bench.add([number + 40] * 100, tenant=THIRD, max_tokens=1)
    computed = {GREEDY: 0, THIRD: 0}

    for _ in range(30):
        bench.step()
        for row in bench.rows:
            computed[row.request.tenant] += row.count

    assert abs(computed[GREEDY] - computed[THIRD]) <= 64


def test_answers_that_grow_take_their_blocks_from_the_tenant_that_holds_most() -> None:
    """A short answer of another tenant would lose least, but must not pay for a flood."""
    bench = Bench(blocks=64, budget=64, running=8)
    for number in range(6):
        bench.add([number + 10] * 12, tenant=GREEDY, max_tokens=60)
    polite = bench.add([1, 2, 3], tenant=POLITE, max_tokens=20)

    gaps = [bench.step() and polite.generated for _ in range(20)]

    assert gaps == list(range(1, 21))
    assert bench.scheduler.preemptions
    bench.run()
    bench.check_end()


def test_a_request_larger_than_its_share_is_passed_only_for_a_while() -> None:
    """Small requests of another tenant go first, but cannot starve it."""
    bench = Bench(blocks=40, budget=64, running=8)
    held = [bench.add([number + 10] * 10, tenant=POLITE, max_tokens=30) for number in range(4)]
    bench.step()
    large = bench.add([9] * 70, tenant=GREEDY, max_tokens=2)

    for number in range(200):
        if large.generated:
            break
        held.append(bench.add([number + 20] * 10, tenant=POLITE, max_tokens=20))
        bench.step()

    assert large.generated
    bench.run()
    bench.check_end()


def test_two_tenants_that_do_not_fit_together_both_finish() -> None:
    """Each preemption for another tenant comes after a token of progress."""
    bench = Bench(blocks=12, block_size=2, budget=4, running=4)
    for number in range(6):
        bench.add([number + 10] * 12, tenant=(GREEDY, POLITE, THIRD)[number % 3], max_tokens=10)

    bench.run()

    bench.check_end()
    assert len(bench.ended) == 6


def test_the_prefix_that_a_newcomer_was_routed_for_outlasts_the_prompts_queued_before_it() -> None:
    """It starts first, so its blocks are evicted last."""
    bench = Bench(blocks=32, budget=16, running=8)
    bench.add([1] * 20, tenant=POLITE, max_tokens=1)
    bench.run()
    for number in range(8):
        bench.add([number + 10] * 14, tenant=GREEDY, max_tokens=3)
    bench.step()

    newcomer = bench.add([*[1] * 20, 2], tenant=POLITE, max_tokens=1)

    assert steps_to_first_token(bench, newcomer) == 1
    assert newcomer.cached_tokens == newcomer.expected_cached >= 18


def test_lanes_of_tenants_that_left_are_forgotten() -> None:
    """Where any key is accepted, clients that keep inventing keys would otherwise exhaust memory."""
    bench = Bench(blocks=64, budget=64, running=8)
    busy = bench.add([5] * 3, tenant=GREEDY, max_tokens=4000 // 40)
    for number in range(2000):
        bench.add([1, 2], tenant=number.to_bytes(2), max_tokens=1)
        bench.step()
        if busy.phase is RequestPhase.FINISHED:
            busy = bench.add([5] * 3, tenant=GREEDY, max_tokens=100)

    assert bench.scheduler.tenants <= 1100


def test_an_answer_that_gives_way_and_starts_again_in_one_step_has_one_row() -> None:
    """Its earlier row is that of an answer; the later one recomputes the prompt."""
    bench = Bench(blocks=6, budget=8, running=3, enabled=False)
    bench.add([7] * 3, max_tokens=4)
    bench.add([7] * 5, max_tokens=3, tenant=GREEDY)

    bench.run()

    bench.check_end()
