"""`homing scale`, `homing drain`, `homing update`: tell a running cluster's controller what is wanted, and follow it.

The controller is asked over Ray, by name; so these commands work wherever the cluster was noted, on its machine. They
decide nothing.
"""

import dataclasses
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TextIO

from . import local_ray
from .config import Settings, changed_settings, state_folder
from .console import Console
from .errors import ClusterError, NoSuchReplica, NotRunning, StartFailed, UpdateAbandoned
from .model import find_model
from .preflight import check_folder
from .spec import CONTROLLER, ClusterSpec, ClusterStatus, Failed
from .state import Notebook

POLL_S = 0.2
ANSWER_TIMEOUT_S = 60.0


def scale(settings: Settings, out: TextIO, wanted: int, *, wait: bool) -> int:
    """So many replicas; returns when they serve. Raises NotRunning and StartFailed."""
    with _visit(settings):
        control = Control(out)
        control.ask("scale", wanted)
        return control.follow(wait=wait, done=f"{wanted} replicas")


def drain(settings: Settings, out: TextIO, replica_id: str, *, replace: bool, wait: bool) -> int:
    """End one replica in good order; returns when it is gone. Raises NotRunning and NoSuchReplica."""
    with _visit(settings):
        control = Control(out)
        failed: Failed | None = control.ask("drain", replica_id, replace=replace)
        if failed is not None:
            raise NoSuchReplica(failed.message)
        return control.follow(wait=wait, done=f"{replica_id} is drained")


def update(
    settings: Settings, out: TextIO, flags: Mapping[str, str], file: Path | None, *, restart: bool, wait: bool
) -> int:
    """Replace every replica by one with changed settings. Raises NotRunning, SettingsError and UpdateAbandoned."""
    with _visit(settings):
        control = Control(out)
        running: ClusterSpec = control.ask("current")
        changed = changed_settings(running.settings, flags, file)
        if changed == running.settings and not restart:
            print("nothing changes (every replica anew: --restart)", file=out)
            return 0
        here = not running.settings.cluster.ray_address
        model_dir = str(_checked_model(changed)) if here else None
        control.ask("update", dataclasses.replace(running, settings=changed, model_dir=model_dir))
        return control.follow(wait=wait, done="updated")


class Control:
    """The controller, as long as Ray is visited."""

    def __init__(self, out: TextIO) -> None:
        import ray

        try:
            self._controller = ray.get_actor(CONTROLLER)
        except ValueError as error:
            raise NotRunning("Ray knows no controller of this cluster: it is starting or ending") from error
        self._console = Console(out)
        notices = self.ask("status").notices
        self._console.last_notice = max((notice.seq for notice in notices), default=0)

    def ask(self, question: str, *words: object, **named: object) -> Any:
        """The controller's answer. Raises ClusterError when none comes."""
        import ray

        try:
            return ray.get(getattr(self._controller, question).remote(*words, **named), timeout=ANSWER_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            raise ClusterError(f"the controller does not answer: {str(error).splitlines()[0]}") from error

    def follow(self, *, wait: bool, done: str) -> int:
        """Show what happens until everything is as it is wanted."""
        status = self._show()
        while wait and not status.settled and not status.abandoned:
            time.sleep(POLL_S)
            status = self._show()
            _check(status)
        if status.abandoned:
            raise UpdateAbandoned(f"the update was given up, the replicas before it go on: {status.abandoned}")
        self._console.line(f"{done}: {_serving(status)}" if wait else "told; homing status shows how it goes")
        return 0

    def _show(self) -> ClusterStatus:
        status: ClusterStatus = self.ask("status", self._console.last_notice)
        self._console.happened(status.notices)
        return status


def _visit(settings: Settings) -> AbstractContextManager[None]:
    note = Notebook(state_folder(settings)).running(settings.cluster.name)
    if note.ray_address is None:
        raise NotRunning(f"cluster {note.name!r} is still starting, or has no replicas of its own (pid {note.pid})")
    return local_ray.visit(note.ray_address, note.name, ours=note.run_dir is not None)


def _checked_model(settings: Settings) -> Path:
    folder = find_model(settings.replica)
    check_folder(folder, settings)
    return folder


def _check(status: ClusterStatus) -> None:
    """Raises StartFailed for what does not come up; the controller goes on trying."""
    for gang in status.gangs:
        if gang.failures:
            raise StartFailed(f"replica {gang.replica_id} could not start, and is tried again: {gang.last_error}")


def _serving(status: ClusterStatus) -> str:
    names = sorted(gang.replica_id for gang in status.gangs if gang.phase == "ready")
    return f"serving are {', '.join(names)}" if names else "nothing serves"
