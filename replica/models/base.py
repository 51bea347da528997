"""The contract between the runner, models and attention; every provider of models implements `Model`."""

from dataclasses import dataclass
from typing import Protocol

import torch

from .spec import ModelSpec


@dataclass(slots=True, frozen=True, eq=False)
class AttentionRule:
    """How one layer scores its keys, beyond being causal."""

    scale: float
    window: int | None = None  #: a token sees the last `window` tokens, itself included
    softcap: float | None = None  #: scores become softcap * tanh(score / softcap)
    sinks: torch.Tensor | None = None  #: [heads] scores that take part in the softmax and weigh nothing


@dataclass(slots=True, frozen=True, eq=False)
class Rotary:
    """Normalization (in models that have it) and rotation of a step's queries and keys."""

    cos: torch.Tensor  #: [T, D / 2], float32 or of the activations' dtype
    sin: torch.Tensor
    q_norm: torch.Tensor | None  #: [D]
    k_norm: torch.Tensor | None
    epsilon: float


class Attend(Protocol):
    """Attention of one layer over the paged KV: stores this step's keys and values, then attends to all stored ones."""

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """q [T, heads, Dk], k [T, kv_heads, Dk], v [T, kv_heads, Dv]; returns [T, heads, Dv]."""


class QkvAttend(Attend, Protocol):
    """`Attend` that can also normalize and rotate, in one kernel with the store."""

    def from_qkv(self, layer: int, qkv: torch.Tensor, rotary: Rotary, rule: AttentionRule) -> torch.Tensor:
        """From the joined projection [T, (heads + 2 kv_heads) * D] to [T, heads, D]."""


class Model(Protocol):
    """A loaded model, or one rank's share of it."""

    spec: ModelSpec
    #: Why its steps cannot be captured in a graph; None: no reason is known.
    uncapturable: str | None

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, attend: QkvAttend, logits_at: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Logits [len(logits_at), vocab] of the flat tokens `ids` [T] at `positions` [T]; None: of all of them.

        Calls `attend` once per layer, in order. None on ranks other than 0. Runs in inference mode.
        """

    def forward_hidden(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        attend: QkvAttend,
        logits_at: torch.Tensor,
        hidden_at: torch.Tensor,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """As `forward`, with the last hidden states [len(hidden_at), hidden_size], normalized as for the logits.

        Other ranks may call `forward`: every rank has the hidden states, so that none are sent.
        """
