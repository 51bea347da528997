"""Converts blocks to bytes and GPUs, using the KV size given by a model's configuration.

Reads only `config.json`, without loading the model. The arithmetic is in `kvcache/sizing.py`.
"""

import contextlib
import re
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import msgspec

from ....kvcache.errors import PoolTooSmall
from ....kvcache.sizing import blocks_that_fit, bytes_per_block
from ...errors import ModelUnavailable, SettingsError

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
_SIZE = re.compile(r"([\d.]+)\s*([kmgt]i?)?b?", re.IGNORECASE)
_FACTORS = {"": 1} | {
    letter + binary: base**power for binary, base in (("", 1000), ("i", 1024)) for power, letter in enumerate("kmgt", 1)
}


@dataclass(slots=True, frozen=True)
class KvCapacity:
    """The size of a block and the memory that a GPU has for blocks."""

    block_bytes: int  #: over all ranks of a replica
    gpu_bytes: int | None = None  #: KV memory of one GPU

    def __post_init__(self) -> None:
        """Raise SettingsError if fewer than two blocks fit."""
        try:
            _ = self.gpu_blocks
        except PoolTooSmall as error:
            raise SettingsError(f"--kv-memory: {error}") from error

    @property
    def gpu_blocks(self) -> int | None:
        """Blocks that requests can use on one GPU: all that fit except the null block; None: memory unknown."""
        return None if self.gpu_bytes is None else blocks_that_fit(self.gpu_bytes, self.block_bytes) - 1

    def gib(self, blocks: int) -> float:
        return blocks * self.block_bytes / 2**30

    def gpus(self, blocks: int) -> int | None:
        """Number of GPUs that hold this many blocks; None if their memory is unknown."""
        return None if self.gpu_blocks is None else ceil(blocks / self.gpu_blocks)


def block_bytes_of_config(path: Path, block_size: int) -> int:
    """Bytes of one block of a model. `path` is its `config.json` or folder. Raises ModelUnavailable."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise ModelUnavailable(f"{file} is not a model configuration: {error}") from error
    config = config.get("text_config") or config
    heads = _number(config, file, "num_attention_heads")
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if dtype not in _DTYPE_BYTES:
        raise ModelUnavailable(f"{file} has dtype {dtype!r}, whose size is unknown: give --bytes-per-block instead")
    return bytes_per_block(
        block_size=block_size,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or _number(config, file, "hidden_size") // heads,
        dtype_bytes=_DTYPE_BYTES[dtype],
        layers=_number(config, file, "num_hidden_layers"),
    )


def parse_size(text: str, flag: str) -> int:
    """Parse `45GB`, `40GiB`, `16k` or plain digits. Raises SettingsError, which names the flag."""
    match = _SIZE.fullmatch(text.strip())
    if match:
        with contextlib.suppress(ValueError, OverflowError):
            return int(float(match[1]) * _FACTORS[(match[2] or "").lower()])
    raise SettingsError(f"{flag}: {text!r} is not a size such as 4096, 16k, 45GB or 40GiB")


def _number(config: dict[str, Any], file: Path, key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ModelUnavailable(f"{file} has no {key}: give --bytes-per-block instead")
    return value
