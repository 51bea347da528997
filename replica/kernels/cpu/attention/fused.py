"""Attention for rows with several queries by torch's fused CPU kernel, on keys and values gathered from their pages.

It multiplies with the processor's matrix instructions where torch has kernels for them. Queries are processed in
blocks, each with the keys up to its last token, so that masks stay small.
"""

from itertools import pairwise

import torch

from ....models.base import AttentionRule
from ...base import PagedRows

#: Queries per call. 256 was as fast as 512 or faster on an AVX2 EPYC, 1.3 to 2 times as fast as `prefill` there.
BLOCK = 256


def fits(q: torch.Tensor, rows: PagedRows, rule: AttentionRule) -> bool:
    return rule.softcap is None and q.dtype == rows.keys.dtype and rows.keys.shape[3] == rows.values.shape[3]


def prefill(
    q: torch.Tensor, rows: PagedRows, first_queries: torch.Tensor, rule: AttentionRule, out: torch.Tensor
) -> bool:
    """`base.TorchKernels.prefill` for arguments for which `fits` is true.

    Returns False without a complete result if a row has keys or values that are NaN or infinite: hidden ones would
    change the results of tokens that do not see them.
    """
    lengths = rows.seq_lens.tolist()
    for row, ((first, stop), length) in enumerate(zip(pairwise(first_queries.tolist()), lengths, strict=True)):
        if first == stop or not length:
            out[first:stop] = 0
        elif not _row(q[first:stop], rows, rows.tables[row], length, rule, out[first:stop]):
            return False
    return True


def _row(
    q: torch.Tensor, rows: PagedRows, table: torch.Tensor, length: int, rule: AttentionRule, out: torch.Tensor
) -> bool:
    page, before = rows.keys.shape[1], length - len(q)
    skipped = 0 if rule.window is None else max(0, before + 1 - rule.window) // page
    pages = table[skipped : -(-length // page)]
    begin = skipped * page
    keys, values = (
        each.index_select(0, pages).flatten(0, 1)[: length - begin].transpose(0, 1) for each in (rows.keys, rows.values)
    )
    if not all(bool(each.sum(dtype=torch.float32).isfinite()) for each in (keys, values)):
        return False
    for start in range(0, len(q), BLOCK):
        stop = min(start + BLOCK, len(q))
        seen = before + stop - begin
        out[start:stop].copy_(_attend(q[start:stop], keys[:, :seen], values[:, :seen], rule))
    return True


def _attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    """Queries [Q, heads, D] of the last tokens of keys [kv_heads, K, D]; returns [Q, heads, D]."""
    count, (kv_heads, seen, _) = len(q), keys.shape
    causal = count == seen and (rule.window is None or rule.window >= seen)
    mask = None
    if (not causal and count > 1) or (rule.window is not None and rule.window < seen):
        mask = torch.full((count, seen), -torch.inf, dtype=q.dtype).triu(seen - count + 1)
        if rule.window is not None:
            mask += torch.full_like(mask, -torch.inf).tril(seen - count - rule.window)
    # A batch of KV heads: all queries of a group share the keys, which are not copied.
    queries = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    keys, values = (each[:, None].expand(-1, queries.shape[1], -1, -1) for each in (keys, values))
    found, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries, keys, values, 0.0, causal, attn_mask=mask, scale=rule.scale
    )
    if rule.sinks is not None:  # they take their share of each query's weights
        sinks = rule.sinks.float().view(kv_heads, -1, 1)
        found = found * torch.sigmoid(sums.view(found.shape[:3]) - sinks)[..., None].to(found.dtype)
    result: torch.Tensor = found.permute(2, 0, 1, 3).flatten(1, 2)
    return result
