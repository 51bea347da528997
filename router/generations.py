"""Replicas that name blocks in different ways behind one front: while a model or its block size is being replaced.

A *generation* is a `RouterService` with index, queue and flow of its own; a request belongs to the one that it was
tokenized for, from the first token to the last. New requests are dealt out by how many replicas of each take any, so
that neither is left idle nor overrun. Replicas of one that is being replaced drain until nothing is held for them,
either. Versions that name blocks alike share a generation. Knows no HTTP and no Ray.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec

from ..kvcache.config import KvCacheSettings
from ..replica.messages import ModelLimits, Parity, ReplicaDescription
from .backend import AbsentReplica, ClusterView, Explanation, GenerationRequest, ReplicaView, RouterCounters
from .errors import NoReplica
from .load import Rest
from .service import RouterService
from .stream import RequestStream

log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Terms:
    """What a router must know of the settings that a replica was started with."""

    version: int
    cache: KvCacheSettings
    model_dir: Path | None  #: of the router's own tokenizer; None: where the first replica says


@dataclass(slots=True, frozen=True)
class Enrolment:
    """A replica that is there."""

    description: ReplicaDescription
    terms: Terms
    rest: Rest | None = None


#: Makes a service that has not been started, which counts in these counters.
ServiceMaker = Callable[[Terms, RouterCounters], RouterService]


@dataclass(slots=True)
class _Generation:
    service: RouterService
    parity: Parity  #: of its first replica
    members: tuple[Enrolment, ...] = ()

    @property
    def takers(self) -> int:
        """Replicas that take new requests."""
        return sum(member.rest is None for member in self.members)


class Generations:
    """A `Backend` of one or, during an update, several generations."""

    def __init__(self, make: ServiceMaker, view: ClusterView, rng: Random | None = None) -> None:
        """`view` is shown before the first replica joins."""
        self._make = make
        self._view = view
        self._rng = rng or Random()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._generations: list[_Generation] = []  #: the oldest first
        self._by_version: dict[int, _Generation] = {}
        self._absent: tuple[AbsentReplica, ...] = ()
        self.counters = view.counters

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin work in this loop. Once."""
        self._loop = loop

    def close(self) -> None:
        """End every request, and give everything back."""
        for generation in self._generations:
            generation.service.close()

    def apply_membership(self, members: Sequence[Enrolment], cluster_seed: int) -> None:
        """The full view of the replicas that are there. Idempotent."""
        for generation in self._generations:
            generation.members = ()
        for member in members:
            generation = self._of(member)
            generation.members = (*generation.members, member)
        for generation in self._generations:
            descriptions = [each.description for each in generation.members]
            generation.service.apply_membership(descriptions, cluster_seed, self._resting(generation))
        self._retire()

    def tell_absent(self, absent: Sequence[AbsentReplica]) -> None:
        """Who is wanted and does not serve: to be shown, no more."""
        self._absent = tuple(absent)

    async def until_joined(self, replica_id: str) -> str:
        """See `RouterService.until_joined`."""
        for generation in self._generations:
            if any(member.description.replica_id == replica_id for member in generation.members):
                return await generation.service.until_joined(replica_id)
        return ""

    def in_flight(self, replica_id: str) -> int:
        """Requests that were sent there and are not over, and held ones that can go nowhere else."""
        return sum(
            generation.service.in_flight(replica_id)
            + (generation.service.waiting() if self._is_left_by(replica_id, generation) else 0)
            for generation in self._generations
        )

    def waiting_tokens(self) -> int:
        """Prompt tokens of held requests."""
        return sum(generation.service.waiting_tokens() for generation in self._generations)

    def unique_tokens(self) -> dict[str, int]:
        """By replica: cached tokens that no other one holds."""
        return {
            name: blocks * generation.members[0].terms.cache.block_size
            for generation in self._generations
            if generation.members
            for name, blocks in generation.service.unique_blocks().items()
        }

    async def until_exact(self) -> None:
        """Returns when `exact` does."""
        await asyncio.gather(*(generation.service.until_exact() for generation in self._generations))

    # For the HTTP front

    def choose(self) -> RouterService:
        """Who takes the next request. Raises NoReplica."""
        if not self._generations:
            raise NoReplica("no replica has joined yet", retry_after_s=1.0)
        if len(self._generations) == 1:
            return self._generations[0].service
        weights = [generation.takers for generation in self._generations]
        if not any(weights):
            return self._generations[-1].service
        return self._rng.choices(self._generations, weights)[0].service

    def model(self) -> ModelLimits | None:
        """Of the newest generation that takes requests; None until a replica was let in."""
        takers = [generation for generation in self._generations if generation.takers] or self._generations
        return takers[-1].service.model() if takers else None

    def exact(self) -> bool:
        """Whether every index has been exact since the start."""
        return bool(self._generations) and all(each.service.exact() for each in self._generations if each.members)

    def generate(self, request: GenerationRequest) -> RequestStream:
        """Accept a request that is tokenized for the generation that `choose` gives."""
        return self.choose().generate(request)

    def explain(self, request: GenerationRequest) -> Explanation:
        """The table of the decision that `generate` would take now."""
        return self.choose().explain(request)

    def view(self) -> ClusterView:
        """All generations as one cluster."""
        views = [generation.service.view() for generation in self._generations]
        members = [member for generation in self._generations for member in generation.members]
        present = {member.description.replica_id for member in members}
        draining = {member.description.replica_id for member in members if member.rest == "draining"}
        return msgspec.structs.replace(
            self._view,
            waiting=sum(view.waiting for view in views),
            in_flight=sum(view.in_flight for view in views),
            replicas=[_shown(replica, draining) for view in views for replica in view.replicas],
            refused=[refused for view in views for refused in view.refused],
            absent=[replica for replica in self._absent if replica.replica_id not in present],
        )

    async def reset_caches(self) -> list[str]:
        """Have every replica forget its cached blocks; returns their ids."""
        present = [generation for generation in self._generations if generation.members]
        if not present:
            raise NoReplica("no replica is connected", retry_after_s=1.0)
        return [name for generation in present for name in await generation.service.reset_caches()]

    def end_requests(self) -> None:
        """End every request, as the router stops."""
        for generation in self._generations:
            generation.service.end_requests()

    # Generations

    def _is_replaced(self, generation: _Generation) -> bool:
        """Whether others alone take new requests. What it holds was tokenized for it, and must go before it does."""
        return not generation.takers and any(each.takers for each in self._generations)

    def _resting(self, generation: _Generation) -> dict[str, Rest]:
        """Who gets nothing more. Of a generation that is being replaced, those who drain still get what it holds."""
        replaced = self._is_replaced(generation)
        return {
            member.description.replica_id: member.rest
            for member in generation.members
            if member.rest == "warming" or (member.rest == "draining" and not replaced)
        }

    def _is_left_by(self, replica_id: str, generation: _Generation) -> bool:
        return self._is_replaced(generation) and any(
            member.description.replica_id == replica_id for member in generation.members
        )

    def _of(self, member: Enrolment) -> _Generation:
        """The generation of the member's version, which may be a new one."""
        version, parity = member.terms.version, member.description.parity
        if version not in self._by_version:
            known = [each for each in self._generations if each.parity == parity]
            self._by_version[version] = known[-1] if known else self._begin(member)
        return self._by_version[version]

    def _begin(self, member: Enrolment) -> _Generation:
        assert self._loop is not None, "a generation before the start"
        service = self._make(member.terms, self.counters)
        service.start(self._loop)
        generation = _Generation(service, member.description.parity)
        self._generations.append(generation)
        if len(self._generations) > 1:
            log.info("generation_begins version=%d generations=%d", member.terms.version, len(self._generations))
        return generation

    def _retire(self) -> None:
        """End generations that nobody is of any more. The last one stays: it holds requests until replicas come."""
        gone = [each for each in self._generations if not each.members]
        if len(gone) == len(self._generations):
            gone = gone[:-1]
        for generation in gone:
            self._generations.remove(generation)
            self._by_version = {v: each for v, each in self._by_version.items() if each is not generation}
            generation.service.close("its replicas were replaced before the request was done: send it again")
            log.info("generation_ends generations=%d", len(self._generations))


def _shown(replica: ReplicaView, draining: Collection[str]) -> ReplicaView:
    """Who drains and still gets what was held is draining, to those who look."""
    if replica.state != "serving" or replica.replica_id not in draining:
        return replica
    return msgspec.structs.replace(replica, state="draining")
