"""Rotary frequencies that do not depend on the batch: default, linear and llama3."""

import math
from collections.abc import Mapping
from typing import Any

import torch

#: Kinds whose frequencies are fixed at load. Those of longrope and dynamic depend on the batch's longest position.
FIXED_KINDS = ("default", "linear", "llama3")


def inverse_frequencies(parameters: Mapping[str, Any], head_dim: int) -> torch.Tensor:
    """[head_dim / 2] float32, from a Hugging Face configuration's `rope_parameters`; `rope_type` in FIXED_KINDS."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies: torch.Tensor = 1.0 / (parameters["rope_theta"] ** exponents)
    kind = parameters["rope_type"]
    assert kind in FIXED_KINDS, kind
    if kind == "linear":
        return torch.div(frequencies, parameters["factor"])
    if kind == "llama3":
        return _llama3(frequencies, parameters)
    return frequencies


def _llama3(frequencies: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
    """Long wavelengths are slowed by `factor`, short ones kept, those between blended (as Llama 3.1 was released)."""
    low, high, factor = (parameters[name] for name in ("low_freq_factor", "high_freq_factor", "factor"))
    original = parameters["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    keep: torch.Tensor = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    blended: torch.Tensor = (1 - keep) * frequencies / factor + keep * frequencies
    return blended
