"""Products of tokens with their chosen experts, for all experts in one launch and without reading back to the host.

Choices are sorted by expert on the device. A tile is up to ROWS choices of one expert, and the grid is an upper bound
on their number; a program finds its expert by searching the experts' first tiles. Each tile reads the weights once.
"""

import torch
import triton
import triton.language as tl

from .pages import dot, row_of, upcasts

#: Outputs of a program, and inputs per iteration. Cross-compiled without spills; not run.
OUTPUTS, INPUTS = 64, 64
#: Choices per tile. FEW is for few choices per expert, when reading the weights dominates.
FEW, MANY = 16, 64


def expert_products(
    x: torch.Tensor, weights: torch.Tensor, firsts: torch.Tensor, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """`base.TorchKernels.expert_products`."""
    count, (experts, outputs, inputs) = len(x if rows is None else rows), weights.shape
    out = torch.empty(count, outputs, dtype=x.dtype, device=x.device)
    if not count:
        return out
    tile = MANY if count >= MANY * experts else FEW
    _expert_products[(triton.cdiv(count, tile) + experts, triton.cdiv(outputs, OUTPUTS))](
        x, weights, firsts if rows is None else rows, firsts, out, experts, outputs, inputs, x.stride(0),
        *weights.stride()[:2], SORTED=rows is None, ROWS=tile, OUTPUTS=OUTPUTS, INPUTS=INPUTS, UPCASTS=upcasts(x),
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


@triton.jit
def _expert_products(
    x, weights, rows, firsts, out, experts, outputs, inputs, x_row, w_expert, w_row, SORTED: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, UPCASTS: tl.constexpr,
) -> None:  # fmt: skip
    tile = tl.program_id(0)
    expert = row_of(firsts, tile, experts, 1, ROWS)
    first = tl.load(firsts + expert)
    stop = tl.load(firsts + expert + 1)
    choice = first + (tile - (first // ROWS + expert)) * ROWS + tl.arange(0, ROWS)
    there = choice < stop
    if tl.sum(there.to(tl.int32), 0) == 0:
        return
    row = choice.to(tl.int64) if SORTED else tl.load(rows + choice, mask=there, other=0)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    weight_at = weights + expert.to(tl.int64) * w_expert + output[:, None].to(tl.int64) * w_row
    summed = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, inputs, INPUTS):
        i = start + tl.arange(0, INPUTS)
        a = tl.load(x + row[:, None] * x_row + i[None, :], mask=there[:, None] & (i < inputs)[None, :], other=0.0)
        mask = (output < outputs)[:, None] & (i < inputs)[None, :]
        summed += dot(a, tl.trans(tl.load(weight_at + i[None, :], mask=mask, other=0.0)), UPCASTS)
    at = out + choice[:, None].to(tl.int64) * outputs + output[None, :]
    tl.store(at, summed.to(out.dtype.element_ty), mask=there[:, None] & (output < outputs)[None, :])
