"""The residual sum and the norm that follows it, in one pass over the features."""

import torch
import triton
import triton.language as tl


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `base.Kernels.add_rms_norm`."""
    tokens, features = x.shape
    normed = torch.empty_like(x)
    summed = x if delta is None else torch.empty_like(x)
    block = triton.next_power_of_2(features)
    if tokens:
        _add_rms_norm[(tokens,)](
            x,
            x if delta is None else delta,
            weight,
            summed,
            normed,
            epsilon,
            x.stride(0),
            x.stride(0) if delta is None else delta.stride(0),
            FEATURES=features,
            BLOCK=block,
            ADDS=delta is not None,
            num_warps=8 if block >= 4096 else 4,
        )
    return summed, normed


@triton.jit
def _add_rms_norm(
    x,
    delta,
    weight,
    summed,
    normed,
    epsilon,
    x_row,
    delta_row,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    there = i < FEATURES
    kind = summed.dtype.element_ty
    value = tl.load(x + row * x_row + i, mask=there, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(delta + row * delta_row + i, mask=there, other=0.0).to(tl.float32)
        rounded = value.to(kind)
        tl.store(summed + row * FEATURES + i, rounded, mask=there)
        value = rounded.to(tl.float32)  # the norm of what the next layer will see
    inverse = 1.0 / tl.sqrt_rn(tl.sum(value * value, 0) / FEATURES + epsilon)
    scaled = value * inverse * tl.load(weight + i, mask=there, other=0.0).to(tl.float32)
    tl.store(normed + row * FEATURES + i, scaled.to(kind), mask=there)
