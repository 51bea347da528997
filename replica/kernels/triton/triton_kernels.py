"""All Triton kernels behind `base.Kernels`. Rules without one (softcap, sinks) go to plain torch; the log says so."""

import logging
from typing import ClassVar

import torch

from ...models.base import AttentionRule, Rotary
from ..base import PagedRows, SamplingInputs
from ..torch_kernels import TorchKernels
from .activation import silu_mul
from .decode import DecodePlan, decode, plan_decode
from .norm import add_rms_norm
from .prefill import prefill
from .rope import rotate_and_store
from .sampling import sample

log = logging.getLogger(__name__)


class TritonKernels:
    """See `base.Kernels`."""

    name: ClassVar[str] = "triton"

    def __init__(self) -> None:
        self._torch = TorchKernels()
        self._told = False

    def take(self, table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return self._torch.take(table, places)

    def waves(
        self, positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._torch.waves(positions, frequencies, dtype)

    def plan_decode(self, seq_lens: torch.Tensor, kv_heads: int, window: int | None) -> DecodePlan:
        return plan_decode(seq_lens, kv_heads, window)

    def decode(
        self, q: torch.Tensor, rows: PagedRows, plan: DecodePlan, rule: AttentionRule, out: torch.Tensor
    ) -> None:
        if self._plain(rule):
            decode(q, rows, plan, rule.scale, out)
        else:
            self._torch.decode(q, rows, plan, rule, out)

    def prefill(
        self, q: torch.Tensor, rows: PagedRows, first_queries: torch.Tensor, rule: AttentionRule, out: torch.Tensor
    ) -> None:
        if self._plain(rule):
            prefill(q, rows, first_queries, rule.scale, rule.window, out)
        else:
            self._torch.prefill(q, rows, first_queries, rule, out)

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(x, delta, weight, epsilon)

    def rotate_and_store(
        self, qkv: torch.Tensor, rotary: Rotary, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        return rotate_and_store(qkv, rotary, slots, keys, values)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return silu_mul(gate_up)

    def sample(self, logits: torch.Tensor, inputs: SamplingInputs, out: torch.Tensor) -> None:
        sample(logits, inputs, out)

    def _plain(self, rule: AttentionRule) -> bool:
        plain = rule.softcap is None and rule.sinks is None
        if not plain and not self._told:
            self._told = True
            log.warning("attention_rule_slow reason='softcap and sinks have no kernel, plain torch computes them'")
        return plain
