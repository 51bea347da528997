"""Our calls match FlashAttention's documented signatures: stand-ins in plain torch give the reference's answers."""

from functools import partial

import pytest
import torch

from homing.replica.attention.flash import Flash2Prefill, Flash4Attention, FlashAttention, flash3_prefill
from homing.replica.attention.paged import Batch
from homing.replica.engine.step_plan import PlanRow, lay_out, plan_of_rows
from homing.replica.execute.mixed_step import SIZES, MixedStep
from homing.replica.kernels.base import PagedRows, TorchKernels
from homing.replica.models.base import AttentionRule

from .reference import ReferenceAttention
from .test_attention import BLOCK, RULES, SHAPES, Shape, batch_of, filled_pool, fitted, run, torch_attention

ROWS = [(22, 1), (0, 9), (6, 5), (16, 16), (3, 1)]


def varlen(
    q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, softcap
):
    """`flash_attn_varlen_func`: causal, aligned bottom right; a window of (left, 0) sees `left` earlier tokens."""
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
    """FlashAttention 3's `flash_attn_with_kvcache` with pages."""
    assert causal
    window = None if window_size == (-1, -1) else window_size[0] + 1
    rows = PagedRows(k_cache, v_cache, page_table, cache_seqlens)
    out = torch.empty(q.shape[0], q.shape[1], v_cache.shape[3])
    TorchKernels().prefill(q, rows, cu_seqlens_q, AttentionRule(softmax_scale, window, softcap or None), out)
    return out


def cute_varlen(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    gather_kv_indices=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    *,
    splits,
):
    """`flash_attn.cute.flash_attn_varlen_func` of flash-attn-4 4.0.0b36 with pages and its assertions, in float64.

    `splits` is ours: whether the library splits keys on this device. On sm_90 it refuses to.
    """
    assert causal
    assert num_splits == 1 or splits
    assert qv is cu_seqlens_k is seqused_q is gather_kv_indices is None
    assert {x.dtype for x in (cu_seqlens_q, seqused_k, page_table)} == {torch.int32}
    assert page_table.stride(-1) == cu_seqlens_q.stride(0) == seqused_k.stride(0) == 1
    assert page_table.shape[0] == len(seqused_k) == len(cu_seqlens_q) - 1
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    if max_seqlen_q > 1:  # a row with fewer keys than queries would be read before its start
        assert bool((seqused_k >= cu_seqlens_q.diff()).all())
    assert k.shape == (*v.shape[:3], q.shape[2])
    window = None if window_size == (None, None) else window_size[0] + 1
    sinks = None if learnable_sink is None else learnable_sink.double()
    rows = PagedRows(k.double(), v.double(), page_table, seqused_k)
    out = torch.empty(q.shape, dtype=torch.float64)
    rule = AttentionRule(softmax_scale, window, softcap or None, sinks)
    TorchKernels().prefill(q.double(), rows, cu_seqlens_q, rule, out)
    return out.to(q.dtype), None


@pytest.mark.parametrize("splits", [False, True])
def test_flash_attn_4_computes_what_the_reference_does(splits):
    """Prefill and decode, with windows, softcap and sinks; layers with shorter values are left to our kernels."""
    call = partial(cute_varlen, splits=splits)
    decodes_first = [(22, 1), (3, 1), (0, 9), (6, 5), (16, 16)]
    for shape in SHAPES.values():
        for rule in (fitted(each, shape) for each in RULES.values()):
            batch = batch_of(decodes_first)

            got, _ = run(lambda pool: Flash4Attention(pool, TorchKernels(), call, splits=splits), batch, shape, rule)

            wanted, _ = run(ReferenceAttention, batch, shape, rule)
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_padding_rows_of_flash_attn_4_are_zero():
    """The library leaves the output of a row without keys undefined."""
    attention = Flash4Attention(
        filled_pool(SHAPES["grouped"], 3, seed=0),
        TorchKernels(),
        lambda q, *_, **__: torch.full_like(q, torch.nan),
        splits=True,
    )
    tables, lengths = torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    attention.begin_decode(torch.zeros(2, dtype=torch.int64), tables, lengths)

    assert bool((attention(0, *(torch.ones(2, heads, 16) for heads in (4, 2, 2)), RULES["plain"]) == 0).all())


def test_where_flash_attn_4_cannot_split_keys_our_kernels_decode():
    """Without key splits, one program per KV head would read all of a row's keys, even 100,000 of them."""
    calls = []

    def recorded(q, *_, max_seqlen_q, num_splits, **__):
        calls.append((max_seqlen_q, num_splits))
        return q

    for splits in (False, True):
        for rule in RULES.values():
            batch = batch_of([(22, 1), (0, 9)])
            run(lambda pool, x=splits: Flash4Attention(pool, TorchKernels(), recorded, splits=x), batch, Shape(), rule)

    assert calls == [(9, 1)] * len(RULES) + [(1, 0), (9, 1)] * len(RULES)


class OneLayer:
    """A model whose logits are one layer's attention; token i always has the same queries, keys and values."""

    def __init__(self, shape: Shape, rule: AttentionRule) -> None:
        self._rule = rule
        dims = (shape.heads, shape.key_dim), (shape.kv_heads, shape.key_dim), (shape.kv_heads, shape.value_dim)
        self._qkv = [torch.randn(64, *dim, generator=torch.Generator().manual_seed(1)) for dim in dims]

    def forward(self, ids, positions, attend, logits_at):
        q, k, v = (x[: len(ids)] for x in self._qkv)
        return attend(0, q, k, v, self._rule).flatten(1)[logits_at]


def flash4(splits):
    return lambda pool: Flash4Attention(pool, TorchKernels(), partial(cute_varlen, splits=splits), splits=splits)


def flash2(call):
    return lambda pool: FlashAttention(pool, TorchKernels(), Flash2Prefill(call), mixes=False)


def flash3(pool):
    return FlashAttention(pool, TorchKernels(), flash3_prefill(with_kvcache), mixes=True)


@pytest.mark.parametrize(
    "attention", [torch_attention, flash3, flash4(False), flash4(True)], ids=["plain", "flash3", "sm_90", "sm_100"]
)
@pytest.mark.parametrize("lengths", [[(22, 1), (3, 1), (0, 9), (6, 5), (16, 16)], [(5, 7)], [(0, 32)]], ids=str)
def test_a_padded_step_equals_the_step_itself(attention, lengths):
    """Its decodes are also a row of the prompts; the results are not used, but it must not read beyond its table."""
    rows, block = [], 1
    for start, new in lengths:
        count = -(-(start + new) // BLOCK)
        rows.append(PlanRow([1] * new, start, range(block, block + count)))
        block += count
    tokens = sum(new for _, new in lengths)
    ragged = lay_out(plan_of_rows(0, rows, range(tokens)), BLOCK)
    batch = Batch.on_device(ragged, torch.device("cpu"))
    for shape in SHAPES.values():
        for rule in (fitted(each, shape) for each in RULES.values()):
            model = OneLayer(shape, rule)

            padded, plain = (attention(filled_pool(shape, block, seed=0)) for _ in range(2))
            logits = torch.full((tokens, shape.heads * shape.value_dim), torch.nan)
            assert padded.mixes
            step = MixedStep(model, padded, logits, sizes=SIZES, max_rows=tokens, pages=64 // BLOCK)
            step.write(ragged, 64, torch.from_numpy)
            step.run(64)

            plain.begin(batch)
            wanted = model.forward(batch.token_ids, None, plain, batch.logits_at)
            torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)


def test_prompts_of_kernel_lengths_need_every_kernel_of_flash_attn_4():
    """The library compiles a kernel per number of 128- or 192-row tiles that tokens times queries per KV head fill."""
    for tile in (128, 192):
        for group in (1, 2, 4, 5, 7, 8, 16, 32):

            def tiles(length, tile=tile, group=group):
                return min(3, -(-length * group // tile))

            assert {tiles(n) for n in Flash4Attention.kernel_lengths} >= {tiles(n) for n in range(2, 8192)}


def test_both_libraries_compute_what_the_reference_does():
    """Includes windows, softcap, sinks and shorter values: our kernels handle whatever a library does not support."""
    for library in (flash2(varlen), flash3):
        for shape in SHAPES.values():
            for rule in (fitted(each, shape) for each in RULES.values()):
                batch = batch_of(ROWS)

                got, _ = run(library, batch, shape, rule)

                wanted, _ = run(ReferenceAttention, batch, shape, rule)
                torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_where_keys_are_is_computed_once_for_all_layers():
    """It takes a dozen small operations and a copy to the device: per layer, more than the attention itself."""
    starts = []

    def recorded(*arguments, cu_seqlens_k, **options):
        starts.append(cu_seqlens_k)
        return varlen(*arguments, cu_seqlens_k=cu_seqlens_k, **options)

    shape, batch = SHAPES["grouped"], batch_of(ROWS)
    attention = flash2(recorded)(filled_pool(shape, 40, seed=0))
    attention.begin(batch)
    for layer in (0, 1):
        attention(layer, *(torch.zeros(len(batch.token_ids), heads, 16) for heads in (4, 2, 2)), RULES["plain"])

    assert starts[0] is starts[1]
