"""Digest of a LoRA adapter's content: what `tenant_root(lora_digest=...)` takes.

Reads files; knows no torch and no tensors' meaning. The same name with other weights must not hit (a known fault of
caches that key on the adapter's name), and the same weights under another name, folder or sharding may.
"""

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from .errors import AdapterUnreadable
from .hashing import canonical

CONFIG_FILE = "adapter_config.json"
#: Where the base model lies says nothing of the adapter; which model it is stands in the model's own fingerprint.
_PLACES = ("base_model_name_or_path", "revision")
#: A header larger than this is no header (safetensors' own limit).
_MAX_HEADER_BYTES = 100_000_000


def adapter_digest(folder: Path) -> bytes:
    """sha256 over configuration and tensors of a PEFT adapter, in an order that its files do not decide.

    Raises AdapterUnreadable.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise AdapterUnreadable(f"{folder} holds no *.safetensors; other formats cannot be read without running them")
    tensors = sorted(tensor for file in files for tensor in _tensors(file))
    return sha256(canonical(b"homing-adapter", _config(folder / CONFIG_FILE), *tensors)).digest()


def _config(path: Path) -> bytes:
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise AdapterUnreadable(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise AdapterUnreadable(f"{path} holds no JSON object")
    kept = {key: value for key, value in config.items() if key not in _PLACES}
    return json.dumps(kept, sort_keys=True).encode()


def _tensors(path: Path) -> Iterator[bytes]:
    """Of each tensor: name, type, shape and digest of its bytes, in one encoding that can be sorted.

    Format: 8 bytes little-endian length, a JSON header of that length, then the tensors' bytes at the header's offsets
    (github.com/huggingface/safetensors).
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 0 < size <= _MAX_HEADER_BYTES:
            raise AdapterUnreadable(f"{path}: a header of {size} bytes is none of safetensors")
        try:
            header = json.loads(file.read(size))
            entries = [_entry(name, about) for name, about in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise AdapterUnreadable(f"{path}: the header cannot be read: {error!r}") from error
        for encoded, begin, end in entries:
            file.seek(8 + size + begin)
            data = file.read(end - begin)
            if len(data) != end - begin:
                raise AdapterUnreadable(f"{path} ends {end - begin - len(data)} bytes too early")
            yield encoded + sha256(data).digest()


def _entry(name: str, about: dict[str, Any]) -> tuple[bytes, int, int]:
    begin, end = about["data_offsets"]
    if not 0 <= begin <= end:
        raise ValueError(f"{name}: data_offsets {begin}, {end}")
    return canonical(name.encode(), about["dtype"].encode(), json.dumps(about["shape"]).encode()), begin, end
