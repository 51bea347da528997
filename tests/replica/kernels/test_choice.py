"""Kernels are chosen by device and installed packages; their tests run wherever Triton can be installed."""

import importlib.util
import platform

import pytest
import torch

from homing.replica.errors import StartupError
from homing.replica.kernels.choice import check_launch, choose_kernels, compiled_problem, triton_problem


def test_triton_serves_cuda_alone():
    """The reason is logged, so it must name what is missing."""
    assert triton_problem(torch.device("cuda"), installed=True) is None
    assert "not installed" in (triton_problem(torch.device("cuda"), installed=False) or "")
    assert "cpu" in (triton_problem(torch.device("cpu"), installed=True) or "")


def test_cpu_gets_compiled_kernels():
    """Triton may be installed anyway, for its interpreter."""
    assert choose_kernels(torch.device("cpu"), torch.bfloat16).name == "compiled"


def test_dtypes_without_compiled_kernels_get_plain_torch():
    """For example float16 on a CPU; the reason is logged."""
    assert choose_kernels(torch.device("cpu"), torch.float16).name == "torch"
    assert "float16 is not one of bfloat16, float32" in (compiled_problem(torch.float16) or "")


@pytest.mark.skipif((platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="no Triton build")
def test_triton_is_there_to_be_tested():
    """`make setup` installs it with or without a GPU; without it, kernels would silently go untested."""
    assert importlib.util.find_spec("triton") is not None


def test_fresh_tensors_are_poisoned():
    """A kernel that leaves out an output must be noticed, even where fresh memory happens to hold zeros."""
    assert bool(torch.empty(1000).isnan().all())
    assert bool(torch.empty(10, dtype=torch.bfloat16).isnan().all())
    assert bool((torch.empty(1000, dtype=torch.int64) == torch.iinfo(torch.int64).max).all())


def test_a_first_launch_that_fails_names_what_to_install(monkeypatch, tmp_path):
    """Triton builds a C module for its first launch, and a slim image has no compiler."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)

    def launch():
        raise RuntimeError("Failed to find C compiler.")

    with pytest.raises(StartupError, match=r"Failed to find C compiler.*no C compiler on the PATH.*gcc python3-dev"):
        check_launch(launch)


def test_a_launch_that_works_is_no_problem():
    """The check itself must not prevent a replica from starting."""
    check_launch(lambda: None)
