"""Which kernels serve a device: Triton on CUDA, compiled by numba on a CPU, plain torch where these cannot be used."""

import functools
import importlib.util
import logging

import torch

from .base import Kernels
from .torch_kernels import TorchKernels

log = logging.getLogger(__name__)


def triton_problem(device: torch.device, installed: bool) -> str | None:
    """Why Triton kernels cannot serve `device`, or None."""
    if device.type != "cuda":
        return f"Triton kernels run on cuda, not on {device.type}"
    return None if installed else "Triton is not installed: pip install triton"


@functools.cache
def compiled_problem() -> str | None:
    """Why kernels cannot be compiled for this machine's CPU, or None."""
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed: pip install numba"
    try:
        from .cpu.runtime.openmp import openmp

        openmp()
    except (ImportError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def choose_kernels(device: torch.device) -> Kernels:
    """Kernels for `device`; logs the reason."""
    on_cpu = device.type == "cpu"
    problem = compiled_problem() if on_cpu else triton_problem(device, importlib.util.find_spec("triton") is not None)
    if problem is not None:
        log.info("kernels_chosen kernels=torch reason=%r", problem)
        return TorchKernels()
    log.info("kernels_chosen kernels=%s device=%s", "compiled" if on_cpu else "triton", device)
    # Each needs its package.
    if on_cpu:
        from .cpu.cpu_kernels import CompiledKernels

        return CompiledKernels()
    from .triton.triton_kernels import TritonKernels

    return TritonKernels()
