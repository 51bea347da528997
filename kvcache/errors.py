"""Errors of the KV cache. Running out of blocks is not an error: `acquire` and `allocate` return None."""

# ruff: noqa: N818 - the names already say what went wrong; an "Error" suffix would add nothing.


class KvCacheError(Exception):
    """Base class of this package's errors."""


class PoolTooSmall(KvCacheError):
    """There is too little KV memory; the operator must provide more or choose smaller blocks."""


class StaleMatch(KvCacheError):
    """A prefix match was used after the cache had changed; its blocks may now hold another prefix."""
