"""Reads the tensors of a Hugging Face folder, whole or one rank's share at a time.

From `*.safetensors`, sharded or not; memory-mapped, so that a share costs only its own bytes.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..errors import WeightsMissing

#: Rows (outputs) or columns (inputs) of a linear layer's weight.
ROWS, COLUMNS = 0, 1


class Checkpoint:
    """All tensors of a folder by name, converted to one dtype and device when read."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Open the folder's files. Raises WeightsMissing if there are none."""
        self._dtype = dtype
        self._device = device
        self._file_of: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file: Any = safe_open(path, framework="pt")
            self._file_of.update(dict.fromkeys(file.keys(), file))
        if not self._file_of:
            raise WeightsMissing(f"{folder} has no *.safetensors; save the model with safe serialization")

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def whole(self, name: str) -> torch.Tensor:
        return self._converted(self._slice(name)[:])

    def share(self, name: str, dim: int, index: int, parts: int) -> torch.Tensor:
        """The `index`-th of `parts` equal parts along `dim`, which must divide. Raises WeightsMissing."""
        tensor = self._slice(name)
        size = tensor.get_shape()[dim]
        assert size % parts == 0, f"{name}: {size} along {dim} does not divide into {parts} parts"
        width = size // parts
        return self.span(name, dim, index * width, (index + 1) * width)

    def span(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` along `dim` (0 or 1), clipped to the tensor. Raises WeightsMissing."""
        tensor = self._slice(name)
        return self._converted(tensor[start:stop] if dim == ROWS else tensor[:, start:stop])

    def _slice(self, name: str) -> Any:
        if name not in self._file_of:
            raise WeightsMissing(f"the checkpoint has no tensor {name!r}; is this folder complete?")
        return self._file_of[name].get_slice(name)

    def _converted(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=self._device, dtype=self._dtype).contiguous()
