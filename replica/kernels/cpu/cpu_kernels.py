"""All compiled CPU kernels in one class. Sampling and some prefills use plain torch."""

from collections.abc import Callable
from itertools import groupby, pairwise
from typing import Any, ClassVar, TypeVar

import torch

from ...models.base import AttentionRule
from ..base import PagedRows, TorchCpuKernels
from . import pointwise
from .attention import fused
from .attention.choice import FEWEST, decode_choice, prompt_choice
from .attention.decode import decode
from .attention.prefill import fits, prefill

Choice = TypeVar("Choice")


class CompiledKernels(TorchCpuKernels):
    """Compiled kernels for float32 and bfloat16 tensors."""

    name: ClassVar[str] = "compiled"

    take = staticmethod(pointwise.take)
    rotary_table = staticmethod(pointwise.rotary_table)
    add_rms_norm = staticmethod(pointwise.add_rms_norm)
    rotate_and_store = staticmethod(pointwise.rotate_and_store)
    silu_mul = staticmethod(pointwise.silu_mul)
    mask = staticmethod(pointwise.mask)

    def decode(self, q: torch.Tensor, rows: PagedRows, plan: Any, rule: AttentionRule, out: torch.Tensor) -> None:
        if _choice(decode_choice, q, rows).by_torch:
            super().decode(q, rows, plan, rule, out)
        else:
            decode(q, rows, rule, out)

    def prefill(
        self, q: torch.Tensor, rows: PagedRows, first_queries: torch.Tensor, rule: AttentionRule, out: torch.Tensor
    ) -> None:
        """Each run of consecutive rows that are better left to torch is one call, and so is each run of others."""
        firsts, lengths = first_queries.tolist(), rows.seq_lens.tolist()
        left = _left_to_torch(q, rows, rule, [stop - first for first, stop in pairwise(firsts)], lengths)
        for to_torch, group in groupby(range(len(left)), left.__getitem__):
            numbers = [*group]
            first, stop = numbers[0], numbers[-1] + 1
            span = slice(firsts[first], firsts[stop])
            part = PagedRows(rows.keys, rows.values, rows.tables[first:stop], rows.seq_lens[first:stop])
            part_firsts = first_queries[first : stop + 1] - firsts[first]
            if not to_torch or not fused.prefill(q[span], part, part_firsts, rule, out[span]):
                self._prefill(q[span], part, part_firsts, rule, out[span])

    def _prefill(
        self, q: torch.Tensor, rows: PagedRows, first_queries: torch.Tensor, rule: AttentionRule, out: torch.Tensor
    ) -> None:
        if fits(q, rule):
            prefill(q, rows, first_queries, rule, out)
        else:
            super().prefill(q, rows, first_queries, rule, out)


def _left_to_torch(
    q: torch.Tensor, rows: PagedRows, rule: AttentionRule, queries: list[int], lengths: list[int]
) -> list[bool]:
    """Whether each row is left to torch's fused attention. Rows of a few queries never are, and measure nothing."""
    if max(queries, default=0) < FEWEST or not fused.fits(q, rows, rule):
        return [False] * len(queries)
    choice = _choice(prompt_choice, q, rows)
    return [choice.takes(*each) for each in zip(queries, lengths, strict=True)]


def _choice(choose: Callable[[torch.dtype, int, int, int], Choice], q: torch.Tensor, rows: PagedRows) -> Choice:
    return choose(q.dtype, q.shape[1], rows.keys.shape[2], q.shape[2])
