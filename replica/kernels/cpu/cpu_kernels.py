"""All kernels compiled for the CPU behind `base.Kernels`. What has none (sampling, softcap and sinks, dtypes other
than float32 and bfloat16) goes to plain torch.
"""

from typing import Any, ClassVar

import torch

from ...models.base import AttentionRule, Rotary
from ..base import PagedRows, SamplingInputs
from ..torch_kernels import TorchKernels
from .attention.decode import decode
from .attention.prefill import fits, prefill
from .pointwise.activation import silu_mul
from .pointwise.gather import take
from .pointwise.norm import add_rms_norm
from .pointwise.rope_store import rotate_and_store
from .pointwise.rotary import waves
from .runtime.scalars import storage_of


class CompiledKernels:
    """See `base.Kernels`."""

    name: ClassVar[str] = "compiled"

    def __init__(self) -> None:
        self._torch = TorchKernels()

    def take(self, table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return self._torch.take(table, places) if storage_of(table.dtype) is None else take(table, places)

    def waves(
        self, positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kernels = self._torch if storage_of(dtype) is None else None
        return kernels.waves(positions, frequencies, dtype) if kernels else waves(positions, frequencies, dtype)

    def plan_decode(self, seq_lens: torch.Tensor, kv_heads: int, window: int | None) -> Any:  # noqa: ARG002
        return None

    def decode(self, q: torch.Tensor, rows: PagedRows, plan: Any, rule: AttentionRule, out: torch.Tensor) -> None:
        if storage_of(q.dtype) is None or rule.softcap is not None or rule.sinks is not None:
            self._torch.decode(q, rows, plan, rule, out)
        else:
            decode(q, rows, rule, out)

    def prefill(
        self, q: torch.Tensor, rows: PagedRows, first_queries: torch.Tensor, rule: AttentionRule, out: torch.Tensor
    ) -> None:
        if fits(q, rule):
            prefill(q, rows, first_queries, rule, out)
        else:
            self._torch.prefill(q, rows, first_queries, rule, out)

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kernels = self._torch if storage_of(x.dtype) is None else None
        return kernels.add_rms_norm(x, delta, weight, epsilon) if kernels else add_rms_norm(x, delta, weight, epsilon)

    def rotate_and_store(
        self, qkv: torch.Tensor, rotary: Rotary, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        if storage_of(qkv.dtype) is None:
            return self._torch.rotate_and_store(qkv, rotary, slots, keys, values)
        return rotate_and_store(qkv, rotary, slots, keys, values)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._torch.silu_mul(gate_up) if storage_of(gate_up.dtype) is None else silu_mul(gate_up)

    def sample(self, logits: torch.Tensor, inputs: SamplingInputs, out: torch.Tensor) -> None:
        self._torch.sample(logits, inputs, out)
