"""What `homing serve` shows: progress while starting, a banner, and what happens afterwards. Words only.

Writes to the stream it was given, so that the rest of the process (Ray prints to `sys.stdout`) can be silenced.
"""

import contextlib
import json
import logging
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from ... import __version__
from ..config import Settings, state_folder
from ..control.control_messages import ClusterStatus, Notice, ReplicaStatus
from ..exposure import exposures

REQUEST = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}], "temperature": 0}
LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class Console:
    """Lines for a person; one line per thing that changed."""

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic, *, program: str = "homing") -> None:
        self._out = out
        self._program = program
        self._clock = clock
        self._began = clock()
        self._shown: dict[str, str] = {}
        #: number of the last notice that was shown
        self.last_notice = 0

    def line(self, text: str = "") -> None:
        """One line. Raises BrokenPipeError when its reader has gone."""
        print(text, file=self._out, flush=True)

    def farewell(self, text: str) -> None:
        """One line of taking down, which goes on where nobody is left to read it."""
        with contextlib.suppress(BrokenPipeError):
            self.line(text)

    def step(self, who: str, what: str) -> None:
        """Progress of one part, with the seconds since the start; silent when nothing changed."""
        if self._shown.get(who) == what:
            return
        self._shown[who] = what
        self.line(f"  {self._clock() - self._began:5.1f} s  {who:<8} {what}")

    def opening(self, settings: Settings) -> None:
        """What is about to be started, and what that opens to others."""
        if not settings.models:
            self.line(f"homing {__version__} · model {settings.replica.model} · {_shape(settings)}")
        else:
            self.line(f"homing {__version__} · {len(settings.models)} models")
        for each in settings.models:
            self.line(f"  {each.served_name} · model {each.replica.model} · {_shape(each)}")
        for exposure in exposures(settings):
            self.line(f"  warning  {exposure}")

    def progress(self, status: ClusterStatus) -> None:
        """Where every part stands."""
        for group in status.replicas:
            self.step(group.replica_id, _rank_group_words(group))
        self.step("router", f"listening on {status.url}" if status.url else "starting")

    def happened(self, notices: tuple[Notice, ...]) -> None:
        """What a running cluster reports, each once."""
        for notice in notices:
            if notice.seq > self.last_notice:
                self.last_notice = notice.seq
                self.line(f"{time.strftime('%H:%M:%S')} {notice.level:<7} {notice.text}")

    def banner(self, status: ClusterStatus, settings: Settings, *, detached: bool) -> None:
        """How to use what now runs."""
        name = _address_flags(settings)
        body = json.dumps({"model": settings.each_model[0].served_name, **REQUEST})
        served = ", ".join(f"{each.served_name} on {_replicas(each)}" for each in settings.each_model)
        model = f" --served-model-name {shlex.quote(settings.models[0].served_name)}" if settings.models else ""
        program, url = self._program, status.url
        headers = "-H 'content-type: application/json'"
        api_key = curve_keys = ""
        if settings.router.api_keys_file:
            headers += " -H 'authorization: Bearer KEY'"
            api_key = " --api-key-file FILE"
        if settings.events.events_curve_keys:
            curve_keys = f" --events-curve-keys {settings.events.events_curve_keys}"
        rule = "─" * min(100, shutil.get_terminal_size().columns)
        rows = [
            ("api", f"{url}/v1   (OpenAI-compatible)"),
            *[("metrics", f"{each}/metrics") for each in status.router_urls or (url,)],
            ("status", f"{program} status{name}"),
            ("explain", f'{program} explain{name}{model}{api_key} "Tell me a story about a fox."'),
            ("watch", f"{program} watch{name}{curve_keys}"),
            ("stop", f"{program} stop{name}" if detached else f"Ctrl-C, or: {program} stop{name}"),
        ]
        self.line(f"{rule}\nhoming is ready: {served}\n")
        self.line("\n".join(f"  {word:<8} {text}" for word, text in rows))
        self.line(f"\n  try it:\n\ncurl {url}/v1/chat/completions {headers} -d '{body}'\n{rule}")


def program() -> str:
    """How a person at this prompt calls this very command: by its bare name only where the shell would find it."""
    return called(Path(sys.executable), shutil.which("homing"), Path.cwd())


def called(interpreter: Path, found: str | None, here: Path) -> str:
    """The words that run the `homing` of `interpreter` from the folder `here`; `found` is what the shell finds."""
    script = interpreter.with_name("homing")
    if not script.exists():
        return f"{shlex.quote(str(interpreter))} -m homing.cluster.cli.main"
    if found is not None and Path(found).exists() and Path(found).samefile(script):
        return "homing"
    return shlex.quote(str(script.relative_to(here) if script.is_relative_to(here) else script))


def _address_flags(settings: Settings) -> str:
    """What a command needs to find this cluster from another terminal, where no variable may be set."""
    name, folder = settings.cluster.name, state_folder(settings)
    name_flag = "" if name == "default" else f" --name {name}"
    return name_flag + (f" --state-dir {shlex.quote(str(folder))}" if settings.cluster.state_dir else "")


def _shape(settings: Settings) -> str:
    ranks = settings.replica.tensor_parallel_size
    return _replicas(settings) + (f" of {ranks} ranks" if ranks > 1 and not settings.router.backend else "")


def _replicas(settings: Settings) -> str:
    backends = settings.router.backend
    return f"{len(backends.split(','))} backends" if backends else f"{settings.cluster.replicas} replicas"


def _rank_group_words(group: ReplicaStatus) -> str:
    if group.phase == "ready":
        return f"ready · {group.blocks} KV blocks · pid {', '.join(map(str, group.pids))}"
    return group.reason or {"placing": "waiting for a place"}.get(group.phase, group.phase)
