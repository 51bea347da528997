"""Writes the last inputs of the request flow and the placement, or of a subscription, as JSON lines.

Called when one of them raises an error that is not a client's. Prompts and answers are private, so the file has only
their lengths and the hashes of prompts' blocks; everything else that decisions depend on is kept.
"""

import base64
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence, Set
from enum import Enum
from pathlib import Path

import msgspec

from ...events.follow.input_log import InputLog
from ..backend import GenerationRequest

log = logging.getLogger(__name__)

#: Files that one service writes: an error that occurs once often occurs again.
MAX_DUMPS = 8
#: Fields that hold parts of prompts or answers, of which only the length is written.
PRIVATE = frozenset(
    "token_ids text chat given constraint logprobs prompt_logprobs embedding deltas extra_keys block_hashes".split()
)
#: Fields of which only a digest is written: equal values stay equal.
SECRET = frozenset(("salt", "cache_salt", "session"))

#: Hashes of a prompt's full blocks, concatenated.
HashesOf = Callable[[GenerationRequest], bytes]


class InputDumper:
    """Writes up to `most` files."""

    def __init__(self, folder: Path | None = None, most: int = MAX_DUMPS) -> None:
        """`folder`: by default, that for temporary files."""
        self._folder = folder or Path(tempfile.gettempdir())
        self._left = most

    def write(
        self, inputs: InputLog, name: str, error: Exception, about: Mapping[str, object], hashes_of: HashesOf
    ) -> Path | None:
        """Write the inputs, after a first line with `about`. Returns the file; None: enough were written."""
        if self._left <= 0:
            return None
        self._left -= 1
        start, kept = inputs.kept()
        lines: list[dict[str, object]] = [{"error": f"{type(error).__name__}: {error}", "input": name, "start": start}]
        lines[0] |= about
        lines += [dict(zip(("input", "args", "named"), each, strict=True)) for each in kept]
        try:
            handle, path = tempfile.mkstemp(".jsonl", f"homing-inputs-{os.getpid()}-", self._folder)
            with open(handle, "w", encoding="utf-8") as file:
                for line in lines:
                    file.write(json.dumps({key: _plain(value, hashes_of) for key, value in line.items()}) + "\n")
        except Exception as failure:  # the error itself is on its way and must not be lost
            log.error("inputs_not_written reason=%r", failure)
            return None
        log.error("internal_error input=%s error=%r inputs=%s", name, error, path)
        return Path(path)


def _plain(value: object, hashes_of: HashesOf) -> object:
    """A value as JSON can express it; structs are maps with their type's name."""
    match value:
        case Enum():
            return {"enum": type(value).__name__, "value": value.value}
        case None | bool() | int() | float() | str():
            return value
        case bytes():
            return {"bytes": base64.b64encode(value).decode()}
        case msgspec.Struct():
            found = {
                name: _hidden(name, each) if name in PRIVATE | SECRET else _plain(each, hashes_of)
                for name in value.__struct_fields__
                for each in [getattr(value, name)]
            }
            if isinstance(value, GenerationRequest):
                found["block_hashes"] = base64.b64encode(hashes_of(value)).decode()
            return {"struct": type(value).__name__, "fields": found}
        case Mapping():
            return {"map": [[_plain(name, hashes_of), _plain(each, hashes_of)] for name, each in value.items()]}
        case Set():
            return {"set": [_plain(each, hashes_of) for each in sorted(value)]}
        case tuple():
            return {"tuple": [_plain(each, hashes_of) for each in value]}
        case Sequence():
            return [_plain(each, hashes_of) for each in value]
        case _:
            return {"object": getattr(value, "__qualname__", type(value).__name__)}


def _hidden(name: str, value: object) -> object:
    if value is None or isinstance(value, Mapping):
        return value and {"map": []}
    if name in SECRET and isinstance(value, bytes | str):
        digest = hashlib.sha256(value.encode() if isinstance(value, str) else value).hexdigest()[:16] if value else ""
        return digest if isinstance(value, str) else {"bytes": base64.b64encode(digest.encode()).decode()}
    return {"hidden": type(value).__name__, "length": len(value) if isinstance(value, Sequence) else 0}
