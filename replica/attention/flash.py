"""Attention through FlashAttention, if it is installed. Not run on a GPU yet.

flash-attn-4, the Python version whose kernels are compiled on first use, prefills and decodes directly on our pages.
Our kernels decode where it cannot split a row's keys (compute capability 9.0), and with all other versions.

flash-attn 2 supports paged KV only in pages of 256 tokens, so its unpaged call gets keys and values gathered from our
pages. That adds two copies of the KV bytes to work that grows with the square of the prompt, and how many tokens to
gather must be known on the host, so no graph can hold it. FlashAttention 3 supports any page size.
"""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..kernels.base import PagedRows, TorchKernels
from ..models.base import AttentionRule
from .paged import KvPool, PagedAttention, PagedStep, to_device

#: Possible module names of FlashAttention 3, depending on how it was installed.
FLASH3_MODULES = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")

#: A library's causal attention for rows whose queries are their last tokens; returns [T, heads, D].
Prefill = Callable[[torch.Tensor, PagedRows, PagedStep, AttentionRule], torch.Tensor]


class FlashAttention(PagedAttention):
    """`PagedAttention` that prefills with a library. Our kernels handle rules that the library does not support."""

    def __init__(self, pool: KvPool, kernels: TorchKernels, prefill: Prefill, *, mixes: bool) -> None:
        """`mixes`: whether `prefill` reads lengths only on the device, so that a graph can hold it."""
        super().__init__(pool, kernels)
        self._library = prefill
        self.mixes = mixes

    def _prefill(
        self, q: torch.Tensor, rows: PagedRows, step: PagedStep, rule: AttentionRule, out: torch.Tensor
    ) -> None:
        if rule.sinks is not None or rows.keys.shape[3] != rows.values.shape[3]:
            super()._prefill(q, rows, step, rule, out)
        else:
            out.copy_(self._library(q, rows, step, rule))


class Flash4Attention(PagedAttention):
    """`PagedAttention` that prefills and decodes with `flash_attn.cute.flash_attn_varlen_func` on our pages.

    Our kernels handle layers whose keys and values differ in size. Arguments and shapes match version 4.0.0b36.
    """

    #: The library has separate kernels for prompts whose tokens times queries per KV head fit one or two tiles.
    kernel_lengths = tuple(2**power for power in range(1, 10))

    def __init__(self, pool: KvPool, kernels: TorchKernels, call: Callable[..., Any], *, splits: bool) -> None:
        """`splits`: whether `call` can split a row's keys; if not, our kernels decode.

        Without splits, one program per KV head would read all keys of a row.
        """
        super().__init__(pool, kernels)
        self._call = call
        self._splits = splits
        #: 0, 1, 2, ...: each row's first query if all rows have one query.
        self._firsts = torch.arange(1, dtype=torch.int32)

    def _decode(self, q: torch.Tensor, rows: PagedRows, rule: AttentionRule, out: torch.Tensor) -> None:
        if rows.keys.shape[3] != rows.values.shape[3] or not self._splits:
            super()._decode(q, rows, rule, out)
            return
        if len(self._firsts) <= len(q):  # only before a capture: the largest is run first
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
        # In a captured step the host does not know the lengths; an upper bound suffices.
        self._attend(q, rows, step.first_queries, max(step.q_lens, default=len(q)), rule, out)

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
            window_size=(None, None) if rule.window is None else (rule.window - 1, 0),  # excludes the token itself
            softcap=rule.softcap or 0.0,
            learnable_sink=rule.sinks,
            num_splits=0 if longest == 1 and self._splits else 1,  # 0: as many as fill the device
        )
        out.copy_(found[0] if isinstance(found, tuple) else found)


class Flash2Prefill:
    """`flash_attn.flash_attn_varlen_func` on gathered keys and values; their slots are computed once per step."""

    def __init__(self, call: Callable[..., torch.Tensor]) -> None:
        self._call = call
        self._step: PagedStep | None = None

    def __call__(self, q: torch.Tensor, rows: PagedRows, step: PagedStep, rule: AttentionRule) -> torch.Tensor:
        if step is not self._step:  # `_step` keeps it alive, so no other step can have its id
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


def flash3_prefill(call: Callable[..., torch.Tensor]) -> Prefill:
    """`flash_attn_with_kvcache` of FlashAttention 3, which reads our pages."""

    def prefill(q: torch.Tensor, rows: PagedRows, step: PagedStep, rule: AttentionRule) -> torch.Tensor:
        return call(
            q,
            rows.keys,
            rows.values,
            cache_seqlens=rows.seq_lens,
            page_table=rows.tables,
            cu_seqlens_q=step.first_queries,
            max_seqlen_q=max(step.q_lens, default=len(q)),  # in a captured step, an upper bound
            **_rule_arguments(rule),
        )

    return prefill


def _places(rows: PagedRows, kv_lens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots of all rows' tokens, concatenated [sum(kv_lens)], and the start of each row (int32 [rows + 1]).

    Does not synchronize: a copy from pageable memory would wait for all steps launched before.
    """
    device, size, total = rows.tables.device, rows.keys.shape[1], sum(kv_lens)
    first = to_device(np.cumsum([0, *kv_lens]), device)
    row = torch.arange(len(kv_lens), device=device).repeat_interleave(first.diff(), output_size=total)
    position = torch.arange(total, device=device) - first[row]
    return rows.tables[row, position // size].long() * size + position % size, first.int()


def _rule_arguments(rule: AttentionRule) -> dict[str, Any]:
    window = (-1, -1) if rule.window is None else (rule.window - 1, 0)  # excludes the token itself
    return {"softmax_scale": rule.scale, "causal": True, "window_size": window, "softcap": rule.softcap or 0.0}


def load_flash4() -> Callable[..., Any]:
    call: Callable[..., Any] = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    return call


def load_flash2() -> Prefill:
    return Flash2Prefill(importlib.import_module("flash_attn").flash_attn_varlen_func)


def load_flash3() -> Prefill:
    for name in FLASH3_MODULES:
        try:
            return flash3_prefill(importlib.import_module(name).flash_attn_with_kvcache)
        except ModuleNotFoundError:
            continue
    raise ImportError(f"none of {', '.join(FLASH3_MODULES)} can be imported")
