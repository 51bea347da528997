"""Random paged KV whose unused slots are NaN, and attention over it in float64 from its definition."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from homing.replica.kernels.base import PagedRows, TorchCpuKernels, TorchKernels
from homing.replica.models.base import AttentionRule

IMPLEMENTATIONS: tuple[type[TorchKernels], ...] = (TorchKernels,)
if find_spec("triton") is not None:
    from homing.replica.kernels.triton.triton_kernels import TritonKernels

    IMPLEMENTATIONS += (TritonKernels,)
if not torch.cuda.is_available():
    IMPLEMENTATIONS += (TorchCpuKernels,)
    if find_spec("numba") is not None:
        from homing.replica.kernels.cpu.cpu_kernels import CompiledKernels

        IMPLEMENTATIONS += (CompiledKernels,)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
#: Implementations without 8-bit floats (GPUs lack them below compute capability 8.9), and dtypes used with 8-bit KV.
WITHOUT_8_BITS: tuple[str, ...] = ("compiled",)
DTYPES_BESIDE_8_BITS: tuple[torch.dtype, ...] = tuple(TOLERANCE)
if torch.cuda.is_available():
    WITHOUT_8_BITS = ("compiled", "triton") if torch.cuda.get_device_capability() < (8, 9) else ("compiled",)
    DTYPES_BESIDE_8_BITS = (torch.bfloat16,)
OF_8_BITS = tuple(each for each in IMPLEMENTATIONS if each.name not in WITHOUT_8_BITS)


def on_shapes(shapes: Mapping[str, "Shape"], not_compiled: Collection[str]) -> list[Any]:
    """pytest parameters: every implementation on every shape, without the compiled one on `not_compiled`.

    numba compiles a kernel per head dims, group and dtype, which takes two seconds of CPU each.
    """
    return [
        pytest.param(implementation, shape, id=f"{name}-{implementation.__name__}")
        for name, shape in shapes.items()
        for implementation in IMPLEMENTATIONS
        if not (implementation.name == "compiled" and name in not_compiled)
    ]


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 64
    value_dim: int = 64
    page: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None  #: None: the dtype of the queries


def paged(shape: Shape, lengths: Sequence[int], device: torch.device, seed: int = 0) -> PagedRows:
    """Rows of these lengths on shuffled pages; unused slots and table entries are poisoned."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // shape.page) for length in lengths]
    order = (torch.randperm(sum(counts), generator=generator) + 1).int()
    tables = torch.full((len(lengths), max(*counts, 1)), 1 << 30, dtype=torch.int32)
    keys = torch.full((sum(counts) + 1, shape.page, shape.kv_heads, shape.key_dim), float("nan"))
    values = torch.full((sum(counts) + 1, shape.page, shape.kv_heads, shape.value_dim), float("nan"))
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        pages = order[sum(counts[:row]) : sum(counts[: row + 1])]
        tables[row, :count] = pages
        for pool in (keys, values):
            new = torch.randn(length, *pool.shape[2:], generator=generator)
            at = torch.arange(length)
            pool[pages.long()[at // shape.page], at % shape.page] = new
    on = {"device": device}
    return PagedRows(
        keys.to(shape.kv_dtype or shape.dtype).to(**on),
        values.to(shape.kv_dtype or shape.dtype).to(**on),
        tables.to(**on),
        torch.tensor(lengths, dtype=torch.int32, **on),
    )


def exact(q: torch.Tensor, rows: PagedRows, q_lens: Sequence[int], rule: AttentionRule) -> torch.Tensor:
    """Attention in float64 on the CPU; `q` holds the queries of each row's last tokens, row after row."""
    found, first = [], 0
    page = rows.keys.shape[1]
    for row, count in enumerate(q_lens):
        length = int(rows.seq_lens[row])
        at = torch.arange(length)
        pages = rows.tables[row].cpu().long()[at // page]
        group = q.shape[1] // rows.keys.shape[2]
        k, v = (x.cpu()[pages, at % page].double().repeat_interleave(group, 1) for x in (rows.keys, rows.values))
        own = at[length - count :, None]
        seen = (at <= own) & (at > own - (rule.window or length + 1))
        scores = torch.einsum("qhd,khd->hqk", q[first : first + count].cpu().double(), k) * rule.scale
        if rule.softcap is not None:
            scores = (scores / rule.softcap).tanh() * rule.softcap
        scores = scores.masked_fill(~seen, -torch.inf)
        if rule.sinks is not None:
            scores = torch.cat((scores, rule.sinks.cpu().double()[:, None, None].expand(-1, count, 1)), -1)
        weights = scores.softmax(-1)[..., :length]
        found.append(torch.einsum("hqk,khd->qhd", weights, v))
        first += count
    return torch.cat(found)


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative error of the whole tensor; NaN if any element was not written."""
    return float((got.cpu().double() - wanted).norm() / wanted.norm())
