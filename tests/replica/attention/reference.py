"""Attention computed directly from its definition, one row at a time: the oracle for the backends."""

import math

import torch

from homing.replica.attention.paged import Batch, KvPool
from homing.replica.models.base import AttentionRule


def visible(q_positions: torch.Tensor, k_positions: torch.Tensor, window: int | None) -> torch.Tensor:
    """Mask [queries, keys] of the keys a query sees: none after it, and only the last `window` including itself."""
    distance = q_positions[:, None] - k_positions[None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, rule: AttentionRule
) -> torch.Tensor:
    """q [Q, heads, Dk], k [K, kv_heads, Dk], v [K, kv_heads, Dv], seen [Q, K]; returns [Q, heads, Dv].

    Scores and softmax in float32. Query heads share KV heads in consecutive groups.
    """
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
    scores = q.transpose(0, 1).float() @ keys.float().transpose(1, 2) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if rule.sinks is None:
        weights = scores.softmax(-1)
    else:
        sinks = rule.sinks.float()[:, None, None].expand(-1, q.shape[0], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    out = weights @ values.float().nan_to_num(0.0, 0.0, 0.0)
    # A weight of 0 hides any value, NaN included; any other weight of a non-finite value gives NaN.
    reached = (weights != 0).float() @ (~values.isfinite()).float() > 0
    return out.masked_fill(reached, math.nan).transpose(0, 1).to(q.dtype)


class ReferenceAttention:
    """Gathers each row's keys and values slot by slot and applies `attention`."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._batch: Batch | None = None

    def begin(self, batch: Batch) -> None:
        self._batch = batch

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        batch = self._batch
        assert batch is not None, "attention was called before begin"
        self._pool.write(layer, batch.slots, k, v)
        rows = []
        start = 0
        for row, q_len in enumerate(batch.q_lens):
            rows.append(self._row(layer, row, q[start : start + q_len], rule, batch))
            start += q_len
        return torch.cat(rows)

    def _row(self, layer: int, row: int, q: torch.Tensor, rule: AttentionRule, batch: Batch) -> torch.Tensor:
        size = self._pool.block_size
        positions = torch.arange(batch.kv_lens[row], device=q.device)
        blocks = batch.block_tables[row].long()[positions // size]
        k, v = (pages[layer][blocks, positions % size] for pages in (self._pool.keys, self._pool.values))
        return attention(q, k, v, visible(positions[-len(q) :], positions, rule.window), rule)
