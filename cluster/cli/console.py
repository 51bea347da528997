"""Prints what `homing serve` shows: progress while starting, a banner, and events afterwards.

Writes to the stream that it is given, because `sys.stdout` is silenced for Ray.
"""

import contextlib
import json
import shlex
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from ... import __version__
from ..config import Settings, state_folder
from ..control.control_messages import ClusterStatus, Notice, ReplicaStatus
from ..logs import LogLine
from ..output import Waiting, can_write, count
from ..preflight import exposures

CHAT = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}], "temperature": 0}
COMPLETION = {"prompt": "Once upon a time", "max_tokens": 64, "temperature": 0}


class Console:
    def __init__(self, out: TextIO, *, program: str = "homing") -> None:
        self._out = out
        self._waiting = Waiting(out)
        self._terminal = out.isatty()
        self._program = program
        self._began = time.monotonic()
        self._shown: dict[str, str] = {}
        self.last_notice = 0  #: number of the last notice that was printed

    def line(self, text: str = "") -> None:
        self._waiting.line(text)

    def show_waiting(self, status: ClusterStatus) -> None:
        """On a terminal, show what replicas and router are doing until they serve."""
        waiting = {each.replica_id: _replica_state(each) for each in status.replicas if each.phase != "ready"}
        self._waiting.show(waiting if status.url else waiting | {"router": "starting"})

    def close(self) -> None:
        """Clear the status lines at the bottom of the terminal."""
        self._waiting.close()

    def print_shutdown(self, text: str) -> None:
        """Print a line while shutting down; a closed output does not interrupt the shutdown."""
        with contextlib.suppress(BrokenPipeError):
            self.close()
            self.line(text)

    def step(self, part: str, state: str) -> None:
        """Print the state of one part with the seconds since the start, if it has changed."""
        if self._shown.get(part) == state:
            return
        self._shown[part] = state
        self.line(f"  {time.monotonic() - self._began:5.1f} s  {part:<8} {state}")

    def print_opening(self, settings: Settings) -> None:
        """Print what is about to start, with warnings about what it exposes."""
        if not settings.models:
            self.line(f"homing {__version__} · model {settings.replica.model} · {_shape(settings)}")
        else:
            self.line(f"homing {__version__} · {len(settings.models)} models")
        for each in settings.models:
            self.line(f"  {each.served_name} · model {each.replica.model} · {_shape(each)}")
        for exposure in exposures(settings):
            self.line(f"  warning  {exposure}")

    def progress(self, status: ClusterStatus) -> None:
        self.show_waiting(status)
        for replica in status.replicas:
            if replica.phase == "ready" or not self._terminal:
                self.step(replica.replica_id, _replica_state(replica))
        if status.url or not self._terminal:
            self.step("router", f"listening on {status.url}" if status.url else "starting")

    def print_notices(self, notices: tuple[Notice, ...]) -> None:
        for notice in notices:
            if notice.seq > self.last_notice:
                self.last_notice = notice.seq
                self.line(f"{time.strftime('%H:%M:%S')} {notice.level:<7} {notice.text}")

    def print_requests(self, lines: Iterable[LogLine]) -> None:
        """Print completed requests from lines of the access log. If nobody reads the output, drop the rest."""
        for line in lines:
            if not can_write(self._out):
                return  # printing must not block `homing serve`; `homing logs requests` has all of them
            if line.time:  # otherwise the line's beginning is missing
                self.line(f"{line.time[11:19]} {request_line(line.text)}")

    def banner(self, status: ClusterStatus, settings: Settings, *, detached: bool, chats: bool = True) -> None:
        """Print the banner. `chats`: whether the first model has a chat template; chats are refused otherwise."""
        self.close()
        name = _address_flags(settings)
        body = json.dumps({"model": settings.each_model[0].served_name, **(CHAT if chats else COMPLETION)})
        served = ", ".join(f"{each.served_name} on {_replicas(each)}" for each in settings.each_model)
        model = f" --served-model-name {shlex.quote(settings.models[0].served_name)}" if settings.models else ""
        program, url = self._program, status.url
        headers = "-H 'content-type: application/json'"
        api_key = curve_keys = ""
        if settings.router.api_keys_file or settings.router.api_key:
            headers += " -H 'authorization: Bearer KEY'"
            api_key = " --api-key-file FILE"
        if settings.events.events_curve_keys:
            curve_keys = f" --events-curve-keys {settings.events.events_curve_keys}"
        prompt = '"Tell me a story about a fox."' if chats else '--raw "Once upon a time"'
        path = "chat/completions" if chats else "completions"
        rule = "─" * min(100, shutil.get_terminal_size().columns)
        rows = [
            ("api", f"{url}/v1   (OpenAI-compatible)"),
            ("page", f"{url}/   (live)"),
            *[("metrics", f"{each}/metrics") for each in status.router_urls or (url,)],
            ("status", f"{program} status{name}"),
            ("explain", f"{program} explain{name}{model}{api_key} {prompt}"),
            ("watch", f"{program} watch{name}{curve_keys}"),
            ("stop", f"{program} stop{name}" if detached else f"Ctrl-C, or: {program} stop{name}"),
        ]
        self.line(f"{rule}\nhoming is ready: {served}\n")
        self.line("\n".join(f"  {word:<8} {text}" for word, text in rows))
        self.line(f"\n  try it:\n\ncurl {url}/v1/{path} {headers} -d '{body}'\n{rule}")


def _replica_state(replica: ReplicaStatus) -> str:
    if replica.phase == "ready":
        return f"ready · {replica.blocks} KV blocks · pid {', '.join(map(str, replica.pids))}"
    return replica.reason or {"placing": "waiting for a place"}.get(replica.phase, replica.phase)


def request_line(logged: str) -> str:
    """Format one request from its line of the access log, which may be part of a JSON object."""
    _, _, text = logged.partition("ts=")
    fields = dict(pair.partition("=")[::2] for pair in f"ts={text}".rstrip('"}').split())
    parts = [f"{fields['path']} {fields['status']}", f"{float(fields['duration_ms']) / 1000:.2f} s"]
    if "prompt" in fields:
        parts.insert(1, fields["replica"])
        parts.append(f"{fields['prompt']} tokens in, {fields['cached']} of them cached, {fields['output']} out")
    if "ttft_ms" in fields:
        parts.append(f"first after {fields['ttft_ms']} ms")
    return " · ".join(parts)


def model_label(name: str, source: str) -> str:
    """A served model's name, followed by the model that runs under it if that differs."""
    return name if source == name else f"{name} ({source})"


def program() -> str:
    """How to call this command from the user's shell: by its bare name only if the shell finds it."""
    return command_name(Path(sys.executable), shutil.which("homing"), Path.cwd())


def command_name(interpreter: Path, found: str | None, here: Path) -> str:
    """The command that runs `interpreter`'s `homing` from the folder `here`. `found`: the `homing` on the PATH."""
    script = interpreter.with_name("homing")
    if not script.exists():
        return f"{shlex.quote(str(interpreter))} -m homing.cluster.cli.main"
    if found is not None and Path(found).exists() and Path(found).samefile(script):
        return "homing"
    return shlex.quote(str(script.relative_to(here) if script.is_relative_to(here) else script))


def _address_flags(settings: Settings) -> str:
    """Flags that select this cluster in another terminal, where HOMING_* variables may not be set."""
    name, folder = settings.cluster.name, state_folder(settings)
    name_flag = "" if name == "default" else f" --name {name}"
    return name_flag + (f" --state-dir {shlex.quote(str(folder))}" if settings.cluster.state_dir else "")


def _shape(settings: Settings) -> str:
    ranks = settings.replica.tensor_parallel_size
    return _replicas(settings) + (f" of {ranks} ranks" if ranks > 1 and not settings.router.backend else "")


def _replicas(settings: Settings) -> str:
    backends = settings.router.backend
    if backends:
        return count(len(backends.split(",")), "backend")
    return count(settings.cluster.replicas, "replica") if settings.cluster.replicas else "as many replicas as fit"
