"""Chooses the attention backend. `choose` is pure: it maps facts to a name and the reasons against better backends."""

import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from types import MappingProxyType
from typing import Literal, get_args

import torch

from ..errors import StartupError
from ..kernels.base import TorchCpuKernels, TorchKernels
from ..kernels.choice import choose_kernels, compiled_problem
from ..models.base import AttentionRule
from .flash import FLASH3_MODULES, Flash4Attention, FlashAttention, load_flash2, load_flash3, load_flash4
from .paged import KvPool, PagedAttention
from .trial import trial_problem

logger = logging.getLogger(__name__)

Name = Literal["flash4", "flash3", "flash2", "triton", "cpu-compiled", "cpu-scratch", "reference"]
#: Best first; the last one works everywhere.
NAMES: tuple[Name, ...] = get_args(Name)
#: Dtypes and the largest head dim that FlashAttention's kernels support.
FLASH_DTYPES = ("bfloat16", "float16")
FLASH_MAX_DIM = 256
#: Backends that need a library, and functions that load it, from pool, kernels and the device's compute capability.
Libraries = Mapping[Name, Callable[[KvPool, TorchKernels, tuple[int, int]], PagedAttention]]
LIBRARIES: Libraries = {
    "flash4": lambda pool, kernels, device: Flash4Attention(pool, kernels, load_flash4(), splits=device >= (10, 0)),
    "flash3": lambda pool, kernels, _: FlashAttention(pool, kernels, load_flash3(), mixes=True),
    "flash2": lambda pool, kernels, _: FlashAttention(pool, kernels, load_flash2(), mixes=False),
}


@dataclass(slots=True, frozen=True)
class Facts:
    device: str
    capability: tuple[int, int]  #: of a CUDA device, else (0, 0)
    dtype: str
    head_dims: tuple[int, ...]  #: all that occur, of keys and of values
    installed: frozenset[str]  #: subset of triton, flash_attn, flash_attn_3, flash_attn_4
    compiled_problem: str | None  #: why the CPU kernels cannot be compiled for this dtype, or None


def problems(name: Name, facts: Facts) -> list[str]:
    """All reasons why a backend cannot be used; empty if it can."""
    if name == "reference":
        return []
    device = "cpu" if name.startswith("cpu") else "cuda"
    if facts.device != device:
        return [f"works on {device}, not on {facts.device}"]
    if device == "cpu":
        return [facts.compiled_problem] if name == "cpu-compiled" and facts.compiled_problem else []
    least = {"flash4": (9, 0), "flash3": (9, 0)}.get(name, (8, 0))
    # With FlashAttention for prefill, the Triton kernels still decode and handle what the library does not support.
    found = [] if "triton" in facts.installed else ["triton is not installed"]
    if facts.capability < least:
        needed, present = (".".join(map(str, each)) for each in (least, facts.capability))
        found.append(f"needs compute capability {needed}, this device has {present}")
    if name == "triton":
        return found
    if name == "flash3" and facts.capability >= (10, 0):
        found.append("FlashAttention 3 supports only compute capability 9.0")
    if name == "flash4" and facts.capability >= (12, 0):
        found.append("flash-attn-4 has no paged KV for compute capability 12.0")
    package = {"flash4": "flash_attn_4", "flash2": "flash_attn"}.get(name, "flash_attn_3")
    if package not in facts.installed:
        found.append(f"{package} is not installed" + (": pip install 'homing[flash-attn]'" if name == "flash4" else ""))
    if facts.dtype not in FLASH_DTYPES:
        found.append(f"dtype {facts.dtype} is not one of {', '.join(FLASH_DTYPES)}")
    if name == "flash4" and facts.capability >= (10, 0) and (between := [d for d in facts.head_dims if 128 < d < 256]):
        found.append(f"head dims {between} are not supported on compute capability 10.0, only up to 128 and 256")
    wrong = sorted({dim for dim in facts.head_dims if dim > FLASH_MAX_DIM or dim % 8})
    if wrong:
        found.append(f"head dims {wrong} are above {FLASH_MAX_DIM} or not multiples of 8")
    return found


def fp8_kv_problem(capability: tuple[int, int] | None, dtype: str) -> str | None:
    """The reason why FP8 KV cannot be used with weights of `dtype`, or None; `capability` None: not a CUDA device."""
    if capability is None:
        return None
    if capability < (8, 9):
        return "it needs compute capability 8.9, this device has {}.{}".format(*capability)
    return None if dtype in FLASH_DTYPES else f"on CUDA dtype {dtype} is not one of {', '.join(FLASH_DTYPES)}"


def choose(facts: Facts, broken: Mapping[Name, str] = MappingProxyType({})) -> tuple[Name, dict[Name, list[str]]]:
    """The best backend without problems, and the problems of each better one. `broken`: those that failed a trial."""
    refused: dict[Name, list[str]] = {}
    for name in NAMES:
        found = problems(name, facts) or [broken[known] for known in broken if known == name]
        if not found:
            return name, refused
        refused[name] = found
    raise AssertionError("the last backend works everywhere")


def choose_attention(
    pool: KvPool,
    device: torch.device,
    wanted: str = "auto",
    *,
    rules: Sequence[AttentionRule],
    query_heads: int = 0,
    libraries: Libraries = LIBRARIES,
) -> PagedAttention:
    """The wanted backend, or with "auto" the best usable one; logs why better ones are not. Raises StartupError.

    A library is tried before it is used: it may not load beside this torch, or not work on this device. `rules`: one
    per layer; `query_heads`: 0 if not known.
    """
    facts, broken = _facts_of(pool, device), dict[Name, str]()
    while True:
        chosen, refused = _chosen(facts, broken, wanted)
        attention, problem = _made(chosen, pool, device, facts, rules, query_heads, libraries)
        if attention is not None:
            for name, reasons in refused.items():
                logger.info("attention_unusable backend=%s reasons=%r", name, "; ".join(reasons))
            logger.info("attention_chosen backend=%s device=%s block_size=%d", chosen, device, pool.block_size)
            return attention
        broken[chosen] = problem


def _chosen(facts: Facts, broken: Mapping[Name, str], wanted: str) -> tuple[Name, dict[Name, list[str]]]:
    """As `choose`, or the backend that the settings name. Raises StartupError if that one cannot be used."""
    if wanted == "auto":
        return choose(facts, broken)
    name = next(name for name in NAMES if name == wanted)
    found = problems(name, facts) or [broken[known] for known in broken if known == name]
    if found:
        raise StartupError(f"attention_backend: {wanted} cannot be used: {'; '.join(found)}; use auto")
    return name, {}


def _made(
    name: Name,
    pool: KvPool,
    device: torch.device,
    facts: Facts,
    rules: Sequence[AttentionRule],
    query_heads: int,
    libraries: Libraries,
) -> tuple[PagedAttention | None, str]:
    """The backend of this name; None and the reason if its library does not load or fails a trial."""
    if name == "reference":
        return PagedAttention(pool, TorchKernels()), ""
    if name == "cpu-scratch":
        return PagedAttention(pool, TorchCpuKernels()), ""
    kernels = choose_kernels(device, pool.keys[0].dtype)
    if name not in libraries:
        return PagedAttention(pool, kernels), ""
    try:
        attention = libraries[name](pool, kernels, facts.capability)
    except Exception as error:  # compiled for another torch, or without a library or driver that it needs
        return None, f"cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    problem = trial_problem(lambda tried: libraries[name](tried, kernels, facts.capability), pool, rules, query_heads)
    return (attention, "") if problem is None else (None, problem)


def _facts_of(pool: KvPool, device: torch.device) -> Facts:
    """The facts about this process, device and pool. Detects optional packages without importing them."""
    dtype = pool.keys[0].dtype
    installed = {"triton"} if importlib.util.find_spec("triton") else set()
    # By distribution, because flash-attn-4 also installs into flash_attn.
    names = {"flash-attn": "flash_attn", "flash-attn-4": "flash_attn_4"}
    installed |= {names[name] for name in names if _has_distribution(name)}
    if any(importlib.util.find_spec(name.split(".")[0]) for name in FLASH3_MODULES):
        installed.add("flash_attn_3")
    return Facts(
        device=device.type,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0),
        dtype=str(dtype).removeprefix("torch."),
        head_dims=tuple(sorted({tensor.shape[3] for tensor in (*pool.keys, *pool.values)})),
        installed=frozenset(installed),
        compiled_problem=compiled_problem(dtype) if device.type == "cpu" else None,
    )


def _has_distribution(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
