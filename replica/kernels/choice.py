"""Chooses the kernels: Triton on CUDA, numba on CPUs, and plain torch where neither can be used."""

import functools
import importlib.util
import logging
from collections.abc import Callable

import torch

from ..errors import StartupError
from .base import TorchCpuKernels, TorchKernels
from .toolchain import REMEDY, launcher_problem

log = logging.getLogger(__name__)

#: Dtypes that the CPU kernels support.
COMPILED_DTYPES = (torch.bfloat16, torch.float32)


def triton_problem(device: torch.device, installed: bool) -> str | None:
    """The reason why Triton kernels cannot run on `device`, or None."""
    if device.type != "cuda":
        return f"Triton kernels run on cuda, not on {device.type}"
    return None if installed else "Triton is not installed: pip install triton"


def compiled_problem(dtype: torch.dtype = torch.float32) -> str | None:
    """The reason why kernels for this dtype cannot be compiled on this machine's CPU, or None."""
    if dtype not in COMPILED_DTYPES:
        names = ", ".join(str(each).removeprefix("torch.") for each in COMPILED_DTYPES)
        return f"dtype {str(dtype).removeprefix('torch.')} is not one of {names}"
    return _machine_problem()


@functools.cache
def _machine_problem() -> str | None:
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed: pip install numba"
    try:
        from .cpu.runtime.compilation import openmp

        openmp()
    except (ImportError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def choose_kernels(device: torch.device, dtype: torch.dtype) -> TorchKernels:
    """The best kernels for activations and KV of `dtype` on `device`; logs why better ones cannot be used."""
    on_cpu = device.type == "cpu"
    installed = importlib.util.find_spec("triton") is not None
    problem = compiled_problem(dtype) if on_cpu else triton_problem(device, installed)
    if problem is not None:
        log.info("kernels_chosen kernels=torch reason=%r", problem)
        return TorchCpuKernels() if on_cpu else TorchKernels()
    log.info("kernels_chosen kernels=%s device=%s", "compiled" if on_cpu else "triton", device)
    if on_cpu:
        from .cpu.cpu_kernels import CompiledKernels  # needs numba

        return CompiledKernels()
    _probe(device)
    from .triton.triton_kernels import TritonKernels  # needs Triton

    return TritonKernels()


def measured_on_cpu(heads: int = 32, kv_heads: int = 8, dim: int = 128) -> list[str]:
    """What was measured to be fastest on this processor and why, as sentences; empty if no kernels can be compiled."""
    if compiled_problem() is not None:
        return []
    from ..models.layers import product_choice
    from .cpu.attention.choice import decode_choice, prompt_choice  # needs numba

    found: list[str] = []
    for dtype in COMPILED_DTYPES:
        name = str(dtype).removeprefix("torch.")
        found += [
            f"prompt attention in {name}: {prompt_choice(dtype, heads, kv_heads, dim)}",
            f"decode attention in {name}: {decode_choice(dtype, heads, kv_heads, dim)}",
            f"products in {name}: {product_choice(dtype)}",
        ]
    return found


@functools.cache
def _probe(device: torch.device) -> None:
    """Launch a small kernel once per process, so that a broken setup fails here and not after minutes of loading."""
    from .triton.pointwise import silu_mul

    def launch() -> None:
        silu_mul(torch.zeros(1, 2, device=device))
        torch.cuda.synchronize(device)

    check_launch(launch)


def check_launch(launch: Callable[[], None]) -> None:
    """Call `launch`, the first kernel launch. If it fails, raise StartupError with the remedy."""
    try:
        launch()
    except Exception as error:
        problem = launcher_problem()
        remedy = f"{problem}: {REMEDY}" if problem else "homing doctor checks driver, compiler and headers"
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise StartupError(f"Triton cannot launch a kernel ({reason}); {remedy}") from error
