"""One rank's model and KV memory: a plan goes in, logits come out. Knows nothing of requests, sockets or sampling."""

from pathlib import Path

import torch

from .config import ReplicaSettings
from .models.spec import ModelSpec
from .plan import StepPlan
from .ranks import RankGroup


class ModelRunner:
    """Weights and KV tensors of one rank. Not thread-safe: one engine thread calls it."""

    spec: ModelSpec
    block_size: int

    def __init__(
        self, settings: ReplicaSettings, model_dir: Path, block_size: int, group: RankGroup | None = None
    ) -> None:
        """Load the weights from a Hugging Face folder. Raises ModelError when this model cannot run here."""
        raise NotImplementedError

    def allocate_kv(self, num_blocks: int) -> None:
        """Make room for the KV of `num_blocks` blocks (zeroed; block 0 is the null block); call before `forward`."""
        raise NotImplementedError

    def forward(self, plan: StepPlan) -> torch.Tensor | None:
        """Run one step: [len(plan.logits_at), vocab] float32 on rank 0, None on other ranks.

        The tensor is the caller's to change. All ranks must be called with the same plan.
        """
        raise NotImplementedError
