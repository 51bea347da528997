"""The interfaces between the runner, models and attention; every model provider implements `Model`."""

from dataclasses import dataclass
from typing import Protocol

import torch

from .spec import ModelSpec


@dataclass(slots=True, frozen=True, eq=False)
class AttentionRule:
    """How one layer's causal attention scores its keys."""

    scale: float
    window: int | None = None  #: a token sees this many last tokens, including itself; None: all
    softcap: float | None = None  #: scores become softcap * tanh(score / softcap)
    sinks: torch.Tensor | None = None  #: [heads] scores that add to the softmax denominator and have no value


@dataclass(slots=True, frozen=True, eq=False)
class Rotary:
    """How a step's queries and keys are rotated and, in models that do so, normalized."""

    cos: torch.Tensor  #: [T, D / 2], float32 or of the activations' dtype
    sin: torch.Tensor
    q_norm: torch.Tensor | None  #: [D]
    k_norm: torch.Tensor | None
    epsilon: float


class Attend(Protocol):
    """One layer's attention over paged KV: stores this step's keys and values, then attends to all stored ones."""

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """q [T, heads, Dk], k [T, kv_heads, Dk], v [T, kv_heads, Dv]; returns [T, heads, Dv]."""


class QkvAttend(Attend, Protocol):
    """An `Attend` that can also normalize and rotate, in the same kernel as the store."""

    def from_qkv(self, layer: int, qkv: torch.Tensor, rotary: Rotary, rule: AttentionRule) -> torch.Tensor:
        """Attention from the fused projection `qkv` [T, (heads + 2 kv_heads) * D]; returns [T, heads, D]."""


class Model(Protocol):
    """A loaded model, or one rank's share of it."""

    spec: ModelSpec
    #: The reason why its steps cannot be captured in a graph; None: no known reason.
    capture_problem: str | None
    #: How each layer attends.
    rules: list[AttentionRule]

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, attend: QkvAttend, logits_at: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Logits [len(logits_at), vocab] for the flat tokens `ids` [T] at `positions` [T]; None on ranks other than 0.

        `logits_at` are indices into `ids`; None: all. Calls `attend` once per layer, in order. Runs in inference mode.
        """

    def forward_hidden(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        attend: QkvAttend,
        logits_at: torch.Tensor,
        hidden_at: torch.Tensor,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """As `forward`, and the last hidden states [len(hidden_at), hidden_size], normalized as for the logits.

        Other ranks may call `forward` instead: every rank computes all hidden states, so none are sent.
        """
