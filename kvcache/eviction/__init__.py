"""Which cached block goes when room is needed: the protocol, and a policy by its name."""

from typing import Literal

from .hit_density import HitDensity
from .lru import Lru
from .policy import EvictionPolicy

EvictionName = Literal["lru", "hit-density"]

_POLICIES: dict[EvictionName, type[EvictionPolicy]] = {"lru": Lru, "hit-density": HitDensity}


def eviction_policy(name: EvictionName) -> EvictionPolicy:
    """A new policy by the name it has in `KvCacheSettings.eviction`."""
    return _POLICIES[name]()


__all__ = ["EvictionName", "EvictionPolicy", "HitDensity", "Lru", "eviction_policy"]
