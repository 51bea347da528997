"""CPU kernels are tested with this processor's own instructions and with those that every processor has."""

import pytest

from homing.replica.kernels.cpu.attention import decode, prefill
from homing.replica.kernels.cpu.linear import experts, product
from homing.replica.kernels.cpu.runtime.tiles import tiles_usable
from homing.replica.kernels.cpu.runtime.vectors import NATIVE, WIDENED, dot


@pytest.fixture(params=["native", "widened"])
def instructions(request, monkeypatch):
    """Run a test with native bfloat16 products, and with products in widened numbers.

    `tiles`, for kernels that use them: with products by matrix registers.
    """
    if request.param == "tiles":
        if not tiles_usable():
            pytest.skip("this processor has no matrix registers")
        return
    used = NATIVE if request.param == "native" else WIDENED
    if used is NATIVE is not dot():
        pytest.skip("this processor has no bfloat16 products")
    monkeypatch.setattr(prefill, "tiles_usable", lambda: False)
    for module in (decode, prefill, experts, product):
        monkeypatch.setattr(module, "dot", lambda: used)
