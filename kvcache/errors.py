"""Errors of the block pool.

    KvCacheError
    ├── AdapterUnreadable   a folder is not a LoRA adapter whose content can be read
    ├── PoolTooSmall        the KV memory holds too few blocks to run anything
    └── StaleMatch          a prefix match was used after the cache had changed under it

Running out of blocks is no error: `acquire` and `allocate` return None and the scheduler decides.
"""

# ruff: noqa: N818 - these names say what happened; the suffix "Error" would add nothing.

from typing import ClassVar


class KvCacheError(Exception):
    """Any error of this room."""

    http_status: ClassVar[int] = 500


class AdapterUnreadable(KvCacheError):
    """The operator's folder is no adapter in PEFT's and safetensors' format; the message names the file."""

    http_status = 400


class PoolTooSmall(KvCacheError):
    """Too little KV memory; the operator has to give more, or choose smaller blocks."""

    http_status = 503


class StaleMatch(KvCacheError):
    """Acquiring would have shared blocks that may hold another prefix by now; look the prompt up again."""
