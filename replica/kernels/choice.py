"""Which kernels serve a device: Triton where it is installed and the device is CUDA, else plain torch."""

import importlib.util
import logging

import torch

from .base import Kernels
from .fallback import TorchKernels

log = logging.getLogger(__name__)


def triton_problem(device: torch.device, installed: bool) -> str | None:
    """Why Triton kernels cannot serve `device`, or None."""
    if device.type != "cuda":
        return f"Triton kernels run on cuda, not on {device.type}"
    return None if installed else "Triton is not installed: pip install triton"


def choose_kernels(device: torch.device) -> Kernels:
    """Kernels for `device`; logs the reason."""
    problem = triton_problem(device, importlib.util.find_spec("triton") is not None)
    if problem is not None:
        log.info("kernels_chosen kernels=torch reason=%r", problem)
        return TorchKernels()
    from .fused import TritonKernels  # needs Triton

    log.info("kernels_chosen kernels=triton device=%s", device)
    return TritonKernels()
