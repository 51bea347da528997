"""Products of tokens with the experts that they chose, for all experts in one launch and without reading back.

Choices are sorted by expert on the device. The grid is an upper bound on the tiles of ROWS choices of one expert; a
program finds its expert by a search over the experts' first tiles. Weights are read once for each tile.
"""

import torch
import triton
import triton.language as tl

from .pages import dot, row_of, upcasts

#: Outputs and inputs of one step of a tile. Cross-compiled without spills; not run.
OUTPUTS, INPUTS = 64, 64
#: Choices per tile: few where each expert has few, as then reading the weights takes the time.
FEW, MANY = 16, 64


def expert_products(
    x: torch.Tensor, weights: torch.Tensor, places: torch.Tensor, firsts: torch.Tensor, per_row: int
) -> torch.Tensor:
    """`base.TorchKernels.expert_products`."""
    count, (experts, outputs, inputs) = len(places), weights.shape
    out = torch.empty(count, outputs, dtype=x.dtype, device=x.device)
    rows = MANY if count >= MANY * experts else FEW
    _expert_products[(triton.cdiv(count, rows) + experts, triton.cdiv(outputs, OUTPUTS))](
        x, weights, places, firsts, out, experts, per_row, outputs, inputs, x.stride(0), *weights.stride()[:2],
        ROWS=rows, OUTPUTS=OUTPUTS, INPUTS=INPUTS, UPCASTS=upcasts(x), num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["experts", "per_row"])
def _expert_products(
    x, weights, places, firsts, out, experts, per_row, outputs, inputs, x_row, w_expert, w_row, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, UPCASTS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    expert = row_of(firsts, tile, experts, ROWS)
    first = tl.load(firsts + expert)
    stop = tl.load(firsts + expert + 1)
    choice = first + (tile - (first // ROWS + expert)) * ROWS + tl.arange(0, ROWS)
    there = choice < stop
    if tl.sum(there.to(tl.int32), 0) == 0:
        return
    row = tl.load(places + choice, mask=there, other=0) // per_row
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
