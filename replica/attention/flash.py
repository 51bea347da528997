"""Attention by FlashAttention where it is installed. Not run on a GPU yet.

flash-attn-4, the version in Python whose kernels are compiled at their first use, prefills and decodes on our pages.
Where it cannot split a row's keys (compute capability 9.0), and beside the others, our kernels decode.

flash-attn 2 takes paged KV only in pages of 256 tokens, so its call without pages gets keys and values gathered from
our pages: two copies of the KV bytes, beside work that grows with the square of a prompt. FlashAttention 3 takes any
page size.
"""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..kernels.base import PagedRows, TorchKernels
from ..models.base import AttentionRule
from .paged import KvPool, PagedAttention, PagedStep, to_device

#: Module names of FlashAttention 3, which depend on how it was installed.
FLASH3_MODULES = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")

#: One library's causal attention [T, heads, D] of rows whose queries are their last tokens.
Prefill = Callable[[torch.Tensor, PagedRows, PagedStep, AttentionRule], torch.Tensor]


class FlashAttention(PagedAttention):
    """`PagedAttention` whose prefill is a library's. Rules that the library does not support use our kernels."""

    def __init__(self, pool: KvPool, kernels: TorchKernels, prefill: Prefill) -> None:
        super().__init__(pool, kernels)
        self._library = prefill

    def _prefill(
        self, q: torch.Tensor, rows: PagedRows, step: PagedStep, rule: AttentionRule, out: torch.Tensor
    ) -> None:
        if rule.sinks is not None or rows.keys.shape[3] != rows.values.shape[3]:
            super()._prefill(q, rows, step, rule, out)
        else:
            out.copy_(self._library(q, rows, step, rule))


class Flash4Attention(PagedAttention):
    """`PagedAttention` whose prefill and decode are `flash_attn.cute.flash_attn_varlen_func` on our pages.

    Layers whose keys and values differ in size use our kernels. Arguments and shapes are those of 4.0.0b36.
    """

    #: It has kernels of their own for prompts whose tokens times queries per KV head fit one or two tiles.
    kernel_lengths = tuple(2**power for power in range(1, 10))

    def __init__(self, pool: KvPool, kernels: TorchKernels, call: Callable[..., Any], *, splits: bool) -> None:
        """`splits`: whether `call` can split a row's keys, without which one program per KV head decodes the row."""
        super().__init__(pool, kernels)
        self._call = call
        self._splits = splits
        #: 0, 1, 2, ...: where the queries of rows with one each start.
        self._firsts = torch.arange(1, dtype=torch.int32)

    def _decode(self, q: torch.Tensor, rows: PagedRows, rule: AttentionRule, out: torch.Tensor) -> None:
        plain = rule.softcap is None and rule.sinks is None  # which our kernels do not have
        if rows.keys.shape[3] != rows.values.shape[3] or (plain and not self._splits):
            super()._decode(q, rows, rule, out)
            return
        if len(self._firsts) <= len(q):  # only before captures, whose first runs are the largest
            self._firsts = torch.arange(2 * len(q) + 1, dtype=torch.int32, device=q.device)
        self._attend(q, rows, self._firsts[: len(q) + 1], 1, rule, out)
        out.masked_fill_((rows.seq_lens == 0)[:, None, None], 0)  # padding rows

    def _prefill(
        self, q: torch.Tensor, rows: PagedRows, step: PagedStep, rule: AttentionRule, out: torch.Tensor
    ) -> None:
        if rows.keys.shape[3] != rows.values.shape[3]:
            super()._prefill(q, rows, step, rule, out)
            return
        assert step.first_queries is not None
        self._attend(q, rows, step.first_queries, max(step.q_lens), rule, out)

    def _attend(
        self,
        q: torch.Tensor,
        rows: PagedRows,
        first_queries: torch.Tensor,
        longest: int,
        rule: AttentionRule,
        out: torch.Tensor,
    ) -> None:
        found = self._call(
            q,
            rows.keys,
            rows.values,
            cu_seqlens_q=first_queries,
            seqused_k=rows.seq_lens,
            page_table=rows.tables,
            max_seqlen_q=longest,
            softmax_scale=rule.scale,
            causal=True,
            window_size=(None, None) if rule.window is None else (rule.window - 1, 0),  # without the token itself
            softcap=rule.softcap or 0.0,
            learnable_sink=rule.sinks,
            num_splits=0 if longest == 1 and self._splits else 1,  # 0: as many parts of a row's keys as fill the device
        )
        out.copy_(found[0] if isinstance(found, tuple) else found)


class flash2:  # noqa: N801 - called like the other libraries' functions
    """`flash_attn.flash_attn_varlen_func` on gathered keys and values; where they are is computed once per step."""

    def __init__(self, call: Callable[..., torch.Tensor]) -> None:
        self._call = call
        self._step: PagedStep | None = None

    def __call__(self, q: torch.Tensor, rows: PagedRows, step: PagedStep, rule: AttentionRule) -> torch.Tensor:
        if step is not self._step:  # held, so that no other step can have its identity
            self._step = step
            self._slots, self._first_keys = _places(rows, step.kv_lens)
        return self._call(
            q,
            rows.keys.flatten(0, 1)[self._slots],
            rows.values.flatten(0, 1)[self._slots],
            cu_seqlens_q=step.first_queries,
            cu_seqlens_k=self._first_keys,
            max_seqlen_q=max(step.q_lens),
            max_seqlen_k=max(step.kv_lens),
            **_rule_arguments(rule),
        )


def flash3(call: Callable[..., torch.Tensor]) -> Prefill:
    """`flash_attn_with_kvcache` of FlashAttention 3, which reads our pages."""

    def prefill(q: torch.Tensor, rows: PagedRows, step: PagedStep, rule: AttentionRule) -> torch.Tensor:
        return call(
            q,
            rows.keys,
            rows.values,
            cache_seqlens=rows.seq_lens,
            page_table=rows.tables,
            cu_seqlens_q=step.first_queries,
            max_seqlen_q=max(step.q_lens),
            **_rule_arguments(rule),
        )

    return prefill


def _places(rows: PagedRows, kv_lens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots of all rows' tokens joined [sum(kv_lens)], and where each row starts (int32 [rows + 1]).

    Waits for nothing: a copy from pageable memory would wait for all steps launched before.
    """
    device, size, total = rows.tables.device, rows.keys.shape[1], sum(kv_lens)
    first = to_device(np.cumsum([0, *kv_lens]), device)
    row = torch.arange(len(kv_lens), device=device).repeat_interleave(first.diff(), output_size=total)
    position = torch.arange(total, device=device) - first[row]
    return rows.tables[row, position // size].long() * size + position % size, first.int()


def _rule_arguments(rule: AttentionRule) -> dict[str, Any]:
    window = (-1, -1) if rule.window is None else (rule.window - 1, 0)  # theirs does not count the token itself
    return {"softmax_scale": rule.scale, "causal": True, "window_size": window, "softcap": rule.softcap or 0.0}


def load_flash4() -> Callable[..., Any]:
    call: Callable[..., Any] = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    return call


def load_flash2() -> Prefill:
    return flash2(importlib.import_module("flash_attn").flash_attn_varlen_func)


def load_flash3() -> Prefill:
    for name in FLASH3_MODULES:
        try:
            return flash3(importlib.import_module(name).flash_attn_with_kvcache)
        except ModuleNotFoundError:
            continue
    raise ImportError(f"none of {', '.join(FLASH3_MODULES)} can be imported")
