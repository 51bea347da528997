"""Eviction policies: which cached block to evict when space is needed.

Imported by `kvcache.prefix_cache`, `replica` and the simulator. Imports `pool` and `hashing`; must not import the
prefix cache.
"""

from typing import Literal

from .hit_density import HitDensity
from .lru import Lru
from .policy import EvictionPolicy

EvictionName = Literal["lru", "hit-density"]

_POLICIES: dict[EvictionName, type[EvictionPolicy]] = {"lru": Lru, "hit-density": HitDensity}


def eviction_policy(name: EvictionName) -> EvictionPolicy:
    """Create the policy that `KvCacheSettings.eviction` calls `name`."""
    return _POLICIES[name]()


__all__ = ["EvictionName", "EvictionPolicy", "HitDensity", "Lru", "eviction_policy"]
