"""What is launched before a replica is ready works on any device; tests/gpu/compile.py shows that it is enough."""

from dataclasses import replace

import pytest

from homing.replica.kernels.triton.warm_up import launches
from homing.replica.models.spec import KvShape, ModelSpec

SPEC = ModelSpec((KvShape(1, 16, 16),) * 2, 40, 64, (), "float32", 4, query_heads=2)


@pytest.mark.parametrize("spec", [SPEC, replace(SPEC, dtype="bfloat16").with_kv("fp8")], ids=["float32", "8 bits"])
def test_every_launch_works(spec, device):
    """One after the other: Triton's interpreter, unlike its compiler, works in one thread only."""
    calls = launches(spec, 16, device)

    for call in calls:
        call()

    assert len(calls) == 4  # layers of one shape share their kernels
