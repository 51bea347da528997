"""Models behind one contract (`base.Model`): our decoder for the common families, transformers' code for the rest.

Imported by `execute`; `kernels` and `attention` may import `base` and `spec` alone. Must not know requests, the KV pool
or attention backends. Importing this package is light: torch and the providers are imported when a model is resolved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from ..config import ReplicaSettings
    from ..parallel.rank_group import RankGroup
    from .base import Model


def resolve(
    settings: ReplicaSettings,
    model_dir: Path,
    group: RankGroup | None,
    *,
    device: torch.device,
) -> Model:
    """Load the model in a Hugging Face folder with the provider that the settings select. Raises ModelError."""
    from .loading import load

    return load(settings, model_dir, group, device=device)
