"""The matrix product inside the attention kernels."""

import torch
import triton
import triton.language as tl


def upcasts(x: torch.Tensor) -> bool:
    """Triton's interpreter takes bfloat16 for integers in a product; on a CPU operands are widened first."""
    return x.device.type == "cpu" and x.dtype == torch.bfloat16


@triton.jit
def dot(a, b, UPCASTS: tl.constexpr):
    """a @ b summed in float32; float32 operands are not rounded to tf32."""
    if UPCASTS:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")
