"""The operations of a decoder step on a device: paged attention, the small operations around it, and the sampler.

All arguments are tensors of fixed shape, so that a CUDA graph can capture a whole step of kernels. `TorchKernels`
defines what each method computes, in plain torch, and runs where no compiled kernel can; kernels for one kind of device
override its methods. Tests hold all implementations to float64.
"""

from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, nan
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812

from ..engine.logit_edits import SamplingRow, mask_logits
from ..engine.sampler import sample
from ..messages import SamplingParams
from ..models.base import AttentionRule, Rotary
from ..models.spec import ModelSpec

#: Queries of a prefill in one product: 64 and 128 were equally fast on an AMD EPYC, 256 a tenth slower.
TILE = 128
#: The greatest number in 8 bits (E4M3).
FP8_MOST = 448.0
#: The least scale of numbers in 8 bits, also for zeros.
LEAST_SCALE = 1e-12
#: Scales of that many rows start at 16 bytes, as cuBLAS needs them.
ROUNDED_ROWS = 4
#: In place of a token id, in tensors.
NO_TOKEN = -1


@dataclass(slots=True, frozen=True)
class PagedRows:
    """The KV of one layer, and the part of it that each row of a step sees. Of the queries' dtype, or 8 bits."""

    keys: torch.Tensor  #: [pages, page, kv_heads, Dk]
    values: torch.Tensor  #: [pages, page, kv_heads, Dv]
    tables: torch.Tensor  #: [rows, longest] int32 pages in order; entries beyond a row's length are not read
    seq_lens: torch.Tensor  #: [rows] int32 tokens, this step's included; 0: a padding row


@dataclass(slots=True, frozen=True)
class SamplingInputs:
    """The slots of the rows, and by slot the sampling parameters as in `messages.SamplingParams`."""

    rows: torch.Tensor  #: int64 the slot of each row
    temperatures: torch.Tensor  #: float32; below `sampler.GREEDY_BELOW` the likeliest token is drawn
    top_ks: torch.Tensor  #: int32, 0: all
    top_ps: torch.Tensor  #: float64
    min_ps: torch.Tensor  #: float32
    seeds: torch.Tensor  #: int64, the bits of a uint64
    prompts: torch.Tensor  #: int64 tokens of the prompt
    lengths: torch.Tensor  #: int32 or int64 tokens before this one
    last_tokens: torch.Tensor  #: int64, to which the sampler writes


@dataclass(slots=True, frozen=True)
class DecodeRows:
    """What a step of decodes computes, by row."""

    token_ids: torch.Tensor  #: int64
    positions: torch.Tensor  #: int64
    slots: torch.Tensor  #: int64 where the token's KV is written; 0 for padding rows
    tables: torch.Tensor  #: [rows, pages] int32; entries beyond a row's length hold anything
    seq_lens: torch.Tensor  #: int32 this step's token included; 0 for padding rows


class TorchKernels:
    """On any device. A parameter `out` is overwritten; other arguments change only where it says so.

    `prefill` and `sample` read values back to the host, the other methods do not.
    """

    name: ClassVar[str] = "torch"

    def warm_up(self, spec: ModelSpec, block_size: int, device: torch.device) -> None:
        """Compile what all steps of this model need, where something is compiled at its first use."""

    def decode_rows(
        self,
        rows: torch.Tensor,
        last_tokens: torch.Tensor,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        block_size: int,
    ) -> DecodeRows:
        """The next step of the requests in these slots, 0 for padding rows; adds its tokens to `seq_lens`.

        rows [R] int64; of each slot last_tokens int64 (below 0 if there was none), seq_lens int32, block_tables int32.
        """
        starts = seq_lens[rows]
        lengths = torch.where(rows > 0, starts + 1, 0).int()
        tables, positions = block_tables[rows], starts.long()
        blocks = tables.gather(1, (positions // block_size)[:, None])[:, 0].long()
        slots = torch.where(rows > 0, blocks * block_size + positions % block_size, 0)
        seq_lens.index_copy_(0, rows, lengths)
        return DecodeRows(last_tokens[rows].clamp(min=0), positions, slots, tables, lengths)

    def take(self, table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """The rows of `table` [N, F] at `places` [T] int64, each of which is below N: [T, F]."""
        return F.embedding(places, table)

    def rotary_table(
        self, positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, D / 2] of positions [T] int64 times frequencies [D / 2] float32, rounded to `dtype`."""
        angles = positions[:, None].float() * frequencies
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def embed(
        self, table: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What a decoder begins with: the rows of `table` [N, F] at `ids` [T], and the rotary table in its dtype."""
        return self.take(table, ids), *self.rotary_table(positions, frequencies, table.dtype)

    def plan_decode(self, rows: PagedRows, heads: int, window: int | None) -> Any:  # noqa: ARG002
        """A plan that the `decode` calls of all layers with KV and queries of these shapes share in one step."""
        return None

    def decode(self, q: torch.Tensor, rows: PagedRows, plan: Any, rule: AttentionRule, out: torch.Tensor) -> None:  # noqa: ARG002
        """Attention of rows with one query each, their last token: q [rows, heads, Dk], out [rows, heads, Dv].

        A padding row's output is zero.
        """
        size, device = rows.keys.shape[1], q.device
        positions = torch.arange(rows.tables.shape[1] * size, device=device)
        tables = rows.tables.where(positions[::size] < rows.seq_lens[:, None], 0)  # unused entries read page 0
        last = rows.seq_lens[:, None].long() - 1
        seen = positions <= last
        if rule.window is not None:
            seen &= positions > last - rule.window
        heads = q.shape[1]
        # [rows, heads, tokens, D]; what is not seen may be NaN.
        keys, values = (
            pages[tables].flatten(1, 2).to(q.dtype).where(seen[:, :, None, None], 0).transpose(1, 2).float()
            for pages in (rows.keys, rows.values)
        )
        keys, values = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (keys, values))
        scores = q[:, :, None].float() @ keys.transpose(2, 3) * rule.scale
        _cap_and_hide(scores, ~seen[:, None, None], rule.softcap)
        found = (_softmax(scores, rule.sinks) @ values).squeeze(2).to(q.dtype)
        out.copy_(found.where(rows.seq_lens[:, None, None] > 0, 0))

    def prefill(
        self, q: torch.Tensor, rows: PagedRows, first_queries: torch.Tensor, rule: AttentionRule, out: torch.Tensor
    ) -> None:
        """Causal attention of rows whose queries are their last tokens; q [T, heads, Dk], out [T, heads, Dv].

        Row i has queries `first_queries[i]` up to `first_queries[i + 1]` (int32 [rows + 1]), none for a padding row.
        """
        lengths = rows.seq_lens.tolist()
        for row, ((first, stop), length) in enumerate(zip(pairwise(first_queries.tolist()), lengths, strict=True)):
            if first == stop or not length:
                out[first:stop] = 0
                continue
            pages = rows.tables[row, : -(-length // rows.keys.shape[1])]
            keys, values = (
                each.index_select(0, pages).flatten(0, 1)[:length].to(q.dtype) for each in (rows.keys, rows.values)
            )
            for start in range(first, stop, TILE):
                end = min(start + TILE, stop)
                _attend_tile(q[start:end], keys[: length - stop + end], values, rule, out[start:end])

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum x + delta, and the sum scaled to a root mean square of 1 times `weight`; all [T, features].

        Without `delta` the first result is x itself.
        """
        summed = x if delta is None else x + delta
        return summed, _rms_norm(summed, weight, epsilon)

    def rotate_and_store(
        self, qkv: torch.Tensor, rotary: Rotary, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Normalize and rotate queries and keys, store keys and values in their slots; the queries [T, heads, D].

        qkv [T, (heads + 2 kv_heads) * D]; slots int64 [T], negative slots are skipped; keys, values as in `PagedRows`.
        """
        kv_heads, dim = keys.shape[2:]
        split = qkv.unflatten(1, (-1, dim))
        q, k, v = split[:, : -2 * kv_heads], split[:, -2 * kv_heads : -kv_heads], split[:, -kv_heads:]
        if rotary.q_norm is not None and rotary.k_norm is not None:
            q, k = _rms_norm(q, rotary.q_norm, rotary.epsilon), _rms_norm(k, rotary.k_norm, rotary.epsilon)
        cos, sin = (each.to(qkv.dtype)[:, None] for each in (rotary.cos, rotary.sin))
        kept = (slots >= 0)[:, None, None]
        targets = slots.clamp(min=0)
        for pages, new in ((keys, _rotate(k, cos, sin)), (values, v)):
            flat = as_moved(pages).flatten(0, 1)
            flat.index_copy_(0, targets, torch.where(kept, as_moved(as_stored(new, pages.dtype)), flat[targets]))
        return _rotate(q, cos, sin)

    def write_slots(self, stack: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
        """Set stack[:, slots] of [layers, S, features] to values [layers, slots, features]; slots int64, all unlike."""
        stack.index_copy_(1, slots, values)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of [T, 2 * F]."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def round_rows(self, x: torch.Tensor, features: int) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, F] in 8 bits, of a multiple of `ROUNDED_ROWS` rows, and the scales [rows, ceil(F / features)] float32.

        Each scale, of so many features of a row, makes the greatest of them `FP8_MOST`. Scales lie column by column.
        """
        padded = F.pad(x.float(), (0, -x.shape[1] % features, 0, -len(x) % ROUNDED_ROWS)).unflatten(1, (-1, features))
        scales = padded.abs().amax(2).clamp(min=LEAST_SCALE * FP8_MOST) / FP8_MOST
        rounded = as_stored(padded / scales[:, :, None], torch.float8_e4m3fn).flatten(1)[:, : x.shape[1]]
        return rounded.contiguous(), scales.t().contiguous().t()

    def expert_products(
        self, x: torch.Tensor, weights: torch.Tensor, firsts: torch.Tensor, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x[rows] times the transposed weights of each choice's expert: [choices, outputs].

        weights [experts, outputs, inputs]; expert e has choices `firsts[e]` up to `firsts[e + 1]` (int32 [experts + 1],
        from 0); `rows` [choices] int64, None: choice i is of row i.
        """
        count = len(x if rows is None else rows)
        expert = torch.searchsorted(firsts, torch.arange(count, dtype=firsts.dtype, device=x.device), right=True) - 1
        return torch.bmm(weights[expert], (x if rows is None else x[rows])[:, :, None])[:, :, 0]

    def mask(self, logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
        """Set what `bits` does not allow in `rows` of `logits` to -inf, in place, as `logit_edits.mask_logits`."""
        mask_logits(logits, rows, bits)

    def sample(self, logits: torch.Tensor, inputs: SamplingInputs, out: torch.Tensor) -> None:
        """Draw a token for each row of `logits` [rows, vocab] float32 into `out` [rows] int64, as `sampler.sample`.

        `NO_TOKEN` if a row's greatest logit is NaN or infinite. Also writes the tokens to `inputs.last_tokens`.
        """
        positions = (inputs.lengths - inputs.prompts).clamp(min=0)
        columns = (inputs.temperatures, inputs.top_ks, inputs.top_ps, inputs.min_ps, inputs.seeds, positions)
        values = (each[inputs.rows].tolist() for each in columns)
        rows = []
        for temperature, top_k, top_p, min_p, seed, position in zip(*values, strict=True):
            params = SamplingParams(
                temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed % (1 << 64), max_tokens=1
            )
            rows.append(SamplingRow(params, position, (), ()))
        drawn = sample(logits, rows)
        out.copy_(torch.tensor([each.token_id if each.finite else NO_TOKEN for each in drawn], dtype=torch.int64))
        inputs.last_tokens.index_copy_(0, inputs.rows, out)


class TorchCpuKernels(TorchKernels):
    """Decodes row by row: on a CPU 1.7 to 5 times as fast as over tables padded to the longest row."""

    def decode(self, q: torch.Tensor, rows: PagedRows, plan: Any, rule: AttentionRule, out: torch.Tensor) -> None:  # noqa: ARG002
        self.prefill(q, rows, torch.arange(len(q) + 1), rule, out)


def as_stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values in the dtype of KV. In 8 bits all beyond the greatest number become it, but infinities NaN."""
    if dtype != torch.float8_e4m3fn:
        return x
    return torch.where(x.isfinite(), x.clamp(-FP8_MOST, FP8_MOST), nan).to(dtype)


def as_moved(pages: torch.Tensor) -> torch.Tensor:
    """The same memory, as numbers that torch can copy by an index: it cannot for some of 8 bits."""
    return pages.view(torch.uint8) if pages.dtype.itemsize == 1 else pages


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x scaled to a root mean square of 1 along its last dimension, times `weight`."""
    return F.rms_norm(x, (x.shape[-1],), weight, epsilon)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [T, heads, D] by cos and sin [T, 1, D / 2]; pairs are (i, i + D / 2) as in Hugging Face."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _attend_tile(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rule: AttentionRule, out: torch.Tensor
) -> None:
    """Attention of the queries [Q, heads, Dk] of the last tokens of `keys` [K, kv_heads, Dk] into `out`.

    Scores and weights have the queries' dtype. The query heads of one KV head are the rows of one product.
    """
    count, (length, kv_heads, _) = len(q), keys.shape
    before = length - count
    first = 0 if rule.window is None else max(0, before + 1 - rule.window)
    keys, values = keys[first:], values[first:length]
    queries = (q * rule.scale).view(count, kv_heads, -1, q.shape[2]).permute(1, 2, 0, 3)
    scores = torch.bmm(queries.flatten(1, 2), keys.permute(1, 2, 0)).view(*queries.shape[:3], length - first)
    hidden = None
    if count > 1:
        # Without a window only the tile's own keys can be hidden: those after each query.
        start = before if rule.window is None else first
        distance = torch.arange(before, length, device=q.device)[:, None] - torch.arange(start, length, device=q.device)
        hidden = distance < 0 if rule.window is None else (distance < 0) | (distance >= rule.window)
    _cap_and_hide(scores, hidden, rule.softcap)
    weights = _softmax(scores.flatten(0, 1), rule.sinks).view_as(scores)
    found = weighted_sum(weights.flatten(1, 2), values.transpose(0, 1)).view(*queries.shape[:3], -1)
    out.copy_(found.permute(2, 0, 1, 3).flatten(1, 2))


def _cap_and_hide(scores: torch.Tensor, hidden: torch.Tensor | None, softcap: float | None) -> None:
    """Cap the scores where the rule asks for it, and hide keys, in place; `hidden` covers the last keys."""
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if hidden is not None:
        scores[..., -hidden.shape[-1] :].masked_fill_(hidden, float("-inf"))


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax of scores [..., heads, Q, K] over the keys; sinks [heads] take part in it."""
    if sinks is None:
        return torch.softmax(scores, -1)
    column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1]


def weighted_sum(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """weights [B, Q, K] @ values [B, K, D], where a weight of 0 hides any value, NaN included. Waits for the device.

    A page may hold what an earlier request left there, and a token whose numbers are out of range may follow a prefix
    that other requests share: neither may reach a token that does not see it.
    """
    found = torch.bmm(weights, values)  # reads strided values; @ would copy them
    if isfinite(float(found.sum(dtype=torch.float32))):
        return found
    odd = ~values.isfinite()
    reached = (weights != 0).float() @ odd.float() > 0
    return (weights @ values.masked_fill(odd, 0)).masked_fill(reached, nan)
