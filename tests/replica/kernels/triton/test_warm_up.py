"""What is launched before a replica is ready works on any device; tests/gpu/compile.py shows that it is enough."""

import pytest

from homing.replica.kernels.triton.warm_up import launches
from homing.replica.models.spec import KvShape, ModelSpec

SPEC = ModelSpec((KvShape(1, 16, 16),) * 2, 40, 64, (), "float32", 4, query_heads=2)


@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_every_launch_works(kv, device):
    """One after the other: Triton's interpreter, unlike its compiler, works in one thread only."""
    calls = launches(SPEC.with_kv(kv), 16, device)

    for call in calls:
        call()

    assert len(calls) == 4  # layers of one shape share their kernels
