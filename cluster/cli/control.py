"""`homing scale`, `homing drain` and `homing update`: send orders to a cluster's controller and show the progress.

The controller is called by name over Ray, so these commands work on the machine whose registry lists the cluster.
"""

import dataclasses
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Annotated, Any, TextIO

from .. import local_ray
from ..config import SETTINGS, Settings, added_settings, changed_settings, state_folder
from ..control.control_messages import CONTROLLER, ClusterModel, ClusterStatus, Failed
from ..devices import resolve_devices
from ..errors import (
    ClusterError,
    NoSuchModel,
    NotRunning,
    OrderRefused,
    SettingsError,
    StartFailed,
    UpdateAbandoned,
)
from ..flags import (
    LOOKUP,
    NOTHING,
    Changes,
    FindCluster,
    FlagValues,
    NoWait,
    Out,
    ServedModel,
    option,
    settings_of,
    texts,
    with_model,
)
from ..model_source import find_model
from ..output import count
from ..preflight import check_bounds, check_folder
from ..registry import ClusterRegistry
from .console import Console

POLL_S = 0.2
ANSWER_TIMEOUT_S = 60.0


def scale(
    *words: Annotated[str, option("number of replicas, after the model's name if several are served", "N")],
    flags: FindCluster = NOTHING,
    out: Out,
    asked_model: ServedModel = None,
    no_wait: NoWait = False,
) -> int:
    """Change the number of replicas; returns when all of them serve. Raises NotRunning, NoSuchModel, OrderRefused and
    StartFailed."""
    if not 1 <= len(words) <= 2:
        raise SettingsError("scale: give the number of replicas (see: homing scale --help)")
    model, wanted = words[0] if words[1:] else None, words[-1]
    most = SETTINGS["replicas"].meta.le or 0
    if not wanted.isdecimal() or int(wanted) > most:
        raise SettingsError(f"scale: {wanted!r} is not a number of replicas, 0 to {most}")
    if model and asked_model and model != asked_model:
        raise SettingsError(f"the model is given twice: {model} and --served-model-name {asked_model}")
    with _visit(flags):
        client = ControllerClient(out)
        name = choose_model([each.name for each in client.status().models], model or asked_model)
        client.order("scale", name, int(wanted))
        return client.follow([name], wait=not no_wait, done=count(int(wanted), "replica"))


def choose_model(names: Sequence[str], model: str | None) -> str:
    """Return `model`, or the only served model if it is None. Raises NoSuchModel."""
    served = ", ".join(names)
    if model is None and len(names) > 1:
        raise NoSuchModel(f"several models are served: {served}; name one with --served-model-name")
    if model is not None and model not in names:
        raise NoSuchModel(f"no model {model!r} is served here (served: {served})")
    return model or names[0]


def drain(
    replica_id: Annotated[str, option("name of the replica, such as r0", "REPLICA")],
    /,
    *,
    flags: FindCluster = NOTHING,
    out: Out,
    replace: Annotated[bool, option("start another replica in its place first")] = False,
    no_wait: NoWait = False,
) -> int:
    """Drain one replica; returns when it has ended. Raises NotRunning and OrderRefused."""
    with _visit(flags):
        client = ControllerClient(out)
        models = {replica.model for replica in client.status().replicas if replica.replica_id == replica_id}
        client.order("drain", replica_id, replace=replace)
        return client.follow(models, wait=not no_wait, done=f"{replica_id} is drained")


def update(
    model: Annotated[str | None, option("another model, or another version of it")] = None,
    /,
    *,
    flags: Changes = NOTHING,
    out: Out,
    remove: Annotated[
        tuple[str, ...], option("stop serving this model; may be repeated", metavar="NAME", consume_multiple=False)
    ] = (),
    restart: Annotated[bool, option("replace every replica even if nothing changes")] = False,
    no_wait: NoWait = False,
) -> int:
    """Replace replicas whose settings change, start models that a file adds, and remove models.

    Raises NotRunning, SettingsError, NoSuchModel, OrderRefused, StartFailed and UpdateAbandoned.
    """
    # The settings in `LOOKUP`, given or in the file, select the cluster; all others are changes.
    changes = with_model({name: text for name, text in texts(flags).items() if name not in LOOKUP}, model)
    with _visit({name: values for name, values in flags.items() if name in (*LOOKUP, "config")}):
        client = ControllerClient(out)
        running = {model.name: model for model in client.ask("current")}
        gpus = local_ray.gpus_by_machine()
        orders = update_orders(
            running, flags=changes, file=flags.get("config"), remove=remove, restart=restart, gpus=gpus
        )
        if not orders:
            print("nothing changes (to replace every replica: --restart)", file=out)
            return 0
        for verb, subject in orders:
            client.order(verb, subject)
        names = [subject if isinstance(subject, str) else subject.name for _, subject in orders]
        return client.follow(names, wait=not no_wait, done=updated(running, orders), updating=True)


def updated(running: Mapping[str, ClusterModel], orders: Sequence[tuple[str, ClusterModel | str]]) -> str:
    """Say what these orders have done. A served name stays the same when another model runs under it."""
    done = []
    for verb, subject in orders:
        if isinstance(subject, str):
            done.append(f"removed {subject}")
        elif verb == "add":
            done.append(f"added {subject.name}")
        elif subject.settings.replica.model != running[subject.name].settings.replica.model:
            done.append(f"updated; {subject.name} now runs {subject.settings.replica.model}")
        else:
            done.append("updated")
    return ", ".join(dict.fromkeys(done))


def update_orders(
    running: Mapping[str, ClusterModel],
    *,
    flags: Mapping[str, str] = {},
    file: Path | None = None,
    remove: Sequence[str] = (),
    restart: bool = False,
    gpus: tuple[float, ...] = (),
) -> list[tuple[str, ClusterModel | str]]:
    """The orders for the controller: `remove`, `add` and `update`, each with a model's name or settings.

    `gpus`: number of GPUs on each machine. `restart`: also replace replicas whose settings stay the same. Raises
    SettingsError, ModelUnavailable and NoSuchModel.
    """
    removed = [choose_model(list(running), name) for name in remove]
    staying = {name: spec.settings for name, spec in running.items() if name not in removed}
    if not staying:
        raise NoSuchModel(f"this would remove every model ({', '.join(running)}): stop the cluster with homing stop")
    orders: list[tuple[str, ClusterModel | str]] = [("remove", name) for name in removed]
    template = next(iter(running.values()))
    for added in added_settings(staying, file).values():
        added = resolve_devices(added, gpus)
        check_bounds(added, f"model {added.served_name}: ")
        orders.append(("add", _with_settings(template, added)))
    for name, changed in changed_settings(staying, flags, file).items():
        # Resolved before they are compared: the running settings name a device where a file may say auto.
        before, after = (resolve_devices(each, gpus) for each in (staying[name], changed))
        if restart or after != before:
            orders.append(("update", _with_settings(running[name], after)))
    return orders


def _with_settings(spec: ClusterModel, settings: Settings) -> ClusterModel:
    """The model's spec with these settings. Raises ModelUnavailable and SettingsError."""
    if settings.cluster.ray_address:  # each node locates the model
        return dataclasses.replace(spec, settings=settings, model_dir=None)
    folder = find_model(settings.replica)
    check_folder(folder, settings)
    return dataclasses.replace(spec, settings=settings, model_dir=str(folder))


def failed_since(before: ClusterStatus, status: ClusterStatus) -> str:
    """Say which replica has failed to start since `before`; empty if none has. The controller will retry.

    Replicas that an update is to replace do not count: their failures may be its reason.
    """
    known = {(replica.replica_id, replica.failures) for replica in before.replicas}
    current = {model.name: model.version for model in status.models}
    for replica in status.replicas:
        outdated = replica.version != current[replica.model]
        if replica.failures and not outdated and (replica.replica_id, replica.failures) not in known:
            return f"replica {replica.replica_id} could not start and will be retried: {replica.last_error}"
    return ""


class ControllerClient:
    """Calls the controller while Ray is connected."""

    def __init__(self, out: TextIO) -> None:
        import ray

        try:
            self._controller = ray.get_actor(CONTROLLER)
        except ValueError as error:
            raise NotRunning("the cluster has no controller in Ray: it is starting or stopping") from error
        self._console = Console(out)
        self._before = self.status()
        self._console.last_notice = max((notice.seq for notice in self._before.notices), default=0)

    def status(self) -> ClusterStatus:
        status: ClusterStatus = self.ask("status", self._console.last_notice)
        return status

    def ask(self, question: str, *args: object, **kwargs: object) -> Any:
        """Call a method of the controller. Raises ClusterError when it does not answer."""
        import ray

        try:
            return ray.get(getattr(self._controller, question).remote(*args, **kwargs), timeout=ANSWER_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            raise ClusterError(f"the controller does not answer: {str(error).splitlines()[0]}") from error

    def order(self, verb: str, *args: object, **kwargs: object) -> None:
        """Call a method that changes the wanted state. Raises OrderRefused."""
        refusal: Failed | None = self.ask(verb, *args, **kwargs)
        if refusal is not None:
            raise OrderRefused(refusal.message)

    def follow(self, models: Collection[str], *, wait: bool, done: str, updating: bool = False) -> int:
        """Print what happens until these models are settled, then `done`; returns 0.

        Raises StartFailed, and UpdateAbandoned if `updating` and the update is abandoned.
        """
        with closing(self._console):
            while True:
                status = self.status()
                self._console.print_notices(status.notices)
                everything = status.replicas
                status = dataclasses.replace(
                    status,
                    models=tuple(model for model in status.models if model.name in models),
                    replicas=tuple(replica for replica in status.replicas if replica.model in models),
                )
                abandoned = next((model.abandoned for model in status.models if model.abandoned), "")
                if updating and abandoned:
                    raise UpdateAbandoned(f"the update was abandoned, the previous replicas still serve: {abandoned}")
                if not wait:
                    self._console.line("started; follow it with homing status")
                    return 0
                if failed := failed_since(self._before, status):
                    raise StartFailed(failed)
                self._console.show_waiting(status)
                if status.settled:
                    break
                time.sleep(POLL_S)
        # If these models have been removed, list the replicas of the others.
        names = sorted(each.replica_id for each in status.replicas or everything if each.phase == "ready")
        self._console.line(f"{done}; serving: {', '.join(names) or 'no replica'}")
        return 0


def _visit(flags: FlagValues) -> AbstractContextManager[None]:
    settings = settings_of(flags)
    entry = ClusterRegistry(state_folder(settings)).running(settings.cluster.name)
    if entry.ray_address is None:
        raise NotRunning(f"cluster {entry.name!r} is still starting, or has no replicas of its own (pid {entry.pid})")
    ours = entry.run_dir is not None
    return local_ray.visit(entry.ray_address, entry.name, ours=ours, token=ours or entry.ray_token)
