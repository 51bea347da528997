"""Simulated autoscaling: no request is lost while replicas come and go, and the mean stays below the maximum."""

from dataclasses import replace

import pytest

from homing.cluster.control.autoscale import ScalingTerms
from homing.cluster.lab.simulate.replica import ReplicaLimits
from homing.cluster.lab.simulate.runs import Setup
from homing.cluster.lab.simulate.scaling import Scaled, run_scaled
from homing.cluster.lab.simulate.workload import Arrival, Chats, conversations

SETUP = Setup(limits=ReplicaLimits(blocks=1000, block_tokens=100))
CHATS = Chats(requests=600, block_tokens=100, rate_per_s=30.0, system_tokens=4000, turn_tokens=1000, output_tokens=20)


def waves() -> list[Arrival]:
    """Two bursts of requests with a long pause between them."""
    first = list(conversations(CHATS))
    gap = first[-1].at_s + 600.0
    return [*first, *(replace(arrival, at_s=arrival.at_s + gap) for arrival in first)]


def scaled(terms: ScalingTerms, start_s: float = 10.0) -> Scaled:
    return run_scaled(SETUP, waves(), terms, start_s=start_s, cpu_s=lambda: 0.0)


@pytest.mark.parametrize("least", [0, 1])
def test_every_request_is_answered_while_replicas_come_and_go(least: int) -> None:
    """With a minimum of zero, the first requests are held until a replica is ready."""
    run = scaled(ScalingTerms(min_replicas=least, max_replicas=6, target_s=0.2, down_after_s=30.0))

    assert run.result.finished == run.result.requests == 1200
    assert run.result.rejected == run.result.moved == 0
    assert run.steps >= 2
    assert (run.result.held > 0) or least
    assert least < run.mean_replicas < 6
    assert run.highest <= 6


def test_equal_runs_are_equal() -> None:
    """Tuning runs must differ only in the tuned setting."""
    terms = ScalingTerms(min_replicas=1, max_replicas=4, target_s=0.2)

    assert scaled(terms) == scaled(terms)
