"""All compiled CPU kernels in one class. Sampling and some prefills use plain torch."""

from typing import Any, ClassVar

import torch

from ...models.base import AttentionRule
from ..base import PagedRows, TorchCpuKernels
from . import pointwise
from .attention.decode import decode
from .attention.prefill import fits, prefill


class CompiledKernels(TorchCpuKernels):
    """Compiled kernels for float32 and bfloat16 tensors."""

    name: ClassVar[str] = "compiled"

    take = staticmethod(pointwise.take)
    rotary_table = staticmethod(pointwise.rotary_table)
    add_rms_norm = staticmethod(pointwise.add_rms_norm)
    rotate_and_store = staticmethod(pointwise.rotate_and_store)
    silu_mul = staticmethod(pointwise.silu_mul)
    mask = staticmethod(pointwise.mask)

    def decode(self, q: torch.Tensor, rows: PagedRows, plan: Any, rule: AttentionRule, out: torch.Tensor) -> None:  # noqa: ARG002
        decode(q, rows, rule, out)

    def prefill(
        self, q: torch.Tensor, rows: PagedRows, first_queries: torch.Tensor, rule: AttentionRule, out: torch.Tensor
    ) -> None:
        if fits(q, rule):
            prefill(q, rows, first_queries, rule, out)
        else:
            super().prefill(q, rows, first_queries, rule, out)
