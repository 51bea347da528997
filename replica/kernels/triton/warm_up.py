"""Launches once the attention and sampling kernels that every step of a model needs, so that Triton compiles them.

Each has one variant for all steps, so small tensors with the model's dims suffice. The other kernels are compiled by
captures and by `ModelRunner`'s largest step; tests/gpu/late_kernels.py shows that nothing is left.
"""

from collections.abc import Callable
from functools import partial

import torch

from ...models.base import AttentionRule
from ...models.spec import KvShape, ModelSpec
from ..base import PagedRows, SamplingInputs
from . import decode, prefill, sampling

ROWS = 2
#: Largest head dim to compile: larger kernels do not fit a GPU.
MAX_DIM = 512


def launches(spec: ModelSpec, block_size: int, device: torch.device) -> list[Callable[[], None]]:
    """Calls that share no kernel, slowest compilation first, so that each can run in its own thread."""
    dtype = getattr(torch, spec.dtype)
    found: list[Callable[[], None]] = []
    if spec.query_heads:
        for shape in dict.fromkeys(spec.kv_shapes):
            if max(shape.key_dim, shape.value_dim) > MAX_DIM or spec.query_heads % shape.kv_heads:
                continue
            rows = partial(_rows, shape, block_size, getattr(torch, spec.kv_dtype or spec.dtype), device)
            found += [partial(each, rows, spec.query_heads, dtype) for each in (_prefill, _decode)]
    return [*found, partial(_sample, spec.vocab_size, device), partial(_mask, spec.vocab_size, device)]


def _rows(shape: KvShape, block_size: int, dtype: torch.dtype, device: torch.device) -> PagedRows:
    keys, values = (
        torch.zeros(2, block_size, shape.kv_heads, dim, dtype=dtype, device=device)
        for dim in (shape.key_dim, shape.value_dim)
    )
    tables = torch.zeros(ROWS, 1, dtype=torch.int32, device=device)
    return PagedRows(keys, values, tables, torch.ones(ROWS, dtype=torch.int32, device=device))


def _prefill(make_rows: Callable[[], PagedRows], heads: int, dtype: torch.dtype) -> None:
    rows = make_rows()
    q = torch.zeros(ROWS, heads, rows.keys.shape[3], dtype=dtype, device=rows.keys.device)
    first = torch.arange(ROWS + 1, dtype=torch.int32, device=q.device)
    prefill.prefill(q, rows, first, AttentionRule(1.0), q.new_empty(ROWS, heads, rows.values.shape[3]))


def _decode(make_rows: Callable[[], PagedRows], heads: int, dtype: torch.dtype) -> None:
    rows = make_rows()
    q = torch.zeros(ROWS, heads, rows.keys.shape[3], dtype=dtype, device=rows.keys.device)
    plan = decode.plan_decode(rows, heads, None)
    decode.decode(q, rows, plan, AttentionRule(1.0), q.new_empty(ROWS, heads, rows.values.shape[3]))


def _sample(vocab: int, device: torch.device) -> None:
    column, places = torch.ones(ROWS, device=device), torch.arange(ROWS, device=device)
    kinds = column, column.int(), column.double(), column
    inputs = SamplingInputs(places, *kinds, places, places, column.int(), column.long())
    sampling.sample(torch.zeros(ROWS, vocab, device=device), inputs, column.long())


def _mask(vocab: int, device: torch.device) -> None:
    bits = torch.zeros(ROWS, -(-vocab // 32), dtype=torch.int32, device=device)
    sampling.mask(torch.zeros(ROWS, vocab, device=device), torch.arange(ROWS, device=device), bits)
