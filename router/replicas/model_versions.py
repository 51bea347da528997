"""Replicas that name blocks in different ways behind one front: several models, and what takes a model's place.

A *generation* is a `RouterService` with index, queue and flow of its own; a request belongs to the one that it was
tokenized for, from the first token to the last. A model has one; while it, or its block size, is being replaced, it has
more: new requests are dealt out by how many replicas of each take any, so that neither is left idle nor overrun.
Replicas of one that is being replaced drain until nothing is held for them, either. Versions that name blocks alike
share a generation; models never do. Knows no HTTP and no Ray.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

import msgspec

from ...kvcache.config import KvCacheSettings
from ...replica.messages import ModelLimits, Parity, ReplicaDescription
from ..backend import AbsentReplica, ClusterView, ModelView, ReplicaView, RouterCounters, model_view, total
from ..errors import InvalidRequest, ModelNotFound, NoReplica, RouterError
from ..routing.replica_load import Rest
from .membership import TextSource
from .service import RouterService

log = logging.getLogger(__name__)

#: When a client may ask again for a model that an operator has turned off.
OFF_RETRY_S = 30.0


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


#: Makes a service for the model of this name, which has not been started and counts in these counters.
ServiceMaker = Callable[[str, Terms, RouterCounters], RouterService]


@dataclass(slots=True)
class _Model:
    name: str  #: as requests call it
    generations: "list[_Generation]" = field(default_factory=list)  #: the oldest first
    off: bool = False  #: no replica of it is wanted, and no request changes that
    leaving: bool = False  #: it is served no longer; its last requests end
    counters: RouterCounters = field(default_factory=RouterCounters)

    def limits(self) -> ModelLimits | None:
        """Of the newest generation that takes requests; None until a replica was let in."""
        takers = [generation for generation in self.generations if generation.takers] or self.generations
        return takers[-1].service.model() if takers else None

    def view(self, views: Sequence[ClusterView]) -> ModelView:
        """All its generations as one, from what each shows."""
        return model_view(self.name, self.limits(), views, self.counters)


@dataclass(slots=True)
class _Generation:
    model: _Model
    service: RouterService
    parity: Parity  #: of its first replica
    members: tuple[Enrolment, ...] = ()

    @property
    def takers(self) -> int:
        """Replicas that take new requests."""
        return sum(member.rest is None for member in self.members)


class Generations:
    """A `Backend` of the models that are served, each of one or, during an update, several generations."""

    def __init__(self, make: ServiceMaker, view: ClusterView, names: Iterable[str], rng: Random | None = None) -> None:
        """`view` is shown before the first replica joins; `names` are those of the models that are to be served."""
        self._make = make
        self._view = view
        self._rng = rng or Random()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._models = {name: _Model(name) for name in names}
        self._by_version: dict[int, _Generation] = {}
        self._absent: tuple[AbsentReplica, ...] = ()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin work in this loop. Once."""
        self._loop = loop

    def close(self) -> None:
        """End every request, and give everything back."""
        for generation in self._generations:
            generation.service.close()

    def serve(self, names: Collection[str]) -> None:
        """Models of these names from now on. Requests for others are refused; those that run there end first."""
        for name in names:
            self._models.setdefault(name, _Model(name))
        for model in self._models.values():
            model.leaving = model.name not in names
            self._turn_away(model)

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
        for model in self._models.values():
            self._retire(model)

    def tell_absent(self, absent: Sequence[AbsentReplica], off: Collection[str]) -> None:
        """Who is wanted and does not serve: to be shown. Of the models in `off` nobody is wanted: to wait is no use."""
        self._absent = tuple(absent)
        for model in self._models.values():
            model.off = model.name in off
            self._turn_away(model)

    async def until_joined(self, replica_id: str) -> str:
        """See `RouterService.until_joined`."""
        for generation in self._generations:
            if any(member.description.replica_id == replica_id for member in generation.members):
                return await generation.service.until_joined(replica_id)
        return ""

    async def warm_up(self, replica_id: str, share: float) -> bool:
        """See `RouterService.warm_up`."""
        for generation in self._generations:
            if any(member.description.replica_id == replica_id for member in generation.members):
                return await generation.service.warm_up(replica_id, share)
        return True

    def in_flight(self, replica_id: str) -> int:
        """Requests that were sent there and are not over, and held ones that can go nowhere else."""
        return sum(
            generation.service.in_flight(replica_id)
            + (generation.service.waiting() if self._is_left_by(replica_id, generation) else 0)
            for generation in self._generations
        )

    def waiting_tokens(self, model: str) -> int:
        """Prompt tokens of held requests for this model."""
        return sum(generation.service.waiting_tokens() for generation in self._models[model].generations)

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

    def choose(self, model: str | None) -> RouterService:
        """Who takes the next request for this model. Raises ModelNotFound, InvalidRequest and NoReplica."""
        named = self._named(model)
        generations = named.generations
        if not generations:
            self._check_wanted(named)
            raise NoReplica("no replica has joined yet", retry_after_s=1.0)
        weights = [generation.takers for generation in generations]
        if not any(weights):
            self._check_wanted(named)
            return generations[-1].service
        return self._rng.choices(generations, weights)[0].service

    def models(self) -> list[ModelLimits]:
        """Of every model that is served and of which a replica was let in."""
        return [limits for model in self._served.values() if (limits := model.limits()) is not None]

    def texts(self) -> list[TextSource]:
        """Of every generation that requests are tokenized for, each once."""
        known = (generation.service.text() for generation in self._generations)
        return list(dict.fromkeys(source for source in known if source is not None))

    def exact(self) -> bool:
        """Whether every index has been exact since the start."""
        generations = self._generations
        return bool(generations) and all(each.service.exact() for each in generations if each.members)

    def view(self) -> ClusterView:
        """All generations as one cluster."""
        shown = {name: [each.service.view() for each in model.generations] for name, model in self._models.items()}
        views = [view for of_model in shown.values() for view in of_model]
        members = [member for generation in self._generations for member in generation.members]
        present = {member.description.replica_id for member in members}
        draining = {member.description.replica_id for member in members if member.rest == "draining"}
        return msgspec.structs.replace(
            self._view,
            waiting=sum(view.waiting for view in views),
            in_flight=sum(view.in_flight for view in views),
            models=[
                model.view(shown[name]) for name, model in self._models.items() if shown[name] or not model.leaving
            ],
            counters=total(model.counters for model in self._models.values()),
            replicas=[_shown(replica, draining) for view in views for replica in view.replicas],
            refused=[refused for view in views for refused in view.refused],
            absent=[replica for replica in self._absent if replica.replica_id not in present],
        )

    async def reset_caches(self, model: str | None = None) -> list[str]:
        """Have every replica (of this model) forget its cached blocks; returns their ids."""
        generations = self._generations if model is None else self._named(model).generations
        present = [generation for generation in generations if generation.members]
        if not present:
            raise NoReplica("no replica is connected", retry_after_s=1.0)
        return [name for generation in present for name in await generation.service.reset_caches()]

    def end_requests(self) -> None:
        """End every request, as the router stops."""
        for generation in self._generations:
            generation.service.end_requests()

    # Generations

    @property
    def _generations(self) -> list[_Generation]:
        return [generation for model in self._models.values() for generation in model.generations]

    @property
    def _served(self) -> dict[str, _Model]:
        return {name: model for name, model in self._models.items() if not model.leaving}

    def _named(self, name: str | None) -> _Model:
        model = self._models.get(name) if name is not None else self._only()
        if model is None or model.leaving:
            raise ModelNotFound(name or "", self._served)
        return model

    def _only(self) -> _Model:
        served = self._served
        if len(served) > 1:
            there = ", ".join(map(repr, served))
            raise InvalidRequest(f"field 'model': several models are served here, say which: {there}", param="model")
        (model,) = served.values()
        return model

    def _is_replaced(self, generation: _Generation) -> bool:
        """Whether others alone take new requests. What it holds was tokenized for it, and must go before it does."""
        return not generation.takers and any(each.takers for each in generation.model.generations)

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
            name = member.description.model.name
            # A router that starts meets the last replicas of models that are leaving.
            model = self._models.setdefault(name, _Model(name, leaving=True))
            known = [each for each in model.generations if each.parity == parity]
            self._by_version[version] = known[-1] if known else self._begin(model, member)
        return self._by_version[version]

    def _check_wanted(self, model: _Model) -> None:
        """Raises NoReplica for a model that nobody will start."""
        if model.off:
            raise _turned_off(model.name)

    def _turn_away(self, model: _Model) -> None:
        """What is held for a model that nobody will start waits for nothing."""
        refusal: Callable[[], RouterError] | None = partial(_turned_off, model.name) if model.off else None
        if model.leaving:
            refusal = partial(ModelNotFound, model.name, tuple(self._served))
        for generation in model.generations:
            generation.service.turn_away(refusal)

    def _begin(self, model: _Model, member: Enrolment) -> _Generation:
        assert self._loop is not None, "a generation before the start"
        service = self._make(model.name, member.terms, model.counters)
        service.start(self._loop)
        generation = _Generation(model, service, member.description.parity)
        model.generations.append(generation)
        if len(model.generations) > 1:
            log.info("generation_begins model=%s version=%d", model.name, member.terms.version)
        return generation

    def _retire(self, model: _Model) -> None:
        """End generations that nobody is of any more. The last one stays: it holds requests until replicas come."""
        gone = [each for each in model.generations if not each.members]
        if len(gone) == len(model.generations) and not model.leaving:
            gone = gone[:-1]
        for generation in gone:
            model.generations.remove(generation)
            self._by_version = {v: each for v, each in self._by_version.items() if each is not generation}
            generation.service.supersede()
            log.info("generation_ends model=%s generations=%d", model.name, len(model.generations))


def _turned_off(model: str) -> NoReplica:
    return NoReplica(
        f"{model!r} was scaled to no replica; an operator starts some with: homing scale N", retry_after_s=OFF_RETRY_S
    )


def _shown(replica: ReplicaView, draining: Collection[str]) -> ReplicaView:
    """Who drains and still gets what was held is draining, to those who look."""
    if replica.state != "serving" or replica.replica_id not in draining:
        return replica
    return msgspec.structs.replace(replica, state="draining")
