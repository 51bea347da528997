"""CPU kernels are tested with this processor's own instructions and with those that every processor has."""

import pytest

from homing.replica.kernels.cpu.attention import decode, prefill
from homing.replica.kernels.cpu.linear import experts, product
from homing.replica.kernels.cpu.runtime.vectors import NATIVE, WIDENED, dot


@pytest.fixture(params=[pytest.param(NATIVE, id="native"), pytest.param(WIDENED, id="widened")])
def instructions(request, monkeypatch):
    """Run a test with native bfloat16 products, and with products in widened numbers."""
    if request.param is NATIVE is not dot():
        pytest.skip("this processor has no bfloat16 products")
    for module in (decode, prefill, experts, product):
        monkeypatch.setattr(module, "dot", lambda: request.param)
