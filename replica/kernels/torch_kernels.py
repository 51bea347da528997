"""The kernels in plain torch: what each one means, and what runs where there is no Triton.

Reads nothing back to the host in `decode` and around it, so that it can stand in for the kernels in a captured step;
`prefill` and `sample` do. Gathers whole block tables: right on any device, slow on all.
"""

from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812

from ..attention.reference import weighed
from ..engine.sampler import SamplingRow, sample
from ..messages import SamplingParams
from ..models.base import AttentionRule, Rotary
from ..models.layers import rms_norm, rotate, silu_mul
from .base import NO_TOKEN, PagedRows, SamplingInputs


class TorchKernels:
    """See `base.Kernels`."""

    name: ClassVar[str] = "torch"

    def take(self, table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return F.embedding(places, table)

    def waves(
        self, positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[:, None].float() * frequencies
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def plan_decode(self, seq_lens: torch.Tensor, kv_heads: int, window: int | None) -> Any:  # noqa: ARG002
        return None

    def decode(self, q: torch.Tensor, rows: PagedRows, plan: Any, rule: AttentionRule, out: torch.Tensor) -> None:  # noqa: ARG002
        keys, values, positions = _gathered(rows)
        last = rows.seq_lens[:, None].long() - 1
        seen = positions <= last
        if rule.window is not None:
            seen &= positions > last - rule.window
        values = values.where(seen[:, :, None, None], 0)
        keys = keys.where(seen[:, :, None, None], 0)
        weights = _weights(q[:, None], keys, seen[:, None], rule)
        found = (weights @ _of_heads(values, q.shape[1])).squeeze(2).to(q.dtype)
        out.copy_(found.where(rows.seq_lens[:, None, None] > 0, 0))

    def prefill(
        self, q: torch.Tensor, rows: PagedRows, first_queries: torch.Tensor, rule: AttentionRule, out: torch.Tensor
    ) -> None:
        bounds: list[int] = first_queries.tolist()
        lengths: list[int] = rows.seq_lens.tolist()
        size = rows.keys.shape[1]
        for row, (first, stop) in enumerate(pairwise(bounds)):
            if first == stop:
                continue
            positions = torch.arange(lengths[row], device=q.device)
            pages = rows.tables[row].long()[positions // size]
            keys, values = rows.keys[pages, positions % size], rows.values[pages, positions % size]
            own = positions[first - stop :, None]
            seen = positions <= own
            if rule.window is not None:
                seen &= positions > own - rule.window
            weights = _weights(q[None, first:stop], keys[None], seen[None], rule)
            out[first:stop] = weighed(weights[0], _of_heads(values[None], q.shape[1])[0]).transpose(0, 1)

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        summed = x if delta is None else x + delta
        return summed, rms_norm(summed, weight, epsilon)

    def rotate_and_store(
        self, qkv: torch.Tensor, rotary: Rotary, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        kv_heads, dim = keys.shape[2:]
        split = qkv.unflatten(1, (-1, dim))
        q, k, v = split[:, : -2 * kv_heads], split[:, -2 * kv_heads : -kv_heads], split[:, -kv_heads:]
        if rotary.q_norm is not None and rotary.k_norm is not None:
            q, k = rms_norm(q, rotary.q_norm, rotary.epsilon), rms_norm(k, rotary.k_norm, rotary.epsilon)
        cos, sin = (wave.to(qkv.dtype)[:, None] for wave in (rotary.cos, rotary.sin))
        kept = (slots >= 0)[:, None, None]
        targets = slots.clamp(min=0)
        for pages, new in ((keys, rotate(k, cos, sin)), (values, v)):
            flat = pages.flatten(0, 1)
            flat.index_copy_(0, targets, torch.where(kept, new, flat[targets]))
        return rotate(q, cos, sin)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return silu_mul(gate_up)

    def sample(self, logits: torch.Tensor, inputs: SamplingInputs, out: torch.Tensor) -> None:
        drawn = sample(logits, _sampling_rows(inputs))
        out.copy_(torch.tensor([each.token_id if each.finite else NO_TOKEN for each in drawn], dtype=torch.int64))


def _sampling_rows(inputs: SamplingInputs) -> list[SamplingRow]:
    columns = (
        inputs.temperatures.tolist(),
        inputs.top_ks.tolist(),
        inputs.top_ps.tolist(),
        inputs.min_ps.tolist(),
        inputs.seeds.tolist(),
        inputs.positions.tolist(),
    )
    rows = []
    for temperature, top_k, top_p, min_p, seed, position in zip(*columns, strict=True):
        params = SamplingParams(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed % (1 << 64), max_tokens=1
        )
        rows.append(SamplingRow(params, position, (), ()))
    return rows


def _gathered(rows: PagedRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values [rows, longest * page, kv_heads, D] and their positions; unused table entries read page 0."""
    size = rows.keys.shape[1]
    first = torch.arange(rows.tables.shape[1], device=rows.tables.device) * size
    tables = rows.tables.where(first < rows.seq_lens[:, None], 0)
    positions = torch.arange(rows.tables.shape[1] * size, device=rows.tables.device)
    return rows.keys[tables].flatten(1, 2), rows.values[tables].flatten(1, 2), positions


def _of_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, K, kv_heads, D] as [B, heads, K, D] float32: query heads share KV heads in consecutive groups."""
    return x.repeat_interleave(heads // x.shape[2], dim=2).transpose(1, 2).float()


def _weights(q: torch.Tensor, k: torch.Tensor, seen: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    """q [B, Q, heads, Dk], k [B, K, kv_heads, Dk], seen [B, Q, K]; [B, heads, Q, K] float32."""
    scores = q.transpose(1, 2).float() @ _of_heads(k, q.shape[2]).transpose(2, 3) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if rule.sinks is None:
        return scores.softmax(-1)
    sinks = rule.sinks.float()[None, :, None, None].expand(len(q), -1, q.shape[1], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
