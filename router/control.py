"""The controller's questions to a router, and the router's answers.

Types only, light to import because the controller's process loads them. `ModelVersions.answer` answers all questions.
A question's base class, `Question[Answer]`, names the type of its answer.
"""

from typing import Generic, TypeVar

import msgspec

from ..kvcache.config import KvCacheSettings
from ..replica.messages import ReplicaDescription
from .backend import AbsentReplica
from .routing.replica_load import UnavailableReason

A_co = TypeVar("A_co", covariant=True)


class Member(msgspec.Struct, frozen=True):
    """A replica that a router may use, with the settings that the router needs."""

    description: ReplicaDescription
    cache: KvCacheSettings  #: settings that the replica was started with
    model_dir: str | None  #: folder of the router's own tokenizer; None: the folder that the first replica reports
    version: int = 1  #: version of the settings that it was started with
    unavailable: UnavailableReason | None = None  #: why it gets no new requests; None: it gets requests


class WarmUpEnded(msgspec.Struct, frozen=True):
    """The warm-up is over: the replica can take requests, or is refused or gone."""

    refusal: str = ""  #: why the router refuses the replica; empty: it does not
    pressed: bool = False  #: whether requests need the replica at once, no matter how warm it is


class CacheWorth(msgspec.Struct, frozen=True):
    """The value of a replica's cache, that is, what would be lost with it."""

    replica_id: str
    unique_tokens: int  #: cached tokens that no other replica holds
    pinned_blocks: int
    prefill_tokens_per_s: float


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a model's waiting requests and of the capacity that serves it."""

    held_requests: int  #: requests held because no replica can take them; 1 until the model's first replica joins
    held_tokens: int  #: tokens of these requests
    queued_tokens: int  #: uncached tokens at the replicas, not prefilled yet
    running: int  #: running and queued requests at the replicas
    slots: int  #: maximum number of requests that the replicas can run
    prefill_tokens_per_s: float  #: sum over all serving replicas
    serving: int  #: number of serving replicas


class Question(msgspec.Struct, Generic[A_co], frozen=True):
    """Base class of all questions. `Question[None]` only informs the router."""


class SetMembership(Question[None], frozen=True):
    """Serve exactly these models with exactly these replicas from now on.

    Ray does not guarantee the order of calls, so a membership with a lower `number` than the last one is ignored.
    """

    models: tuple[str, ...]
    members: tuple[Member, ...]  #: including those of models that are leaving
    cluster_seed: int
    number: int  #: increases with each membership


class SetMissing(Question[None], frozen=True):
    """Show these replicas as missing and refuse requests for the models that are turned off."""

    missing: tuple[AbsentReplica, ...] = ()
    turned_off: frozenset[str] = frozenset()


class WarmUp(Question[WarmUpEnded], frozen=True):
    """Wait until the replica can take requests, then fill a share of its cache with hot prefixes."""

    replica_id: str
    share: float
    timeout_s: float  #: after this time the warm-up counts as done


class CountInFlight(Question[int], frozen=True):
    """How many of this router's requests depend on the replica?"""

    replica_id: str


class WeighCaches(Question[list[CacheWorth]], frozen=True):
    """What cache content would be lost with each replica?"""


class MeasureDemand(Question[dict[str, Demand]], frozen=True):
    """What is the demand for each model, by model name?"""


AnyQuestion = SetMembership | SetMissing | WarmUp | CountInFlight | WeighCaches | MeasureDemand
Answer = None | WarmUpEnded | int | list[CacheWorth] | dict[str, Demand]
