"""Small clusters for simulation tests."""

from typing import Any

from homing.cluster.lab.simulate.delivery import Channel
from homing.cluster.lab.simulate.replica import RateModel, ReplicaLimits
from homing.cluster.lab.simulate.runs import Setup
from homing.cluster.lab.simulate.workload import Arrival

#: 1,000 prompt tokens per second and 10 ms per decode step, so that times can be computed by hand.
MODEL = RateModel(prefill_tokens_per_s=1000.0, step_s=0.01)
BLOCK = 100


def setup_of(policy: str = "expected-ttft", *, blocks: int = 200, batched: int = 8192, **fields: Any) -> Setup:
    """A cluster of small replicas."""
    limits = ReplicaLimits(blocks=blocks, block_tokens=BLOCK, max_batched_tokens=batched)
    values = {"limits": limits, "model": MODEL, "policy": policy, "channel": Channel()}
    return Setup(**(values | fields))


def arrival(
    at_s: float, blocks: list[int], *, tail: int = 0, output: int = 1, text: list[int] | None = None
) -> Arrival:
    """A prompt of these full blocks and `tail` further tokens."""
    tokens = len(blocks) * BLOCK + tail
    return Arrival(at_s, tokens, output, tuple(blocks), None if text is None else tuple(text))
