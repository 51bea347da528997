"""Kernels are chosen by device and by what is installed."""

import torch

from homing.replica.kernels.choice import choose_kernels, triton_problem


def test_triton_serves_cuda_alone():
    """The reason is logged, so it names what is missing."""
    assert triton_problem(torch.device("cuda"), installed=True) is None
    assert "not installed" in (triton_problem(torch.device("cuda"), installed=False) or "")
    assert "cpu" in (triton_problem(torch.device("cpu"), installed=True) or "")


def test_cpu_gets_plain_torch():
    """Triton may be installed all the same, for its interpreter."""
    assert choose_kernels(torch.device("cpu")).name == "torch"
