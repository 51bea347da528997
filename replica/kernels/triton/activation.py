"""The product of an MLP's gate and its inputs, in one pass."""

import torch
import triton
import triton.language as tl

BLOCK = 1024


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As `base.Kernels.silu_mul`."""
    tokens, features = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(tokens, features, dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        _silu_mul[(tokens, triton.cdiv(features, BLOCK))](
            gate_up, out, features, gate_up.stride(0), BLOCK=BLOCK, num_warps=4
        )
    return out


@triton.jit
def _silu_mul(gate_up, out, features, row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = i < features
    gate = tl.load(gate_up + row * row_stride + i, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + features + i, mask=there, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * features + i, product.to(out.dtype.element_ty), mask=there)
