"""Kernels for a CPU run with the instructions of this processor and with those of every other one."""

import pytest

from homing.replica.kernels.cpu.attention import decode, prefill
from homing.replica.kernels.cpu.linear import product
from homing.replica.kernels.cpu.runtime.vectors import NATIVE, WIDENED, dot


@pytest.fixture(params=[pytest.param(NATIVE, id="native"), pytest.param(WIDENED, id="widened")])
def instructions(request, monkeypatch):
    """Those of this processor, and those of every other one."""
    if request.param is NATIVE is not dot():
        pytest.skip("this processor has no products of bfloat16")
    for module in (decode, prefill, product):
        monkeypatch.setattr(module, "dot", lambda: request.param)
