"""The operations of a decoder step on a device: paged attention, the small operations around it, and the sampler.

All arguments are tensors of fixed shape, and no value is read back to the host, so that a CUDA graph can capture a
whole step. `torch_kernels.TorchKernels` defines each method in plain torch; tests hold all implementations to float64.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from ..models.base import AttentionRule, Rotary

#: In place of a token id, in tensors.
NO_TOKEN = -1


@dataclass(slots=True, frozen=True)
class PagedRows:
    """The KV of one layer, and the part of it that each row of a step sees."""

    keys: torch.Tensor  #: [pages, page, kv_heads, Dk]
    values: torch.Tensor  #: [pages, page, kv_heads, Dv]
    tables: torch.Tensor  #: [rows, longest] int32 pages in order; entries beyond a row's length are not read
    seq_lens: torch.Tensor  #: [rows] int32 tokens, this step's included; 0: a padding row


@dataclass(slots=True, frozen=True)
class SamplingInputs:
    """The sampling parameters of each row, [rows] each, as in `messages.SamplingParams`."""

    temperatures: torch.Tensor  #: float32; below `sampler.GREEDY_BELOW` the likeliest token is drawn
    top_ks: torch.Tensor  #: int32, 0: all
    top_ps: torch.Tensor  #: float64
    min_ps: torch.Tensor  #: float32
    seeds: torch.Tensor  #: int64, the bits of a uint64
    positions: torch.Tensor  #: int64 tokens generated before this one


class Kernels(Protocol):
    """The operations of one step. A parameter `out` is overwritten; other arguments change only where it says so."""

    name: ClassVar[str]

    def take(self, table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """The rows of `table` [N, F] at `places` [T] int64, each of which is below N: [T, F]."""
        ...

    def rotary_table(
        self, positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, D / 2] of positions [T] int64 times frequencies [D / 2] float32, rounded to `dtype`."""
        ...

    def plan_decode(self, seq_lens: torch.Tensor, kv_heads: int, window: int | None) -> Any:
        """A plan that the `decode` calls of all layers with these KV heads and this window share in one step."""
        ...

    def decode(self, q: torch.Tensor, rows: PagedRows, plan: Any, rule: AttentionRule, out: torch.Tensor) -> None:
        """Attention of rows with one query each, their last token: q [rows, heads, Dk], out [rows, heads, Dv].

        A padding row's output is zero.
        """
        ...

    def prefill(
        self, q: torch.Tensor, rows: PagedRows, first_queries: torch.Tensor, rule: AttentionRule, out: torch.Tensor
    ) -> None:
        """Causal attention of rows whose queries are their last tokens; q [T, heads, Dk], out [T, heads, Dv].

        Row i has queries `first_queries[i]` up to `first_queries[i + 1]` (int32 [rows + 1]), none for a padding row.
        """
        ...

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum x + delta, and the sum scaled to a root mean square of 1 times `weight`; all [T, features].

        Without `delta` the first result is x itself.
        """
        ...

    def rotate_and_store(
        self, qkv: torch.Tensor, rotary: Rotary, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Normalize and rotate queries and keys, store keys and values in their slots; the queries [T, heads, D].

        qkv [T, (heads + 2 kv_heads) * D]; slots int64 [T], negative slots are skipped; keys, values as in `PagedRows`.
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of [T, 2 * F]."""
        ...

    def sample(self, logits: torch.Tensor, inputs: SamplingInputs, out: torch.Tensor) -> None:
        """Draw a token for each row of `logits` [rows, vocab] float32 into `out` [rows] int64, as `sampler.sample`.

        `NO_TOKEN` if a row's greatest logit is NaN or infinite.
        """
        ...
