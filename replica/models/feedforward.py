"""The feedforward part of a layer: one gated MLP, or a mixture of experts of which each token uses a few.

A rank holds a part of every MLP's features and the whole router; the results must be summed over ranks.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from ..kernels.base import Kernels
from .layers import Int8Linear, Linear


@dataclass(slots=True, frozen=True)
class GatedMlp:
    """down(silu(gate(x)) * up(x)), on flat [T, hidden] activations."""

    gate_up: Linear | Int8Linear
    down: Linear | Int8Linear

    def __call__(self, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        return self.down(kernels.silu_mul(self.gate_up(x)))


@dataclass(slots=True, frozen=True)
class Mixture:
    """The weighted sum of each token's likeliest experts and, in some families, a shared expert for all tokens.

    Each expert runs on its tokens alone. So shapes depend on the data, and a CUDA graph cannot hold it.
    """

    router: torch.Tensor  #: [experts, hidden]
    experts: list[GatedMlp]
    per_token: int
    normalized: bool  #: the weights of a token's experts sum to 1
    shared: GatedMlp | None
    shared_gate: torch.Tensor | None  #: [1, hidden]

    def __call__(self, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        weights, chosen = F.linear(x, self.router).float().softmax(-1).topk(self.per_token, -1)
        if self.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        total = self._shared(x, kernels)
        # Tokens sorted by expert: [experts' tokens one after the other] of the flat choices.
        order = chosen.flatten().argsort(stable=True)
        tokens, shares = order // self.per_token, weights.flatten()[order, None]
        first = 0
        counts: list[int] = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                mine = slice(first, first + count)
                found = expert(x[tokens[mine]], kernels) * shares[mine]
                total.index_add_(0, tokens[mine], found.to(x.dtype))
                first += count
        return total

    def _shared(self, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        if self.shared is None:
            return torch.zeros_like(x)
        found = self.shared(x, kernels)
        return found if self.shared_gate is None else F.linear(x, self.shared_gate).sigmoid() * found


Feedforward = GatedMlp | Mixture
