"""The table that explains a decision."""

from random import Random

import pytest

from homing.router.routing.policy.base import Candidate, Policy
from homing.router.routing.policy.expected_ttft import ExpectedTtft, LeastLoaded
from homing.router.routing.policy.explain import explanation_of
from homing.router.routing.policy.round_robin import RoundRobin

from .cases import PROMPT, candidate


def test_a_decision_explains_itself() -> None:
    """Each replica's row says what was counted, and why the replica was or was not chosen."""
    decision = ExpectedTtft().decide(
        PROMPT, [candidate("r0"), candidate("r1", 60, expected=62), candidate("r2", silent=True)], Random(0)
    )

    explanation = explanation_of(decision)
    table = {row.replica_id: row for row in explanation.replicas}
    assert (table["r1"].held_blocks, table["r1"].expected_blocks, table["r1"].uncached_tokens) == (60, 62, 8)
    assert [row.replica_id for row in explanation.replicas if row.chosen] == ["r1"]
    assert table["r2"].why == "silent"
    assert "later" in table["r0"].why
    assert table["r0"].expected_ttft_s == pytest.approx(0.1)


def test_a_held_request_names_each_obstacle() -> None:
    """Otherwise operators cannot see what it waits for."""
    policy = ExpectedTtft()

    held = explanation_of(
        policy.consider(PROMPT, [candidate("r0", draining=True), candidate("r1", silent=True)], Random())
    )

    assert held.chosen is None
    assert held.why == "held: draining: r0; silent: r1"
    assert explanation_of(policy.consider(PROMPT, [], Random())).why == "no replica has joined"


@pytest.mark.parametrize(
    ("policy", "candidates", "reason"),
    [
        (ExpectedTtft(), [candidate("r0", 62)], "only"),
        (ExpectedTtft(), [candidate("r0", 62), candidate("r1", 61)], "prefix"),
        (ExpectedTtft(), [candidate("r0", 62), candidate("r1", 62, queued_prefill_tokens=900)], "load"),
        (ExpectedTtft(), [candidate("r0", 62), candidate("r1", 62, draining=True)], "prefix"),
        (ExpectedTtft(), [candidate("r0"), candidate("r1", 62, queued_prefill_tokens=4000)], "load"),
        (ExpectedTtft(), [candidate("r0"), candidate("r1", queued_prefill_tokens=4000)], "cold"),
        (ExpectedTtft(), [candidate("r0", draining=True), candidate("r1", silent=True)], "held"),
        (LeastLoaded(), [candidate("r0"), candidate("r1", 62)], "policy"),
        (RoundRobin(), [candidate("r0"), candidate("r1", 62)], "policy"),
    ],
)
def test_the_reason_is_one_of_few_words(policy: Policy, candidates: list[Candidate], reason: str) -> None:
    """The access log gives the same word, so on-call engineers can count the lines with each."""
    assert explanation_of(policy.consider(PROMPT, candidates, Random(0))).reason == reason


def test_a_cost_that_counts_as_equal_is_not_named_as_the_reason() -> None:
    """A decode step that takes 0.1 ms longer is within the error of a prompt that takes 100 ms."""
    candidates = [candidate("r0", waiting=1, decode_step_s=0.0021), candidate("r1", decode_step_s=0.002)]

    explanation = explanation_of(ExpectedTtft().decide(PROMPT, candidates, Random(0)))

    table = {row.replica_id: row for row in explanation.replicas}
    assert table["r0"].others_s > table["r1"].others_s
    assert explanation.why.startswith("equal expected cost")
    assert table["r0"].why == "equally good, not chosen"
