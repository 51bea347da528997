"""Questions that the controller asks a router, and the router's answers.

Types alone, light to import: the controller's process loads them. `ModelVersions.answer` is the one place that answers.
A question names its answer's type by its base, `Question[Answer]`.
"""

from typing import Generic, TypeVar

import msgspec

from ..kvcache.config import KvCacheSettings
from ..replica.messages import ReplicaDescription
from .backend import AbsentReplica
from .routing.replica_load import Rest

A_co = TypeVar("A_co", covariant=True)


class Member(msgspec.Struct, frozen=True):
    """A replica that a router may use, and the settings that the router must know of it."""

    description: ReplicaDescription
    cache: KvCacheSettings  #: that it was started with
    model_dir: str | None  #: folder of the router's own tokenizer; None: where the first replica says
    version: int = 1  #: of the settings that it was started with
    rest: Rest | None = None  #: why it gets no new requests; None: it gets them


class WarmUpEnded(msgspec.Struct, frozen=True):
    """The replica can be sent requests, or never will."""

    refusal: str = ""  #: why the router refuses the replica; empty: it does not
    pressed: bool = False  #: requests need the replica at once, however warm it is


class CacheWorth(msgspec.Struct, frozen=True):
    """What would be lost with a replica, as a router sees it."""

    replica_id: str
    unique_tokens: int  #: cached ones that no other replica holds
    pinned_blocks: int
    prefill_tokens_per_s: float


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What waits for a model and what works on it, at one moment."""

    held_requests: int  #: in routers: no replica can take them, or there is none
    held_tokens: int  #: of their prompts
    queued_tokens: int  #: uncached tokens at the replicas that are still to be prefilled
    running: int  #: requests at the replicas
    slots: int  #: requests that they can run
    prefill_tokens_per_s: float  #: of all replicas that serve, together
    serving: int  #: replicas


class Question(msgspec.Struct, Generic[A_co], frozen=True):
    """Base of all questions; None: the router only takes note."""


class SetMembership(Question[None], frozen=True):
    """Serve these models with these replicas, and no others, from now on. Earlier numbers that come late are ignored.

    Ray promises no order of calls.
    """

    models: tuple[str, ...]
    members: tuple[Member, ...]  #: also of models that are leaving
    cluster_seed: int
    number: int


class SetMissing(Question[None], frozen=True):
    """Show these replicas as missing, and refuse requests for the models that are turned off."""

    missing: tuple[AbsentReplica, ...] = ()
    turned_off: frozenset[str] = frozenset()


class WarmUp(Question[WarmUpEnded], frozen=True):
    """Wait until the replica can be sent requests, then fill a share of its cache with hot prefixes."""

    replica_id: str
    share: float
    timeout_s: float  #: then it counts as done


class CountInFlight(Question[int], frozen=True):
    """How many requests of this router depend on the replica?"""

    replica_id: str


class WeighCaches(Question[list[CacheWorth]], frozen=True):
    """What would be lost with each replica?"""


class MeasureDemand(Question[dict[str, Demand]], frozen=True):
    """What waits for each model, by its name, and what works on it?"""


AnyQuestion = SetMembership | SetMissing | WarmUp | CountInFlight | WeighCaches | MeasureDemand
Answer = None | WarmUpEnded | int | list[CacheWorth] | dict[str, Demand]
