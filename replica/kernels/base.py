"""What a decoder step asks of the device: paged attention, the small operations around it, and the sampler.

Everything is a tensor of fixed shape, nothing is read back to the host, so that a whole step can be captured in a CUDA
graph. `fallback.TorchKernels` says in plain torch what each method means; `fused.TritonKernels` is held to it and to
float64 by tests.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from ..models.base import AttentionRule, Rotary

#: In place of a token id, in tensors.
NO_TOKEN = -1


@dataclass(slots=True, frozen=True)
class PagedRows:
    """The KV of one layer, and which of it each row of a step sees."""

    keys: torch.Tensor  #: [pages, page, kv_heads, Dk]
    values: torch.Tensor  #: [pages, page, kv_heads, Dv]
    tables: torch.Tensor  #: [rows, longest] int32 pages in order; what lies beyond a row's length is not read
    seq_lens: torch.Tensor  #: [rows] int32 tokens, this step's included; 0: a padding row


@dataclass(slots=True, frozen=True)
class SamplingInputs:
    """How each row's token is drawn; [rows] each. Meanings as in `messages.SamplingParams`."""

    temperatures: torch.Tensor  #: float32; below `sampler.GREEDY_BELOW` the likeliest token is taken
    top_ks: torch.Tensor  #: int32, 0: all
    top_ps: torch.Tensor  #: float64
    min_ps: torch.Tensor  #: float32
    seeds: torch.Tensor  #: int64, the bits of an unsigned number
    positions: torch.Tensor  #: int64 tokens generated before this one


class Kernels(Protocol):
    """The operations of one step. `out` is written wherever it is given; nothing else that is passed is changed."""

    name: ClassVar[str]

    def take(self, table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """The rows of `table` [N, F] at `places` [T] int64, each of which is below N: [T, F]."""
        ...

    def waves(
        self, positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of positions [T] int64 times frequencies [D / 2] float32, in float32 and rounded to `dtype`."""
        ...

    def plan_decode(self, seq_lens: torch.Tensor, kv_heads: int, window: int | None) -> Any:
        """Work shared by the `decode` calls of a step's layers that have the same KV heads and window."""
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
        """(x + delta, that scaled to a root mean square of 1 times `weight`); all [T, features]. x may be reused."""
        ...

    def rotate_and_store(
        self, qkv: torch.Tensor, rotary: Rotary, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Norm and rotate queries and keys, put keys and values into their slots, return the queries [T, heads, D].

        qkv [T, (heads + 2 kv_heads) * D]; slots int64 [T], negative ones are skipped; keys, values as in `PagedRows`.
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of [T, 2 * F]."""
        ...

    def sample(self, logits: torch.Tensor, inputs: SamplingInputs, out: torch.Tensor) -> None:
        """The token of each row of `logits` [rows, vocab] float32 into `out` [rows] int64: as `sampler.sample`.

        `NO_TOKEN` where a row's greatest logit is NaN or infinite.
        """
        ...
