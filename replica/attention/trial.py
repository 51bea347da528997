"""Tries an attention library once before it serves: it must run on this device, and its results must be right."""

import torch

from ..engine.step_plan import PlanRow, lay_out, plan_of_rows
from ..kernels.base import TorchKernels
from ..models.base import AttentionRule
from .paged import Batch, KvPool, PagedAttention

#: Largest accepted error of a result, relative to its norm. Rounding to bfloat16 gives about 0.004.
MAX_ERROR = 0.02
#: Most tokens of the prompt that is tried.
TOKENS = 64


def trial_problem(attention: PagedAttention, pool: KvPool, query_heads: int) -> str | None:
    """Why `attention` cannot be used on `pool`, or None. Overwrites block 1 and then clears it.

    Compares a prompt and a decode with plain torch, in a layer of each KV shape. `query_heads` 0: as many as KV heads.
    """
    if pool.num_blocks < 2:
        return None
    shapes = {(keys.shape[2:], values.shape[2:]): layer for layer, (keys, values) in enumerate(_layers(pool))}
    for layer in shapes.values():
        try:
            error = _error(attention, pool, layer, query_heads)
        except Exception as failure:  # libraries assert, and raise errors of their own
            return f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
        if not error < MAX_ERROR:
            return f"its results differ from the exact ones by {error:.1%}"
    return None


def _layers(pool: KvPool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(pool.keys, pool.values, strict=True))


def _error(attention: PagedAttention, pool: KvPool, layer: int, query_heads: int) -> float:
    """The larger error of a prompt that fills at most a block and of a decode after it."""
    keys, values = pool.keys[layer], pool.values[layer]
    heads = (query_heads or keys.shape[2], keys.shape[2], keys.shape[2])
    dims = (keys.shape[3], keys.shape[3], values.shape[3])
    tokens, exact = min(pool.block_size, TOKENS), PagedAttention(pool, TorchKernels())
    errors: list[torch.Tensor] = []
    generator = torch.Generator().manual_seed(0)
    rule = AttentionRule(keys.shape[3] ** -0.5)
    for start in {0, tokens - 1}:
        new = tokens - start
        plan = plan_of_rows(0, [PlanRow([0] * new, start, [1])])
        batch = Batch.on_device(lay_out(plan, pool.block_size), keys.device)
        q, k, v = (
            torch.randn(new, count, dim, generator=generator).to(keys.device, keys.dtype)
            for count, dim in zip(heads, dims, strict=True)
        )
        found = []
        for each in (exact, attention):
            each.begin(batch)
            found.append(each(layer, q, k, v, rule).double())
        errors.append((found[1] - found[0]).norm() / found[0].norm())
    keys[1].zero_()
    values[1].zero_()
    return float(torch.stack(errors).max())  # NaN if one of them is
