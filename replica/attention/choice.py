"""Which attention backend serves a device. The choice is pure: facts in, a name and the reasons against others out."""

import importlib.util
import logging
from dataclasses import dataclass
from typing import Literal

import torch

from ..errors import StartupError
from ..kernels.choice import choose_kernels, compiled_problem
from .base import AttentionBackend, KvPool
from .cpu import ScratchAttention
from .flash import FLASH3_MODULES, FlashAttention, load_flash2, load_flash3
from .paged import PagedAttention
from .reference import ReferenceAttention

logger = logging.getLogger(__name__)

Name = Literal["flash3", "flash2", "triton", "cpu-compiled", "cpu-scratch", "reference"]
#: Best first. The last one works everywhere.
NAMES: tuple[Name, ...] = ("flash3", "flash2", "triton", "cpu-compiled", "cpu-scratch", "reference")
#: What FlashAttention's kernels are built for.
FLASH_DTYPES = ("bfloat16", "float16")
FLASH_MAX_DIM = 256
#: What kernels for the CPU are compiled for.
COMPILED_DTYPES = ("bfloat16", "float32")


@dataclass(slots=True, frozen=True)
class Facts:
    """What a choice depends on."""

    device: str
    capability: tuple[int, int]  #: of a CUDA device, else (0, 0)
    dtype: str
    head_dims: tuple[int, ...]  #: of keys and values, all that occur
    block_size: int
    installed: frozenset[str]  #: of triton, flash_attn, flash_attn_3
    compiled_problem: str | None  #: why kernels cannot be compiled for the CPU


@dataclass(slots=True, frozen=True)
class Choice:
    """A backend, and why those before it are not it."""

    name: Name
    refused: dict[Name, list[str]]


def problems(name: Name, facts: Facts) -> list[str]:
    """Why a backend cannot work, all reasons at once; none: it can."""
    match name:
        case "flash3":
            return [*_flash_problems(facts, "flash_attn_3", (9, 0)), *_newer_than_hopper(facts)]
        case "flash2":
            return _flash_problems(facts, "flash_attn", (8, 0))
        case "triton":
            return _triton_problems(facts, (7, 5))
        case "cpu-compiled":
            return [*_off_cpu(facts), *_compiled_problems(facts)]
        case "cpu-scratch":
            return _off_cpu(facts)
        case "reference":
            return []


def choose(facts: Facts) -> Choice:
    """The first backend without problems."""
    refused: dict[Name, list[str]] = {}
    for name in NAMES:
        found = problems(name, facts)
        if not found:
            return Choice(name, refused)
        refused[name] = found
    raise AssertionError("the last backend works everywhere")


def _off_cpu(facts: Facts) -> list[str]:
    return [] if facts.device == "cpu" else [f"works on cpu, not on {facts.device}"]


def _compiled_problems(facts: Facts) -> list[str]:
    found = (
        [] if facts.dtype in COMPILED_DTYPES else [f"dtype {facts.dtype} is not one of {', '.join(COMPILED_DTYPES)}"]
    )
    return found if facts.compiled_problem is None else [*found, facts.compiled_problem]


def _triton_problems(facts: Facts, least: tuple[int, int]) -> list[str]:
    if facts.device != "cuda":
        return [f"works on cuda, not on {facts.device}"]
    found = []
    if "triton" not in facts.installed:
        found.append("triton is not installed")
    if facts.capability < least:
        found.append(f"needs compute capability {_dotted(least)}, this device has {_dotted(facts.capability)}")
    return found


def _flash_problems(facts: Facts, package: str, least: tuple[int, int]) -> list[str]:
    """FlashAttention prefills, our kernels decode: both have to work."""
    found = _triton_problems(facts, least)
    if facts.device != "cuda":
        return found
    if package not in facts.installed:
        found.append(f"{package} is not installed")
    if facts.dtype not in FLASH_DTYPES:
        found.append(f"dtype {facts.dtype} is not one of {', '.join(FLASH_DTYPES)}")
    wrong = sorted({dim for dim in facts.head_dims if dim > FLASH_MAX_DIM or dim % 8})
    if wrong:
        found.append(f"head dims {wrong} are above {FLASH_MAX_DIM} or no multiples of 8")
    return found


def _newer_than_hopper(facts: Facts) -> list[str]:
    return ["FlashAttention 3 is built for compute capability 9.0 alone"] if facts.capability >= (10, 0) else []


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def installed_packages() -> frozenset[str]:
    """Which of the optional packages can be found; nothing is imported."""
    found = {name for name in ("triton", "flash_attn") if importlib.util.find_spec(name)}
    if any(importlib.util.find_spec(name.split(".")[0]) for name in FLASH3_MODULES):
        found.add("flash_attn_3")
    return frozenset(found)


def facts_of(pool: KvPool, device: torch.device) -> Facts:
    """The facts of this process, device and pool."""
    dims = {tensor.shape[3] for tensor in (*pool.keys, *pool.values)}
    return Facts(
        device=device.type,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0),
        dtype=str(pool.keys[0].dtype).removeprefix("torch."),
        head_dims=tuple(sorted(dims)),
        block_size=pool.block_size,
        installed=installed_packages(),
        compiled_problem=compiled_problem() if device.type == "cpu" else None,
    )


def choose_attention(pool: KvPool, device: torch.device, wanted: str = "auto") -> AttentionBackend:
    """The wanted backend, or the best; the log says why not the better ones. Raises StartupError."""
    facts = facts_of(pool, device)
    if wanted == "auto":
        choice = choose(facts)
    else:
        name = next(name for name in NAMES if name == wanted)
        found = problems(name, facts)
        if found:
            raise StartupError(f"attention_backend: {wanted} cannot be used: {'; '.join(found)}; use auto")
        choice = Choice(name, {})
    for name, reasons in choice.refused.items():
        logger.info("attention_unusable backend=%s reasons=%r", name, "; ".join(reasons))
    logger.info("attention_chosen backend=%s device=%s block_size=%d", choice.name, device, facts.block_size)
    return _made(choice.name, pool, device)


def _made(name: Name, pool: KvPool, device: torch.device) -> AttentionBackend:
    match name:
        case "flash3":
            return FlashAttention(pool, choose_kernels(device), load_flash3())
        case "flash2":
            return FlashAttention(pool, choose_kernels(device), load_flash2())
        case "triton":
            return PagedAttention(pool, choose_kernels(device))
        case "cpu-compiled":
            from .compiled import CompiledAttention  # needs numba

            return CompiledAttention(pool, choose_kernels(device))
        case "cpu-scratch":
            return ScratchAttention(pool)
        case "reference":
            return ReferenceAttention(pool)
