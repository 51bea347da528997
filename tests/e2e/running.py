"""Runs `homing serve` as a process, as a user does: its HTTP address, its processes and what it leaves behind."""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
import msgspec
import psutil

from homing.cluster.registry import wait_gone

from .parent_death import end_with_us

if TYPE_CHECKING:
    from openai import OpenAI

HOMING = [sys.executable, "-P", "-m", "homing.cluster.cli.main"]
#: The API key of `post` and `client`. It identifies the tenant, and tenants share no cached blocks.
KEY = "none"
#: A limit that only catches hangs: everything takes seconds, and at most two minutes at load average 29 on two cores.
PATIENCE_S = 240.0

#: Twice the largest number of blocks that any test fills.
KV_BLOCKS = 2048

#: Prompts of about a thousand tokens each, which differ from the first token on.
LONG_PROMPTS = tuple(f"{number}. This is a long prompt that nobody else sends. " * 80 for number in range(10))

T = TypeVar("T")


def until(ask: Callable[[], T | None], what: str, patience_s: float = PATIENCE_S) -> T:
    """Poll `ask` until it returns something other than None, and return that; `what` names it in the error."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if (answer := ask()) is not None:
            return answer
        time.sleep(0.02)
    raise AssertionError(f"timed out waiting for: {what}")


def environment(state: Path) -> dict[str, str]:
    """The environment without the user's HOMING_* settings, with a small KV pool and with `state` as state folder."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOMING_")}
    ours = {"HOMING_STATE_DIR": str(state), "HOMING_NUM_KV_BLOCKS": str(KV_BLOCKS), "HF_HUB_OFFLINE": "1"}
    spare = {"HOMING_SPARE_PROCESS": "false"}  # would cost each cluster 4 s of CPU time; tests/chaos uses it
    return kept | ours | spare


def homing(state: Path, *words: str, patience_s: float = PATIENCE_S) -> "subprocess.CompletedProcess[str]":
    """Run one homing command to completion."""
    return subprocess.run(
        [*HOMING, *words], env=environment(state), capture_output=True, text=True, timeout=patience_s, check=False
    )


def one_client() -> httpx.Client:
    """An HTTP client that can be shared by all requests, each over a new connection.

    Creating a client per request costs 20 ms of CPU each, which would slow down the cluster that is polled.
    """
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(trust_env=False, timeout=60, verify=False, limits=limits)


@dataclass
class Serving:
    """A running cluster."""

    state: Path
    url: str
    pid: int
    process: "subprocess.Popen[str] | None" = None  #: None for a detached cluster
    output: list[str] = field(default_factory=list)
    http: httpx.Client = field(default_factory=one_client)

    def cluster(self) -> dict[str, Any]:
        """The response of /cluster."""
        answer: dict[str, Any] = self.http.get(f"{self.url}/cluster").json()
        return answer

    def replicas(self) -> dict[str, dict[str, Any]]:
        """The entries of /cluster's `replicas`, by replica id."""
        return {replica["replica_id"]: replica for replica in self.cluster()["replicas"]}

    def serving(self, count: int) -> dict[str, dict[str, Any]]:
        """Wait until `count` replicas serve with a live feed, and return all replicas."""

        seen: dict[str, tuple[str, str]] = {}

        def ask() -> dict[str, dict[str, Any]] | None:
            replicas = self.replicas()
            seen.clear()
            seen.update({name: (each["state"], each["feed"]) for name, each in replicas.items()})
            return replicas if list(seen.values()).count(("serving", "live")) == count else None

        try:
            return until(ask, f"{count} replicas serve")
        except AssertionError as error:
            raise AssertionError(f"{error}: {seen}") from None

    def idle(self) -> bool:
        """Whether no request runs or waits and every block is free (all but the null block of each pool)."""
        view = self.cluster()
        return view["in_flight"] == 0 and all(
            r["running"] == 0 and r["waiting"] == 0 and r["free_blocks"] == r["num_blocks"] - 1
            for r in view["replicas"]
        )

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer to a POST, sent as the same tenant that `client` uses."""
        headers = {"authorization": f"Bearer {KEY}"}
        answer = self.http.post(f"{self.url}{path}", json=body, headers=headers)
        return answer.raise_for_status().json()

    def home(self, prompt: str) -> str:
        """The id of the replica that answers this prompt."""
        body = {"prompt": prompt, "max_tokens": 1}
        response = self.http.post(f"{self.url}/v1/completions", json=body)
        return str(response.raise_for_status().headers["x-homing-replica"])

    def homes_at_once(self, prompts: Sequence[str]) -> list[str]:
        """The replicas that answer the prompts when all are sent concurrently."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(self.home, prompts))

    def tokens(self, text: str) -> int:
        """Number of tokens in a text."""
        count: int = self.post("/tokenize", {"prompt": text})["count"]
        return count

    @staticmethod
    def streamed(client: "OpenAI", body: dict[str, Any]) -> str:
        """The text of a streamed completion of `demo`, received with OpenAI's client."""
        stream = client.completions.create(model="demo", prompt=body["prompt"], stream=True, extra_body=body)
        return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)

    @contextlib.contextmanager
    def client(self) -> "Iterator[OpenAI]":
        """A client from the openai package, connected to this cluster."""
        from openai import OpenAI  # takes a second, which tests that do not use it should not pay

        with (
            one_client() as http,
            OpenAI(base_url=f"{self.url}/v1", api_key=KEY, http_client=http, max_retries=0) as client,
        ):
            yield client

    def family(self) -> list[psutil.Process]:
        """The cluster's main process and all its descendants."""
        process = psutil.Process(self.pid)
        return [process, *process.children(recursive=True)]

    def note(self) -> dict[str, Any]:
        """The cluster's state file: what a running cluster records for other commands."""
        note: dict[str, Any] = json.loads((self.state / "default.json").read_text())
        return note

    def end(self) -> int:
        """Send SIGTERM and return the exit code."""
        assert self.process is not None, "a detached cluster is stopped with homing stop"
        self.process.terminate()
        return self.process.wait(PATIENCE_S)


@contextlib.contextmanager
def serving(state: Path, *flags: str, patience_s: float = PATIENCE_S, command: str = "serve") -> Iterator[Serving]:
    """Run `homing serve --port 0` (or another command) in the foreground until the block ends."""
    words = [*HOMING, command, "--port", "0", *flags]
    with subprocess.Popen(
        words,
        env=environment(state),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=end_with_us,
    ) as process:
        running = Serving(state, "", process.pid, process)
        assert process.stdout is not None
        reader = threading.Thread(target=lambda: running.output.extend(process.stdout or ()), daemon=True)
        reader.start()
        try:
            note = until(lambda: ready_note(state, process), "the banner", patience_s)
            running.url = note["url"]
            yield running
        finally:
            process.terminate()
            process.wait(PATIENCE_S)
            reader.join(PATIENCE_S)


@contextlib.contextmanager
def restarted(start: Callable[[], "contextlib.AbstractContextManager[Serving]"]) -> Iterator[Callable[[], Serving]]:
    """A function that returns the cluster that `start` started, and starts another one after a test that ended it.

    In the usual order such a test is the last one of its file, so there is only one start.
    """
    with contextlib.ExitStack() as stack:
        clusters: list[Serving] = []

        def running() -> Serving:
            if not clusters or clusters[-1].process is None or clusters[-1].process.poll() is not None:
                clusters.append(stack.enter_context(start()))
            return clusters[-1]

        yield running


def ends_with(running: Serving, victim: str, model: str) -> None:
    """Kill one of Ray's processes while an answer streams: the cluster must end at once, say why and leave nothing.

    Ray restarts neither raylet nor GCS. Clients get an error at once, and a supervisor can restart the cluster quickly.
    """
    family, folder = running.family(), Path(running.note()["run_dir"])
    assert running.process is not None
    body = {"model": model, "prompt": "A story", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with running.http.stream("POST", f"{running.url}/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        next(each for each in family if each.name() == victim).kill()
        last = [line for line in lines if line][-1]
    assert running.process.wait(120) == 1

    assert "shutting_down" in last
    assert f"homing: Ray's {victim} (pid " in "".join(running.output)
    leaves_nothing(running.state, family, folder)


def leaves_nothing(state: Path, family: list[psutil.Process], folder: Path) -> None:
    """Check that an ended cluster, whose processes and run folder are given, left only its logs."""
    assert wait_gone(family, 0) == []
    assert not folder.exists()
    assert shared_memory(family) == []
    assert [path.name for path in state.iterdir()] == ["default.logs"]


def ready_note(state: Path, process: "subprocess.Popen[str]") -> dict[str, Any] | None:
    """The cluster's state file once its phase is ready, else None. Fails if the process has exited."""
    assert process.poll() is None, f"homing serve exited with {process.returncode}"
    path = state / "default.json"
    if not path.exists():
        return None
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
        note: dict[str, Any] = msgspec.json.decode(path.read_bytes())
        return note if note["phase"] == "ready" else None
    return None


def shared_memory(family: list[psutil.Process]) -> list[str]:
    """Names of shared memory files that contain the pid of one of these processes."""
    shared, pids = Path("/dev/shm"), {str(process.pid) for process in family}
    names = [path.name for path in shared.iterdir()] if shared.is_dir() else []
    return [name for name in names if pids & set(re.findall(r"\d+", name))]


def orphaned_folders() -> set[str]:
    """Run folders that no running process uses (other clusters may run on this machine)."""
    lines = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            lines.append(" ".join(process.cmdline()))
    used = "\n".join(lines)
    return {str(path) for path in Path("/tmp").glob("homing-*") if str(path) not in used}
