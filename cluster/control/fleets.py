"""The fleets of all models as one: what each of them decides, in an order that routers can follow.

Each model has a fleet of its own (planner.py); what they share are names and generations, and the routers, which are
told of all replicas at once. Pure, as the planner is.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from .planner import Action, Enrolled, Fleet, Gang, Labels, Pacing, Publish


@dataclass(slots=True, frozen=True)
class FleetOrder:
    """What a fleet begins with."""

    model: str  #: the name that requests use
    pacing: Pacing
    wanted: int  #: replicas
    version: int  #: of the settings that they are started with; no other model has it


@dataclass(slots=True, frozen=True)
class FleetMemory:
    """What has to be known of a fleet, beside what runs."""

    wanted: int
    version: int
    fallback: int | None
    prefix: str
    leaving: bool


@dataclass(slots=True)
class Fleets:
    """The fleet of each model, by the model's name. When a model leaves its fleet stays, for late news of its gangs."""

    by_model: dict[str, Fleet]
    labels: Labels = field(default_factory=Labels)
    #: the models that routers were last told of
    _told: tuple[str, ...] = ()

    @classmethod
    def of(cls, orders: Iterable[FleetOrder]) -> "Fleets":
        """As they begin. Where there are several, replicas are named after their model."""
        labels, every = Labels(), list(orders)
        several = len(every) > 1
        fleets = {order.model: _fleet(order, labels, replica_prefix(order.model) if several else "") for order in every}
        return cls(fleets, labels)

    @property
    def served(self) -> dict[str, Fleet]:
        """Those whose models are not leaving."""
        return {model: fleet for model, fleet in self.by_model.items() if not fleet.leaving}

    def add(self, order: FleetOrder) -> None:
        """Serve this model, too."""
        fleet = self.by_model.get(order.model)
        if fleet is None:
            self.by_model[order.model] = _fleet(order, self.labels, replica_prefix(order.model))
            return
        fleet.pacing = order.pacing
        fleet.come_back(order.wanted, order.version)

    def gangs(self) -> Iterator[tuple[str, Gang]]:
        """All gangs, each with its model."""
        for model, fleet in self.by_model.items():
            for gang in fleet.gangs.values():
                yield model, gang

    def holder(self, replica_id: str) -> Fleet | None:
        """The fleet of this replica."""
        return next((fleet for fleet in self.by_model.values() if replica_id in fleet.gangs), None)

    def reconcile(self, now: float) -> list[Action]:
        """What to do now, in this order: who is gone leaves routing before anything else happens."""
        actions = [action for fleet in self.by_model.values() for action in fleet.reconcile(now)]
        others: list[Action] = [action for action in actions if not isinstance(action, Publish)]
        told, self._told = self._told, tuple(self.served)
        news = len(others) < len(actions) or told != self._told
        return [Publish(self.members()), *others] if news else others

    def members(self) -> tuple[Enrolled, ...]:
        """What the routers were last told."""
        return tuple(member for fleet in self.by_model.values() for member in fleet.published)

    def next_deadline(self, now: float) -> float | None:
        """Seconds until `reconcile` has something to do by itself; None: only a fact can change anything."""
        ends = [fleet.next_deadline(now) for fleet in self.by_model.values()]
        return min((end for end in ends if end is not None), default=None)

    def memory(self) -> dict[str, FleetMemory]:
        """For the controller that comes after."""
        return {
            model: FleetMemory(fleet.wanted, fleet.version, fleet.fallback, fleet.prefix, fleet.leaving)
            for model, fleet in self.by_model.items()
        }

    def resume(self, memory: Mapping[str, FleetMemory], generation: int, pacings: Mapping[str, Pacing]) -> None:
        """Go on where another one was."""
        self.labels.generation = generation
        for model, known in memory.items():
            fleet = Fleet(pacings[model], known.wanted, self.labels, known.prefix, version=known.version)
            fleet.fallback, fleet.leaving = known.fallback, known.leaving
            self.by_model[model] = fleet

    def check(self) -> None:
        """Asserts what always holds after `reconcile`."""
        for fleet in self.by_model.values():
            assert fleet.labels is self.labels, "a fleet hands out names of its own"
            fleet.check()
        names = [gang.replica_id for _, gang in self.gangs()]
        assert len(names) == len(set(names)), f"names are shared: {names}"
        generations = [gang.generation for _, gang in self.gangs()]
        assert len(generations) == len(set(generations)), f"generations are shared: {generations}"


def _fleet(order: FleetOrder, labels: Labels, prefix: str) -> Fleet:
    return Fleet(order.pacing, order.wanted, labels, prefix, version=order.version)


def replica_prefix(model: str) -> str:
    """What names of this model's replicas begin with: fit for file names, headers and labels."""
    return (re.sub(r"[^A-Za-z0-9_]+", "-", model).strip("-") or "model") + "-"
