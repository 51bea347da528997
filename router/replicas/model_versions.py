"""The models that a router serves, with several coexisting versions of a model while it is being replaced.

A *version* here is a `RouterService`: replicas that hash blocks alike, with their own index, queue and flow. A request
stays with the version it was tokenized for from its first token to its last. A model normally has one version; while
the model or its block size is being replaced, it has several, and new requests are distributed in proportion to each
version's number of accepting replicas. A replaced version's replicas drain until no request is held for them either.
Settings versions that hash blocks alike share a service; models never do. Independent of HTTP and Ray.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import assert_never

import msgspec

from ...replica.messages import ModelLimits, Parity
from ..activity import ModelActivity
from ..backend import AbsentReplica, ClusterView, RouterCounters, TextSource, model_view, total
from ..control import (
    Answer,
    AnyQuestion,
    CacheWorth,
    CountInFlight,
    Demand,
    MeasureDemand,
    Member,
    SetMembership,
    SetMissing,
    WarmUp,
    WarmUpEnded,
    WeighCaches,
)
from ..errors import InvalidRequest, ModelNotFound, NoReplica, RouterError
from ..routing.replica_load import UnavailableReason
from .service import RouterService

log = logging.getLogger(__name__)

#: Retry-After for a model that an operator has turned off.
OFF_RETRY_S = 30.0


@dataclass(slots=True)
class _Version:
    model: "_Model"
    service: RouterService
    parity: Parity  #: parity of its first replica
    members: tuple[Member, ...] = ()

    @property
    def accepting(self) -> int:
        return sum(member.unavailable is None for member in self.members)

    @property
    def is_replaced(self) -> bool:
        """Whether only other versions accept new requests. Held requests must end before this version's replicas do."""
        return not self.accepting and any(each.accepting for each in self.model.versions)

    def unavailable(self) -> dict[str, UnavailableReason]:
        """Replicas that get no requests. A replaced version's draining replicas still get the requests it holds."""
        return {
            member.description.replica_id: member.unavailable
            for member in self.members
            if member.unavailable == "warming" or (member.unavailable == "draining" and not self.is_replaced)
        }


@dataclass(slots=True)
class _Model:
    name: str  #: the name that requests use
    versions: list[_Version] = field(default_factory=list)  #: oldest first
    off: bool = False  #: scaled to zero by an operator; requests do not start a replica
    leaving: bool = False  #: no longer served; its last requests are finishing
    counters: RouterCounters = field(default_factory=RouterCounters)

    def limits(self) -> ModelLimits | None:
        """Limits of the newest version that accepts requests; None until a replica was accepted."""
        accepting = [version for version in self.versions if version.accepting] or self.versions
        return accepting[-1].service.model() if accepting else None

    def adapters(self) -> set[str]:
        return {name for version in self.versions for name in version.service.adapters()}

    def turned_off(self) -> NoReplica:
        """The error for requests while the model is turned off."""
        return NoReplica(
            f"{self.name!r} is scaled to zero replicas; an operator can start some with: homing scale N",
            retry_after_s=OFF_RETRY_S,
        )


class ModelVersions:
    """A `Backend` for all served models, each with one version or, during an update, several."""

    def __init__(
        self,
        make: Callable[[Member, RouterCounters], RouterService],
        names: Iterable[str],
        *,
        router_id: str,
        policy: str,
        rng: Random | None = None,
    ) -> None:
        """`make` builds a version's service from its first replica and its model's counters. `names`: served models."""
        self._make = make
        self._router_id = router_id
        self._policy = policy
        self._rng = rng or Random()
        self._models = {name: _Model(name) for name in names}
        self._by_settings: dict[int, _Version] = {}  #: by settings version number
        self._membership_number = 0
        self._missing: tuple[AbsentReplica, ...] = ()

    def close(self) -> None:
        for version in self._versions:
            version.service.close()

    # For the controller

    async def answer(self, question: AnyQuestion) -> Answer:
        match question:
            case SetMembership():
                self._set_membership(question)
                return None
            case SetMissing(missing, turned_off):
                self._missing = missing
                for model in self._models.values():
                    model.off = model.name in turned_off
                    self._turn_away(model)
                return None
            case WarmUp(replica_id, share, timeout_s):
                with suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):
                        return await self._warm_up(replica_id, share)
                return WarmUpEnded()
            case CountInFlight(replica_id):
                return sum(self._in_flight(replica_id, version) for version in self._versions)
            case WeighCaches():
                return [worth for version in self._versions for worth in _cache_worths(version)]
            case MeasureDemand():
                return self._demands()
            case _:
                assert_never(question)

    def _set_membership(self, membership: SetMembership) -> None:
        if membership.number < self._membership_number:
            log.info("membership_outdated number=%d known=%d", membership.number, self._membership_number)
            return
        self._membership_number = membership.number
        for name in membership.models:
            self._models.setdefault(name, _Model(name))
        for model in self._models.values():
            model.leaving = model.name not in membership.models
            self._turn_away(model)
        for version in self._versions:
            version.members = ()
        for member in membership.members:
            version = self._version_of(member)
            version.members = (*version.members, member)
        for version in self._versions:
            descriptions = [each.description for each in version.members]
            version.service.apply_membership(descriptions, membership.cluster_seed, version.unavailable())
        for model in self._models.values():
            self._retire(model)

    async def _warm_up(self, replica_id: str, share: float) -> WarmUpEnded:
        for version in self._versions:
            if _has_member(version, replica_id):
                if refusal := await version.service.until_joined(replica_id):
                    return WarmUpEnded(refusal=f"the router refused it: {refusal}")
                return WarmUpEnded(pressed=not await version.service.warm_up(replica_id, share))
        return WarmUpEnded()

    def _in_flight(self, replica_id: str, version: _Version) -> int:
        """Number of unfinished requests on the replica, plus held requests that no other version can take."""
        held = version.service.waiting if version.is_replaced and _has_member(version, replica_id) else 0
        return version.service.in_flight(replica_id) + held

    def _demands(self) -> dict[str, Demand]:
        view = self.view()
        slots = {
            member.description.replica_id: member.description.max_running_requests
            for version in self._versions
            for member in version.members
        }
        demands: dict[str, Demand] = {}
        for model in view.models:
            if model.name not in self._served:
                continue
            serving = [each for each in view.replicas if each.model == model.name and each.state == "serving"]
            demands[model.name] = Demand(
                # Until the first replica joins, report demand for one: the model's limits come from it.
                held_requests=model.waiting if model.max_model_len is not None else 1,
                held_tokens=sum(version.service.waiting_tokens for version in self._models[model.name].versions),
                queued_tokens=sum(replica.queued_prefill_tokens for replica in serving),
                running=sum(replica.running + replica.waiting for replica in serving),
                slots=sum(slots[replica.replica_id] for replica in serving),
                prefill_tokens_per_s=sum(replica.prefill_tokens_per_s for replica in serving),
                serving=len(serving),
            )
        return demands

    def _version_of(self, member: Member) -> _Version:
        """The version for the member's settings, created if there is none."""
        if member.version not in self._by_settings:
            name, parity = member.description.model.name, member.description.parity
            # A newly started router may be told of the last replicas of a model that is leaving.
            model = self._models.setdefault(name, _Model(name, leaving=True))
            known = [each for each in model.versions if each.parity == parity]
            if not known:
                known.append(_Version(model, self._make(member, model.counters), parity))
                model.versions += known
                if len(model.versions) > 1:
                    log.info("model_version_added model=%s version=%d", name, member.version)
            self._by_settings[member.version] = known[-1]
        return self._by_settings[member.version]

    def _turn_away(self, model: _Model) -> None:
        """End held requests, and refuse later ones, for a model that is turned off or leaving; else allow waiting."""
        refusal: Callable[[], RouterError] | None = model.turned_off if model.off else None
        if model.leaving:
            refusal = partial(ModelNotFound, model.name, tuple(self._served))
        for version in model.versions:
            version.service.turn_away(refusal)

    def _retire(self, model: _Model) -> None:
        """Close versions without replicas. The last one stays, unless the model is leaving, to hold requests."""
        gone = [each for each in model.versions if not each.members]
        if len(gone) == len(model.versions) and not model.leaving:
            gone = gone[:-1]
        for version in gone:
            model.versions.remove(version)
            self._by_settings = {number: each for number, each in self._by_settings.items() if each is not version}
            version.service.supersede()
            log.info("model_version_removed model=%s versions=%d", model.name, len(model.versions))

    # For the HTTP front

    def choose(self, model: str | None) -> RouterService:
        named = self._named(model)
        weights = [version.accepting for version in named.versions]
        if any(weights):
            return self._rng.choices(named.versions, weights)[0].service
        if named.off:
            raise named.turned_off()
        if not named.versions:
            raise NoReplica("no replica has joined yet", retry_after_s=1.0)
        return named.versions[-1].service

    def models(self) -> list[ModelLimits]:
        return [limits for model in self._served.values() if (limits := model.limits()) is not None]

    def texts(self) -> list[TextSource]:
        known = (version.service.text() for version in self._versions)
        return list(dict.fromkeys(source for source in known if source is not None))

    def exact(self) -> bool:
        versions = self._versions
        return bool(versions) and all(each.service.exact() for each in versions if each.members)

    async def until_exact(self) -> None:
        await asyncio.gather(*(version.service.until_exact() for version in self._versions))

    def view(self) -> ClusterView:
        return self._view_of({each.service: each.service.view() for each in self._versions})

    async def view_in_slices(self) -> ClusterView:
        return self._view_of({each.service: await each.service.view_in_slices() for each in self._versions})

    def _view_of(self, found: Mapping[RouterService, ClusterView]) -> ClusterView:
        """`found`: the versions' views; those of versions that were added meanwhile are made now."""
        shown = {
            name: [found.get(each.service) or each.service.view() for each in model.versions]
            for name, model in self._models.items()
        }
        views = [view for of_model in shown.values() for view in of_model]
        members = [member for version in self._versions for member in version.members]
        present = {member.description.replica_id for member in members}
        draining = {member.description.replica_id for member in members if member.unavailable == "draining"}
        return ClusterView(
            router_id=self._router_id,
            policy=self._policy,
            waiting=sum(view.waiting for view in views),
            in_flight=sum(view.in_flight for view in views),
            models=[
                model_view(
                    name,
                    model.limits(),
                    shown[name],
                    model.counters,
                    sum(version.service.waiting_tokens for version in model.versions),
                )
                for name, model in self._models.items()
                if shown[name] or not model.leaving
            ],
            counters=total(model.counters for model in self._models.values()),
            # A draining replica that still gets held requests reports "serving"; show it as draining.
            replicas=[
                msgspec.structs.replace(replica, state="draining")
                if replica.state == "serving" and replica.replica_id in draining
                else replica
                for view in views
                for replica in view.replicas
            ],
            refused=[refused for view in views for refused in view.refused],
            absent=[replica for replica in self._missing if replica.replica_id not in present],
        )

    def tenant_blocks(self) -> dict[str, dict[bytes, int]]:
        return {name: owned for version in self._versions for name, owned in version.service.tenant_blocks().items()}

    def activity(self) -> list[ModelActivity]:
        return [activity for version in self._versions for activity in version.service.activity()]

    async def reset_caches(self, model: str | None = None) -> list[str]:
        versions = self._versions if model is None else self._named(model).versions
        present = [version for version in versions if version.members]
        if not present:
            raise NoReplica("no replica is connected", retry_after_s=1.0)
        return [name for version in present for name in await version.service.reset_caches()]

    def end_requests(self) -> None:
        for version in self._versions:
            version.service.end_requests()

    @property
    def _versions(self) -> list[_Version]:
        return [version for model in self._models.values() for version in model.versions]

    @property
    def _served(self) -> dict[str, _Model]:
        return {name: model for name, model in self._models.items() if not model.leaving}

    def _named(self, name: str | None) -> _Model:
        """The served model with this name; None: the only one."""
        served = self._served
        if name is None:
            if len(served) > 1:
                there = ", ".join(map(repr, served))
                raise InvalidRequest(
                    f"field 'model': several models are served here, say which: {there}", param="model"
                )
            (name,) = served
        if name in served:
            return served[name]
        offered = {each: model for model in served.values() for each in model.adapters()}
        if name not in offered:
            raise ModelNotFound(name, [*served, *sorted(offered)])
        return offered[name]


def _has_member(version: _Version, replica_id: str) -> bool:
    return any(member.description.replica_id == replica_id for member in version.members)


def _cache_worths(version: _Version) -> Sequence[CacheWorth]:
    unique, block_size = version.service.unique_blocks(), version.parity.block_size
    return [
        CacheWorth(
            replica.replica_id,
            unique_tokens=unique.get(replica.replica_id, 0) * block_size,
            pinned_blocks=replica.pinned_blocks,
            prefill_tokens_per_s=replica.prefill_tokens_per_s,
        )
        for replica in version.service.view().replicas
    ]
