"""Tries an attention library once before it serves: it must run on this device, and its results must be right.

The steps are small, but have what may be wrong in a library: several rows, pages in any order, rows that end in their
first, last or middle slot, a chunk after a cached prefix, decodes, and every layer's own rule.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from ..engine.step_plan import PlanRow, StepPlan, lay_out, plan_of_rows
from ..kernels.base import TorchKernels
from ..models.base import AttentionRule
from ..models.spec import KvShape, ModelSpec
from .paged import Batch, KvPool, PagedAttention

#: Largest accepted error of a step's results, relative to their norm. Rounding to bfloat16 gives about 0.004.
MAX_ERROR = 0.02
#: The two rows' pages. Page 0 is the null block.
TABLES = ([5, 2, 4, 8], [1, 6, 3, 7])

Made = Callable[[KvPool], PagedAttention]


def trial_problem(make: Made, pool: KvPool, rules: Iterable[AttentionRule], query_heads: int) -> str | None:
    """Why the backend that `make` returns for a pool cannot be used on pools like `pool`, or None.

    Compares it with plain torch. `rules`: one per layer; `query_heads` 0: as many as KV heads.
    """
    for shape, rule in _kinds(pool, rules):
        try:
            error = _error(make, _one_layer(pool, shape), rule, query_heads)
        except Exception as failure:  # libraries assert, and raise errors of their own
            return f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
        if not error < MAX_ERROR:
            return f"its results differ from the exact ones by {error:.1%}"
    return None


def _kinds(pool: KvPool, rules: Iterable[AttentionRule]) -> list[tuple[KvShape, AttentionRule]]:
    """One layer of each shape and kind of rule. Windows are so short that some tokens are outside them."""
    found: dict[object, tuple[KvShape, AttentionRule]] = {}
    for keys, values, rule in zip(pool.keys, pool.values, rules, strict=True):
        shape = KvShape(keys.shape[2], keys.shape[3], values.shape[3])
        window = None if rule.window is None else min(rule.window, pool.block_size + 2)
        kind = (shape, rule.scale, window, rule.softcap, rule.sinks is None)
        found.setdefault(kind, (shape, replace(rule, window=window)))
    return list(found.values())


def _one_layer(pool: KvPool, shape: KvShape) -> KvPool:
    keys = pool.keys[0]
    spec = ModelSpec((shape,), 1, 1, (), "", keys.itemsize)
    return KvPool(spec, 1 + sum(map(len, TABLES)), pool.block_size, keys.dtype, keys.device)


def trial_steps(size: int) -> list[StepPlan]:
    """Two prompts; a decode beside a chunk after a prefix; two decodes. They end in a row's third page or later."""
    first, second = TABLES
    first_end, second_end = size + 1, 2 * size - 1
    chunk = PlanRow([0] * size, first_end, first)
    return [
        plan_of_rows(0, [PlanRow([0] * first_end, 0, first), PlanRow([0] * second_end, 0, second)]),
        plan_of_rows(1, [PlanRow([0], second_end, second), chunk]),
        plan_of_rows(2, [PlanRow([0], first_end + size, first), PlanRow([0], second_end + 1, second)]),
    ]


def _error(make: Made, pool: KvPool, rule: AttentionRule, query_heads: int) -> float:
    """The largest error of the trial's steps."""
    keys, values = pool.keys[0], pool.values[0]
    heads = query_heads or (keys.shape[2] if rule.sinks is None else len(rule.sinks))
    sizes = (heads, keys.shape[3]), (keys.shape[2], keys.shape[3]), (values.shape[2], values.shape[3])
    exact, tried = PagedAttention(pool, TorchKernels()), make(pool)
    errors: list[torch.Tensor] = []
    generator = torch.Generator().manual_seed(0)
    for plan in trial_steps(pool.block_size):
        batch = Batch.on_device(lay_out(plan, pool.block_size), keys.device)
        q, k, v = (
            torch.randn(len(batch.slots), *size, generator=generator).to(keys.device, keys.dtype) for size in sizes
        )
        found = []
        for each in (exact, tried):
            each.begin(batch)
            found.append(each(0, q, k, v, rule).double())
        errors.append((found[1] - found[0]).norm() / found[0].norm())
    return float(torch.stack(errors).max())  # NaN if one of them is
