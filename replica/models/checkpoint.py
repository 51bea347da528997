"""Reads the weights of a Hugging Face folder: one rank's part of each tensor, in one dtype, on one device.

FP8 weights are dequantized as they are read, unless they are read with their scales.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..load.preflight import check_quantization
from ..load.quantized import BLOCK, Scaling, kept_problem
from ..load.weight_files import tensors_in, weight_files
from ..progress import report
from .fp8 import ScaledWeight

#: Rows (outputs) or columns (inputs) of a linear layer's weight.
ROWS, COLUMNS = 0, 1
#: Rows to dequantize at once, which bounds the memory for their float32 values.
_ROWS_AT_ONCE = 1024


class Checkpoint:
    """All tensors of a Hugging Face folder by name, converted to one dtype and device when read.

    Reads `*.safetensors`, sharded or not. Files are memory-mapped, so a rank reads only the bytes of its shard.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Open the folder's files. Raises WeightsMissing, WeightsDamaged and UnsupportedModel."""
        self._dtype = dtype
        self._device = device
        self._file_of: dict[str, Any] = {}
        self._names_read: set[str] = set()
        headers = tensors_in(folder)
        for path in weight_files(folder):
            file: Any = safe_open(path, framework="pt")
            self._file_of.update(dict.fromkeys(file.keys(), file))
        self._dtypes = {name: header.dtype for name, header in headers.items()}
        self._scalings = check_quantization(folder, headers)
        scales = {each.scales for each in self._scalings.values()}
        #: Shapes of all tensors except weight scales.
        self.shapes = {name: header.shape for name, header in headers.items() if name not in scales}

    @property
    def quantized(self) -> bool:
        return bool(self._scalings)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def whole(self, name: str) -> torch.Tensor:
        return self._read(name, ...)

    def shard(self, name: str, dim: int, index: int, parts: int) -> torch.Tensor:
        """The `index`-th of `parts` equal parts along `dim` (0 or 1); `parts` must divide its size."""
        size = self._slice(name).get_shape()[dim]
        assert size % parts == 0, f"{name}: {size} along {dim} does not divide into {parts} parts"
        width = size // parts
        return self.span(name, dim, index * width, (index + 1) * width)

    def scaled(self, name: str, dim: int, index: int, parts: int) -> ScaledWeight | str | None:
        """As `shard`, but kept in FP8; a reason (str) if it must be dequantized; None if it is not quantized."""
        scaling, shape = self._scalings.get(name), self._slice(name).get_shape()
        if scaling is None:
            return None
        at = [slice(0, size) for size in shape]
        width = shape[dim] // parts
        at[dim] = slice(index * width, (index + 1) * width)
        if problem := kept_problem(self._dtypes[name], shape, scaling, [part.start for part in at]):
            return problem
        numbers: torch.Tensor = self._slice(name)[tuple(at)]
        scales = self._slice(scaling.scales)[...].float()
        if scaling.by_row(shape):
            scales = scales.reshape(-1, 1).expand(shape[0], 1)[at[0]]
        else:
            scales = scales[tuple(slice(part.start // BLOCK, -(-part.stop // BLOCK)) for part in at)]
        return ScaledWeight(numbers.to(self._device), scales.contiguous().to(self._device))

    def span(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` along `dim` (0 or 1), clipped to the tensor."""
        part = slice(start, stop)
        return self._read(name, part if dim == ROWS else (slice(None), part), (start, 0) if dim == ROWS else (0, start))

    def _read(self, name: str, part: Any, first: tuple[int, int] = (0, 0)) -> torch.Tensor:
        tensor: torch.Tensor = self._slice(name)[part]
        scaling = self._scalings.get(name)
        if scaling is not None:
            tensor = dequantized(tensor, self._slice(scaling.scales)[...], scaling, first, self._dtype)
        return tensor.to(device=self._device, dtype=self._dtype).contiguous()

    def _slice(self, name: str) -> Any:
        self._names_read.add(name)
        report("reading the weights", len(self._names_read), len(self._file_of))
        return self._file_of[name].get_slice(name)


def dequantized(
    weight: torch.Tensor, scales: torch.Tensor, scaling: Scaling, first: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """The part of a matrix that starts at row and column `first`, multiplied by its scales in float32.

    `weight` may be a stack of matrices; each then uses its own scales if there is one set per matrix.
    """
    if weight.dim() == 3:
        own = scales if scales.dim() and len(scales) == len(weight) else [scales] * len(weight)
        return torch.stack([dequantized(*each, scaling, first, dtype) for each in zip(weight, own, strict=True)])
    factors = scales.float().reshape(-1, scales.shape[1] if scales.dim() == 2 else 1)
    places = zip(first, weight.shape, scaling.block, strict=True)
    rows, columns = (torch.arange(start, start + size) // step for start, size, step in places)
    made = torch.empty(weight.shape, dtype=dtype)
    for start in range(0, len(weight), _ROWS_AT_ONCE):
        chunk = slice(start, start + _ROWS_AT_ONCE)
        made[chunk] = weight[chunk].float() * factors[rows[chunk]][:, columns]
    return made


class LazyTensor:
    """A tensor that is read when indexed with `[...]`, like the safetensors slices that transformers expects."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint, self._name = checkpoint, name

    def __getitem__(self, part: Any) -> torch.Tensor:
        return self._checkpoint.whole(self._name)[part]
