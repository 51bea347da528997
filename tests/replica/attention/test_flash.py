"""FlashAttention's calls get what they document: stand-ins of its signatures in plain torch give the same answers."""

import torch

from homing.replica.attention.flash import FlashAttention, flash2, flash3
from homing.replica.kernels.base import PagedRows, TorchKernels
from homing.replica.models.base import AttentionRule

from .reference import ReferenceAttention
from .test_attention import RULES, SHAPES, batch_of, filled_pool, fitted, run

ROWS = [(22, 1), (0, 9), (6, 5), (16, 16), (3, 1)]


def varlen(
    q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, softcap
):
    """`flash_attn_varlen_func`: causal from the bottom right; a window of (left, 0) sees `left` tokens before it."""
    starts, stops = cu_seqlens_k[:-1].tolist(), cu_seqlens_k[1:].tolist()
    lengths = [stop - start for start, stop in zip(starts, stops, strict=True)]
    assert causal
    assert max(lengths) == max_seqlen_k
    assert int(cu_seqlens_q.diff().max()) == max_seqlen_q
    padded = max(lengths)
    keys, values = (torch.zeros(len(lengths), padded, *x.shape[1:]) for x in (k, v))
    for row, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        keys[row, : stop - start], values[row, : stop - start] = k[start:stop], v[start:stop]
    tables = torch.arange(len(lengths), dtype=torch.int32)[:, None]
    rows = PagedRows(keys, values, tables, torch.tensor(lengths, dtype=torch.int32))
    window = None if window_size == (-1, -1) else window_size[0] + 1
    out = torch.empty(q.shape[0], q.shape[1], v.shape[2])
    TorchKernels().prefill(q, rows, cu_seqlens_q, AttentionRule(softmax_scale, window, softcap or None), out)
    return out


def with_kvcache(
    q,
    k_cache,
    v_cache,
    *,
    cache_seqlens,
    page_table,
    cu_seqlens_q,
    max_seqlen_q,
    softmax_scale,
    causal,
    window_size,
    softcap,
):
    """`flash_attn_with_kvcache` of FlashAttention 3 with pages."""
    assert causal
    window = None if window_size == (-1, -1) else window_size[0] + 1
    rows = PagedRows(k_cache, v_cache, page_table, cache_seqlens)
    out = torch.empty(q.shape[0], q.shape[1], v_cache.shape[3])
    TorchKernels().prefill(q, rows, cu_seqlens_q, AttentionRule(softmax_scale, window, softcap or None), out)
    return out


def test_both_libraries_compute_what_the_reference_does():
    """Windows, softcap, sinks and short values too: what a library lacks is not left out but done by the kernels."""
    for prefill in (flash2(varlen), flash3(with_kvcache)):
        for shape in SHAPES.values():
            for rule in (fitted(each, shape) for each in RULES.values()):
                batch = batch_of(ROWS)

                got, _ = run(lambda pool, call=prefill: FlashAttention(pool, TorchKernels(), call), batch, shape, rule)

                wanted, _ = run(ReferenceAttention, batch, shape, rule)
                torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_where_keys_are_is_computed_once_for_all_layers():
    """It takes a dozen small operations and a copy to the device: per layer they would cost more than the attention."""
    starts = []

    def recorded(*arguments, cu_seqlens_k, **options):
        starts.append(cu_seqlens_k)
        return varlen(*arguments, cu_seqlens_k=cu_seqlens_k, **options)

    shape, batch = SHAPES["grouped"], batch_of(ROWS)
    attention = FlashAttention(filled_pool(shape, 40, seed=0), TorchKernels(), flash2(recorded))
    attention.begin(batch)
    for layer in (0, 1):
        attention(layer, *(torch.zeros(len(batch.token_ids), heads, 8) for heads in (4, 2, 2)), RULES["plain"])

    assert starts[0] is starts[1]
