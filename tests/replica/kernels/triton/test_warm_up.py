"""The launches that warm a replica up work on any device; tests/gpu/compile.py shows that they are sufficient."""

from dataclasses import replace

import pytest

from homing.replica.kernels.triton.warm_up import launches
from homing.replica.models.spec import KvShape, ModelSpec

SPEC = ModelSpec((KvShape(1, 16, 16),) * 2, 40, 64, (), "float32", 4, query_heads=2)


@pytest.mark.parametrize("spec", [SPEC, replace(SPEC, dtype="bfloat16").with_kv("fp8")], ids=["float32", "8 bits"])
def test_every_launch_works(spec, device):
    """Sequentially, because Triton's interpreter, unlike its compiler, works in only one thread."""
    calls = launches(spec, 16, device)

    for call in calls:
        call()

    assert len(calls) == 4  # layers of one shape share their kernels
