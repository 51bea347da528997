"""Errors of the block pool. Running out of blocks is none: `acquire` and `allocate` return None."""

# ruff: noqa: N818 - these names say what happened; the suffix "Error" would add nothing.


class KvCacheError(Exception):
    """Base of this package's errors."""


class PoolTooSmall(KvCacheError):
    """Too little KV memory; the operator has to give more, or choose smaller blocks."""


class StaleMatch(KvCacheError):
    """A prefix match was used after the cache had changed: its blocks may hold another prefix by now."""
