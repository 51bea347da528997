"""`homing scale`, `homing drain`, `homing update`: tell a running cluster's controller what is wanted, and follow it.

The controller is asked over Ray, by name; so these commands work wherever the cluster was noted, on its machine. They
decide nothing.
"""

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from .. import local_ray
from ..config import Settings, added_settings, changed_settings, state_folder
from ..control.control_messages import CONTROLLER, ClusterStatus, Failed, ModelSpec
from ..errors import ClusterError, NoSuchModel, NoSuchReplica, NotRunning, StartFailed, UpdateAbandoned
from ..model_source import find_model
from ..preflight import check_bounds, check_folder
from ..registry import ClusterRegistry
from .console import Console

POLL_S = 0.2
ANSWER_TIMEOUT_S = 60.0


def scale(settings: Settings, out: TextIO, model: str | None, wanted: int, *, wait: bool) -> int:
    """So many replicas of this model (None: the only one); returns when they serve.

    Raises NotRunning, NoSuchModel and StartFailed.
    """
    with _visit(settings):
        control = ControllerClient(out)
        name = choose_model([each.name for each in control.status().models], model)
        control.order("scale", name, wanted)
        return control.follow([name], wait=wait, done=f"{wanted} replicas")


def choose_model(names: Sequence[str], model: str | None) -> str:
    """Which of the models that run is meant. Raises NoSuchModel."""
    there = ", ".join(names)
    if model is None and len(names) > 1:
        raise NoSuchModel(f"several models run here: {there}; say which, before the number")
    if model is not None and model not in names:
        raise NoSuchModel(f"no model {model!r} runs here (there are: {there})")
    return model or names[0]


def failed_since(before: ClusterStatus, status: ClusterStatus) -> str:
    """What did not come up since then, though the controller tries it again; empty: nothing."""
    known = {(group.replica_id, group.failures) for group in before.replicas}
    failed = [group for group in status.replicas if group.failures and (group.replica_id, group.failures) not in known]
    texts = (f"replica {group.replica_id} could not start, and is tried again: {group.last_error}" for group in failed)
    return next(texts, "")


def drain(settings: Settings, out: TextIO, replica_id: str, *, replace: bool, wait: bool) -> int:
    """End one replica in good order; returns when it is gone. Raises NotRunning and NoSuchReplica."""
    with _visit(settings):
        control = ControllerClient(out)
        models = {group.model for group in control.status().replicas if group.replica_id == replica_id}
        failed: Failed | None = control.ask("drain", replica_id, replace=replace)
        if failed is not None:
            raise NoSuchReplica(failed.message)
        return control.follow(models, wait=wait, done=f"{replica_id} is drained")


@dataclass(slots=True, frozen=True)
class UpdateRequest:
    """What an update is to change."""

    flags: Mapping[str, str] = field(default_factory=dict)
    file: Path | None = None
    remove: Sequence[str] = ()  #: models that are to be served no longer
    restart: bool = False  #: also what stays as it is


def update(settings: Settings, out: TextIO, wish: UpdateRequest, *, wait: bool) -> int:
    """Replace replicas by ones with changed settings, start those of models that a file adds, and end models' last.

    Raises NotRunning, SettingsError, NoSuchModel, StartFailed and UpdateAbandoned.
    """
    with _visit(settings):
        control = ControllerClient(out)
        orders = update_orders({model.name: model for model in control.ask("current")}, wish)
        if not orders:
            print("nothing changes (every replica anew: --restart)", file=out)
            return 0
        for verb, about in orders:
            control.order(verb, about)
        names = [about if isinstance(about, str) else about.name for _, about in orders]
        return control.follow(names, wait=wait, done="updated", given_up=_abandoned)


def update_orders(running: Mapping[str, ModelSpec], wish: UpdateRequest) -> list[tuple[str, ModelSpec | str]]:
    """What the controller is to be told: `remove`, `add` and `update`, with the name or the settings of a model.

    Raises SettingsError and NoSuchModel.
    """
    removed = [choose_model(list(running), name) for name in wish.remove]
    staying = {name: spec.settings for name, spec in running.items() if name not in removed}
    if not staying:
        raise NoSuchModel(f"no model would be left of {', '.join(running)}: end the cluster with homing stop")
    some = next(iter(running.values()))
    added = [_added_spec(some, each) for each in added_settings(staying, wish.file).values()]
    changed = [
        _changed_spec(running[name], each)
        for name, each in changed_settings(staying, wish.flags, wish.file).items()
        if wish.restart or each != running[name].settings
    ]
    removals: list[tuple[str, ModelSpec | str]] = [("remove", name) for name in removed]
    return removals + [("add", spec) for spec in added] + [("update", spec) for spec in changed]


class ControllerClient:
    """The controller, as long as Ray is visited."""

    def __init__(self, out: TextIO) -> None:
        import ray

        try:
            self._controller = ray.get_actor(CONTROLLER)
        except ValueError as error:
            raise NotRunning("Ray knows no controller of this cluster: it is starting or ending") from error
        self._console = Console(out)
        status = self.status()
        self._console.last_notice = max((notice.seq for notice in status.notices), default=0)
        self._before = status

    def status(self) -> ClusterStatus:
        """What the controller knows, with the notices that were not shown yet."""
        status: ClusterStatus = self.ask("status", self._console.last_notice)
        return status

    def ask(self, question: str, *words: object, **named: object) -> Any:
        """The controller's answer. Raises ClusterError when none comes."""
        import ray

        try:
            return ray.get(getattr(self._controller, question).remote(*words, **named), timeout=ANSWER_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            raise ClusterError(f"the controller does not answer: {str(error).splitlines()[0]}") from error

    def order(self, verb: str, *words: object) -> None:
        """Have it done. Raises NoSuchModel when the controller knows better."""
        failed: Failed | None = self.ask(verb, *words)
        if failed is not None:
            raise NoSuchModel(failed.message)

    def follow(
        self,
        models: Collection[str],
        *,
        wait: bool,
        done: str,
        given_up: Callable[[ClusterStatus], str] = lambda _: "",
    ) -> int:
        """Show what happens until everything of these models is as it is wanted, or an update is `given_up`.

        Raises StartFailed and UpdateAbandoned.
        """
        status = self._show(models)
        while wait and not status.settled and not given_up(status):
            time.sleep(POLL_S)
            status = self._show(models)
            if failed := failed_since(self._before, status):
                raise StartFailed(failed)
        if reason := given_up(status):
            raise UpdateAbandoned(f"the update was given up, the replicas before it go on: {reason}")
        self._console.line(f"{done}: {_serving(status)}" if wait else "told; homing status shows how it goes")
        return 0

    def _show(self, models: Collection[str]) -> ClusterStatus:
        status = self.status()
        self._console.happened(status.notices)
        return _of(models, status)


def _of(models: Collection[str], status: ClusterStatus) -> ClusterStatus:
    """What is said of these models."""
    return dataclasses.replace(
        status,
        models=tuple(model for model in status.models if model.name in models),
        groups=tuple(group for group in status.replicas if group.model in models),
    )


def _abandoned(status: ClusterStatus) -> str:
    """Why an update was given up; empty: none was."""
    return next((model.abandoned for model in status.models if model.abandoned), "")


def _visit(settings: Settings) -> AbstractContextManager[None]:
    entry = ClusterRegistry(state_folder(settings)).running(settings.cluster.name)
    if entry.ray_address is None:
        raise NotRunning(f"cluster {entry.name!r} is still starting, or has no replicas of its own (pid {entry.pid})")
    ours = entry.run_dir is not None
    return local_ray.visit(entry.ray_address, entry.name, ours=ours, token=ours or entry.ray_token)


def _changed_spec(running: ModelSpec, settings: Settings) -> ModelSpec:
    """With these settings. Raises what `_checked_model` does."""
    here = not settings.cluster.ray_address
    return dataclasses.replace(running, settings=settings, model_dir=str(_checked_model(settings)) if here else None)


def _added_spec(running: ModelSpec, settings: Settings) -> ModelSpec:
    """Of a model beside one that runs. Raises what `_checked_model` and `check_bounds` do."""
    check_bounds(settings, f"model {settings.served_name}: ")
    return _changed_spec(running, settings)


def _checked_model(settings: Settings) -> Path:
    folder = find_model(settings.replica)
    check_folder(folder, settings)
    return folder


def _serving(status: ClusterStatus) -> str:
    names = sorted(group.replica_id for group in status.replicas if group.phase == "ready")
    return f"serving are {', '.join(names)}" if names else "nothing serves"
