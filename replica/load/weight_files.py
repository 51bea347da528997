"""A model's weight files, and what their headers say about each tensor. Reads no weights; no torch."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..errors import WeightsDamaged, WeightsMissing

_LENGTH_BYTES = 8
#: safetensors itself refuses longer headers.
_MAX_HEADER_BYTES = 100_000_000
FETCH_AGAIN = "fetch the model again"
#: Maximum number of kinds of tensors that a message lists.
_LISTED = 12


class TensorHeader(msgspec.Struct, frozen=True):
    data_offsets: tuple[int, int]
    dtype: str = ""  #: as safetensors writes it: F32, BF16, F8_E4M3, U8 ...
    shape: tuple[int, ...] = ()


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the model, chosen as in transformers, as the folder may hold other formats too.

    That is `model.safetensors`, else the files in the index, else all files. Raises WeightsMissing and WeightsDamaged.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightsMissing(f"{folder} has no *.safetensors; {FETCH_AGAIN}")
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single in files:
        return [single]
    return [folder / name for name in sorted(set(weight_map(index).values()))] if index.is_file() else files


def are_pickled(folder: Path) -> bool:
    """Whether the weights are only in torch's older format, which homing reads through transformers."""
    return any(folder.glob("pytorch_model*.bin")) and not any(folder.glob("*.safetensors"))


def weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, from a weights index. Raises WeightsDamaged."""
    try:
        content: Any = json.loads(index.read_bytes())
        return msgspec.convert(content["weight_map"], dict[str, str])
    except (ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise WeightsDamaged(f"{index} is not a weights index: {error!r}; {FETCH_AGAIN}") from error


def tensors_in(folder: Path) -> Mapping[str, TensorHeader]:
    """All tensors of the model. Raises WeightsMissing and WeightsDamaged."""
    return {name: header for path in weight_files(folder) for name, header in tensors_of(path).items()}


def tensors_of(path: Path) -> dict[str, TensorHeader]:
    """The tensors of a safetensors file, from its header alone. Raises WeightsMissing and WeightsDamaged."""
    try:
        file = path.open("rb")
    except FileNotFoundError as error:
        raise WeightsMissing(f"{path}, which the weights index names, does not exist; {FETCH_AGAIN}") from error
    with file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
            raise WeightsDamaged(f"{path} is incomplete: it has {size} bytes, less than its header; {FETCH_AGAIN}")
        header = file.read(length)
    try:
        parts = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        tensors = {
            name: msgspec.json.decode(raw, type=TensorHeader) for name, raw in parts.items() if name != "__metadata__"
        }
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WeightsDamaged(f"{path} is damaged: its header is not safetensors' ({error}); {FETCH_AGAIN}") from error
    expected = _LENGTH_BYTES + length + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if expected != size:
        raise WeightsDamaged(f"{path} is incomplete: it has {size} bytes of {expected}; {FETCH_AGAIN}")
    return tensors


def listed(names: Iterable[str]) -> str:
    """Names of tensors for a message, with those that differ only in numbers as one: `layers.*.norm.weight (28)`."""
    counts = Counter(re.sub(r"\b\d+\b", "*", name) for name in sorted(names))
    shown = [f"{name} ({count})" if count > 1 else name for name, count in counts.items()]
    more = [f"and {len(shown) - _LISTED} other kinds"] if len(shown) > _LISTED else []
    return ", ".join(shown[:_LISTED] + more)
