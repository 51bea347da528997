"""The device operations of a decoder step: paged attention, the small operations around it, and the sampler.

All arguments are tensors of fixed shape, so that a CUDA graph can capture a whole step. `TorchKernels` defines in plain
torch what each method computes and is the fallback where no compiled kernel works; kernels for a particular kind of
device override its methods. Tests compare all implementations with float64.
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

#: Prefill queries per matrix product. On an AMD EPYC, 64 and 128 were equally fast and 256 was a tenth slower.
TILE = 128
#: Largest finite FP8 (E4M3) number.
FP8_MAX = 448.0
#: Lower bound of an FP8 scale, so that all-zero features have one too.
MIN_SCALE = 1e-12
#: `round_rows` pads to a multiple of this many rows, so that each column of scales is 16-byte aligned for cuBLAS.
ROUNDED_ROWS = 4
#: Stands for "no token" in tensors of token ids.
NO_TOKEN = -1


@dataclass(slots=True, frozen=True)
class PagedRows:
    """One layer's KV and the part of it that each row of a step sees. KV has the queries' dtype or is FP8."""

    keys: torch.Tensor  #: [pages, page, kv_heads, Dk]
    values: torch.Tensor  #: [pages, page, kv_heads, Dv]
    tables: torch.Tensor  #: [rows, longest] int32 page numbers in order; entries beyond a row's length are not read
    seq_lens: torch.Tensor  #: [rows] int32 number of tokens, including this step's; 0: a padding row


@dataclass(slots=True, frozen=True)
class SamplingInputs:
    """The slot of each row; all other tensors are indexed by slot, with parameters as in `messages.SamplingParams`."""

    rows: torch.Tensor  #: [rows] int64 slots
    temperatures: torch.Tensor  #: float32; below `sampler.GREEDY_BELOW` the likeliest token is chosen
    top_ks: torch.Tensor  #: int32; 0: no limit
    top_ps: torch.Tensor  #: float64
    min_ps: torch.Tensor  #: float32
    seeds: torch.Tensor  #: int64 that holds the bits of a uint64
    prompts: torch.Tensor  #: int64 number of prompt tokens
    lengths: torch.Tensor  #: int32 or int64 number of tokens before this one
    last_tokens: torch.Tensor  #: int64; the sampler writes the drawn tokens here


@dataclass(slots=True, frozen=True)
class DecodeRows:
    """Inputs of a decode step, one entry per row."""

    token_ids: torch.Tensor  #: int64
    positions: torch.Tensor  #: int64
    slots: torch.Tensor  #: int64 KV slots that the tokens are written to; 0 for padding rows
    tables: torch.Tensor  #: [rows, pages] int32; entries beyond a row's length are undefined
    seq_lens: torch.Tensor  #: int32 number of tokens, including this step's; 0 for padding rows


class TorchKernels:
    """Plain torch on any device. `out` parameters are overwritten; other arguments change only where documented.

    Only `prefill` and `sample` read values back to the host.
    """

    name: ClassVar[str] = "torch"
    #: Whether kernels are compiled at their first launch, which would stop all requests for up to a second.
    compiles: ClassVar[bool] = False

    def warm_up(self, spec: ModelSpec, block_size: int, device: torch.device) -> None:
        """Compile what every step of this model needs and what would otherwise be compiled on first use."""

    def decode_rows(
        self,
        rows: torch.Tensor,
        last_tokens: torch.Tensor,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        block_size: int,
    ) -> DecodeRows:
        """Inputs of the next decode step of the requests in slots `rows`; adds the step's tokens to `seq_lens`.

        rows [R] int64, 0 for padding. By slot: last_tokens int64 (negative: none), seq_lens and block_tables int32.
        """
        starts = seq_lens[rows]
        lengths = torch.where(rows > 0, starts + 1, 0).int()
        tables, positions = block_tables[rows], starts.long()
        blocks = tables.gather(1, (positions // block_size)[:, None])[:, 0].long()
        slots = torch.where(rows > 0, blocks * block_size + positions % block_size, 0)
        seq_lens.index_copy_(0, rows, lengths)
        return DecodeRows(last_tokens[rows].clamp(min=0), positions, slots, tables, lengths)

    def take(self, table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Rows of `table` [N, F] at the indices `indices` [T] int64, all below N; returns [T, F]."""
        return F.embedding(indices, table)

    def rotary_table(
        self, positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, D / 2] of positions [T] int64 times frequencies [D / 2] float32, rounded to `dtype`."""
        angles = positions[:, None].float() * frequencies
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def embed(
        self, table: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A decoder's first inputs: rows of `table` [N, F] at `ids` [T], and the rotary table in its dtype."""
        return self.take(table, ids), *self.rotary_table(positions, frequencies, table.dtype)

    def plan_decode(self, rows: PagedRows, heads: int, window: int | None) -> Any:  # noqa: ARG002
        """A plan that one step's `decode` calls share in all layers whose KV and queries have these shapes."""
        return None

    def decode(self, q: torch.Tensor, rows: PagedRows, plan: Any, rule: AttentionRule, out: torch.Tensor) -> None:  # noqa: ARG002
        """Attention for rows with one query each, for their last token: q [rows, heads, Dk], out [rows, heads, Dv].

        The output of padding rows is zero.
        """
        size, device = rows.keys.shape[1], q.device
        positions = torch.arange(rows.tables.shape[1] * size, device=device)
        tables = rows.tables.where(positions[::size] < rows.seq_lens[:, None], 0)  # unused entries read page 0
        last = rows.seq_lens[:, None].long() - 1
        seen = positions <= last
        if rule.window is not None:
            seen &= positions > last - rule.window
        heads = q.shape[1]
        # [rows, heads, tokens, D]. Tokens that the row does not see may be NaN, so they are zeroed.
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
        """Causal attention for rows whose queries are their last tokens: q [T, heads, Dk], out [T, heads, Dv].

        Row i has queries `first_queries[i]` up to `first_queries[i + 1]` (int32 [rows + 1]); padding rows have none.
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
        """The sum x + delta, and its RMS norm: the sum scaled to a root mean square of 1, times `weight`.

        All are [T, features]. Without `delta` the first result is x itself.
        """
        summed = x if delta is None else x + delta
        return summed, _rms_norm(summed, weight, epsilon)

    def rotate_and_store(
        self, qkv: torch.Tensor, rotary: Rotary, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Normalize and rotate queries and keys, store keys and values in their slots; returns queries [T, heads, D].

        qkv [T, (heads + 2 kv_heads) * D]; slots [T] int64, negative ones are skipped; keys, values as in `PagedRows`.
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
        """Set stack[:, slots] of [layers, S, features] to values [layers, slots, features]; slots distinct int64."""
        stack.index_copy_(1, slots, values)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, the two halves of gate_up [T, 2 * F]; returns [T, F]."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def round_rows(self, x: torch.Tensor, features: int) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, F] in FP8, padded to a multiple of `ROUNDED_ROWS` rows, and scales [rows, ceil(F / features)] float32.

        Each scale applies to `features` features of a row and maps the largest to `FP8_MAX`. Scales are column-major.
        """
        padded = F.pad(x.float(), (0, -x.shape[1] % features, 0, -len(x) % ROUNDED_ROWS)).unflatten(1, (-1, features))
        scales = padded.abs().amax(2).clamp(min=MIN_SCALE * FP8_MAX) / FP8_MAX
        rounded = as_stored(padded / scales[:, :, None], torch.float8_e4m3fn).flatten(1)[:, : x.shape[1]]
        return rounded.contiguous(), scales.t().contiguous().t()

    def expert_products(
        self, x: torch.Tensor, weights: torch.Tensor, firsts: torch.Tensor, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Products of x[rows] and the transposed weight of each choice's expert: [choices, outputs].

        weights [experts, outputs, inputs]. Expert e has choices `firsts[e]` up to `firsts[e + 1]` (int32 [experts + 1],
        from 0). rows [choices] int64 is the row of x that made each choice; None: choice i is row i's.
        """
        count = len(x if rows is None else rows)
        expert = torch.searchsorted(firsts, torch.arange(count, dtype=firsts.dtype, device=x.device), right=True) - 1
        return torch.bmm(weights[expert], (x if rows is None else x[rows])[:, :, None])[:, :, 0]

    def mask(self, logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
        """Set the logits that `bits` does not allow to -inf, in place, as `logit_edits.mask_logits` does."""
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
    """Plain torch that decodes row by row: on a CPU 1.7 to 5 times as fast as padding to the longest row."""

    def decode(self, q: torch.Tensor, rows: PagedRows, plan: Any, rule: AttentionRule, out: torch.Tensor) -> None:  # noqa: ARG002
        self.prefill(q, rows, torch.arange(len(q) + 1), rule, out)


def as_stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values as stored in KV of `dtype`. For FP8, finite numbers are clamped and infinities become NaN."""
    if dtype != torch.float8_e4m3fn:
        return x
    return torch.where(x.isfinite(), x.clamp(-FP8_MAX, FP8_MAX), nan).to(dtype)


def as_moved(pages: torch.Tensor) -> torch.Tensor:
    """A view that torch can copy by index: 8-bit dtypes as uint8, because torch lacks this for some of them."""
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
    """Attention for queries [Q, heads, Dk] of the last tokens of `keys` [K, kv_heads, Dk], written to `out`.

    Scores and weights have the queries' dtype. One product computes all query heads of a KV head.
    """
    count, (length, kv_heads, _) = len(q), keys.shape
    before = length - count
    first = 0 if rule.window is None else max(0, before + 1 - rule.window)
    keys, values = keys[first:], values[first:length]
    queries = (q * rule.scale).view(count, kv_heads, -1, q.shape[2]).permute(1, 2, 0, 3)
    scores = torch.bmm(queries.flatten(1, 2), keys.permute(1, 2, 0)).view(*queries.shape[:3], length - first)
    hidden = None
    if count > 1:
        # Without a window, only the tile's own keys can be hidden: those after each query.
        start = before if rule.window is None else first
        distance = torch.arange(before, length, device=q.device)[:, None] - torch.arange(start, length, device=q.device)
        hidden = distance < 0 if rule.window is None else (distance < 0) | (distance >= rule.window)
    _cap_and_hide(scores, hidden, rule.softcap)
    weights = _softmax(scores.flatten(0, 1), rule.sinks).view_as(scores)
    found = weighted_sum(weights.flatten(1, 2), values.transpose(0, 1)).view(*queries.shape[:3], -1)
    out.copy_(found.permute(2, 0, 1, 3).flatten(1, 2))


def _cap_and_hide(scores: torch.Tensor, hidden: torch.Tensor | None, softcap: float | None) -> None:
    """Apply the softcap, if any, and hide keys, in place; `hidden` covers only the last keys."""
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if hidden is not None:
        scores[..., -hidden.shape[-1] :].masked_fill_(hidden, float("-inf"))


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax of scores [..., heads, Q, K] over the keys; `sinks` [heads] add to its denominator."""
    if sinks is None:
        return torch.softmax(scores, -1)
    column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1]


def weighted_sum(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """weights [B, Q, K] @ values [B, K, D], where a weight of 0 hides any value, even NaN. Waits for the device.

    A page may contain an earlier request's leftovers, and a token with NaN or infinite values may follow a prefix that
    other requests share. Neither may affect a token that does not see it.
    """
    found = torch.bmm(weights, values)  # reads strided values; @ would copy them
    if isfinite(float(found.sum(dtype=torch.float32))):
        return found
    non_finite = ~values.isfinite()
    reached = (weights != 0).float() @ non_finite.float() > 0
    return (weights @ values.masked_fill(non_finite, 0)).masked_fill(reached, nan)
