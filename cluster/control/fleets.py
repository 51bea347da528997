"""The fleets of all models: merges their decisions into one ordered list of actions.

Each model has its own fleet (planner.py). Fleets share replica names, generations and the routers, which receive the
members of all models at once. Pure, like the planner.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...replica.messages import ReplicaDescription
from ..config import ClusterSettings
from .planner import Action, Fleet, GroupState, NameAllocator, Publish


@dataclass(slots=True)
class Fleets:
    """The fleets by model name. A removed model's fleet is kept for late reports about its rank groups."""

    by_model: dict[str, Fleet]
    names: NameAllocator = field(default_factory=NameAllocator)
    #: the models in the last `Publish`
    _published: tuple[str, ...] = ()

    @classmethod
    def of(cls, models: Sequence[tuple[str, ClusterSettings]]) -> "Fleets":
        """The initial fleets, with versions 1, 2, ... If there are several models, replicas are named after them."""
        fleets = cls({})
        for version, (model, settings) in enumerate(models, start=1):
            fleets.add(model, settings, version, named=len(models) > 1)
        return fleets

    @property
    def served(self) -> dict[str, Fleet]:
        return {model: fleet for model, fleet in self.by_model.items() if not fleet.being_removed}

    def add(self, model: str, settings: ClusterSettings, version: int, *, named: bool = True) -> None:
        """Serve another model. `version` is unique across models; `named`: replica names start with the model's."""
        if fleet := self.by_model.get(model):
            fleet.settings = settings
            fleet.restore(settings.replicas, version)
            return
        prefix = replica_prefix(model) if named else ""
        self.by_model[model] = Fleet(settings, settings.replicas, self.names, prefix, version=version)

    def groups(self) -> Iterator[tuple[str, GroupState]]:
        for model, fleet in self.by_model.items():
            for group in fleet.groups.values():
                yield model, group

    def fleet_of(self, replica_id: str) -> Fleet | None:
        return next((fleet for fleet in self.by_model.values() if replica_id in fleet.groups), None)

    def reconcile(self, now: float) -> list[Action]:
        """The actions to take now. `Publish` is first, so that routers drop lost replicas before all else."""
        actions = [action for fleet in self.by_model.values() for action in fleet.reconcile(now)]
        others: list[Action] = [action for action in actions if not isinstance(action, Publish)]
        before, self._published = self._published, tuple(self.served)
        changed = len(others) < len(actions) or before != self._published
        if not changed:
            return others
        return [Publish(tuple(member for fleet in self.by_model.values() for member in fleet.published)), *others]

    def next_deadline(self, now: float) -> float | None:
        """Seconds until `reconcile` must be called again; None: not before an event is reported."""
        ends = [fleet.next_deadline(now) for fleet in self.by_model.values()]
        return min((end for end in ends if end is not None), default=None)

    def resume(self, running: Mapping[int, ReplicaDescription], now: float) -> None:
        """Continue in a new controller process. `running`: descriptions of the groups that survive, by generation."""
        for fleet in self.by_model.values():
            fleet.resume(running, now)
        self.names.taken = {group.replica_id for _, group in self.groups()}


def replica_prefix(model: str) -> str:
    """The prefix of this model's replica names; safe in file names, headers and labels."""
    return (re.sub(r"[^A-Za-z0-9_]+", "-", model).strip("-") or "model") + "-"
