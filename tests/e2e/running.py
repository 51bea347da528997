"""The real thing as a user runs it: `homing serve` as a process, its HTTP address, and what is left when it ended."""

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

from .parent_death import end_with_us

if TYPE_CHECKING:
    from openai import OpenAI

HOMING = [sys.executable, "-P", "-m", "homing.cluster.cli.main"]
#: Tenants share no cached blocks, and the key says who is who.
KEY = "none"
#: Only catches hangs: everything here takes seconds, at a load average of 29 on two cores up to two minutes.
PATIENCE_S = 240.0

#: Twice what any test fills.
KV_BLOCKS = 2048

#: Of about a thousand tokens each, and different from the first token on.
LONG_PROMPTS = tuple(f"{number}. This is a long prompt that nobody else sends. " * 80 for number in range(10))

T = TypeVar("T")


def until(ask: Callable[[], T | None], what: str, patience_s: float = PATIENCE_S) -> T:
    """The first answer that is not None."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if (answer := ask()) is not None:
            return answer
        time.sleep(0.02)
    raise AssertionError(f"never: {what}")


def environment(state: Path) -> dict[str, str]:
    """Ours without foreign settings, and with a small KV pool; notes go to `state`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOMING_")}
    ours = {"HOMING_STATE_DIR": str(state), "HOMING_NUM_KV_BLOCKS": str(KV_BLOCKS), "HF_HUB_OFFLINE": "1"}
    spare = {"HOMING_SPARE_PROCESS": "false"}  # would cost each cluster 4 s of CPU time; tests/chaos uses it
    return kept | ours | spare


def homing(state: Path, *words: str, patience_s: float = PATIENCE_S) -> "subprocess.CompletedProcess[str]":
    """One command, run to its end."""
    return subprocess.run(
        [*HOMING, *words], env=environment(state), capture_output=True, text=True, timeout=patience_s, check=False
    )


def one_client() -> httpx.Client:
    """A client for all requests, each over a connection of its own.

    A client per request would take 20 ms of CPU, which is what a cluster that is polled would lack.
    """
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(trust_env=False, timeout=60, verify=False, limits=limits)


@dataclass
class Serving:
    """A running cluster."""

    state: Path
    url: str
    pid: int
    process: "subprocess.Popen[str] | None" = None  #: None: detached
    output: list[str] = field(default_factory=list)
    http: httpx.Client = field(default_factory=one_client)

    def cluster(self) -> dict[str, Any]:
        """What /cluster says."""
        answer: dict[str, Any] = self.http.get(f"{self.url}/cluster").json()
        return answer

    def replicas(self) -> dict[str, dict[str, Any]]:
        """Its replicas by name."""
        return {replica["replica_id"]: replica for replica in self.cluster()["replicas"]}

    def serving(self, count: int) -> dict[str, dict[str, Any]]:
        """All replicas, once so many serve with exact events."""

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
        """Whether nothing runs or waits, and every block is free again (one of each pool is the null block)."""
        view = self.cluster()
        return view["in_flight"] == 0 and all(
            r["running"] == 0 and r["waiting"] == 0 and r["free_blocks"] == r["num_blocks"] - 1
            for r in view["replicas"]
        )

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer to a POST, sent as the same tenant as `client`."""
        headers = {"authorization": f"Bearer {KEY}"}
        answer = self.http.post(f"{self.url}{path}", json=body, headers=headers)
        return answer.raise_for_status().json()

    def home(self, prompt: str) -> str:
        """The replica that answers this prompt."""
        body = {"prompt": prompt, "max_tokens": 1}
        response = self.http.post(f"{self.url}/v1/completions", json=body)
        return str(response.raise_for_status().headers["x-homing-replica"])

    def homes_at_once(self, prompts: Sequence[str]) -> list[str]:
        """The same for several that come together."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(self.home, prompts))

    def tokens(self, text: str) -> int:
        """Length of a text in tokens."""
        count: int = self.post("/tokenize", {"prompt": text})["count"]
        return count

    @staticmethod
    def streamed(client: "OpenAI", body: dict[str, Any]) -> str:
        """The text of a completion of `demo`, as OpenAI's client gets it piece by piece."""
        stream = client.completions.create(model="demo", prompt=body["prompt"], stream=True, extra_body=body)
        return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)

    @contextlib.contextmanager
    def client(self) -> "Iterator[OpenAI]":
        """OpenAI's own client."""
        from openai import OpenAI  # takes a second, also of tests that only import this file

        with (
            one_client() as http,
            OpenAI(base_url=f"{self.url}/v1", api_key=KEY, http_client=http, max_retries=0) as client,
        ):
            yield client

    def family(self) -> list[psutil.Process]:
        """The process and all below it."""
        process = psutil.Process(self.pid)
        return [process, *process.children(recursive=True)]

    def note(self) -> dict[str, Any]:
        """What the cluster notes about itself."""
        note: dict[str, Any] = json.loads((self.state / "default.json").read_text())
        return note

    def end(self) -> int:
        """SIGTERM; returns the exit code."""
        assert self.process is not None, "a detached cluster ends by homing stop"
        self.process.terminate()
        return self.process.wait(PATIENCE_S)


@contextlib.contextmanager
def serving(state: Path, *flags: str, patience_s: float = PATIENCE_S, command: str = "serve") -> Iterator[Serving]:
    """`homing serve --port 0` (or another command) in the foreground until the block ends."""
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


def ready_note(state: Path, process: "subprocess.Popen[str]") -> dict[str, Any] | None:
    """The note once it says ready; raises when the process ended instead."""
    assert process.poll() is None, f"homing serve ended with {process.returncode}"
    path = state / "default.json"
    if not path.exists():
        return None
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
        note: dict[str, Any] = msgspec.json.decode(path.read_bytes())
        return note if note["phase"] == "ready" else None
    return None


def shared_memory(family: list[psutil.Process]) -> list[str]:
    """Files in shared memory that carry the pid of one of these."""
    shared, pids = Path("/dev/shm"), {str(process.pid) for process in family}
    names = [path.name for path in shared.iterdir()] if shared.is_dir() else []
    return [name for name in names if pids & set(re.findall(r"\d+", name))]


def orphaned_folders() -> set[str]:
    """Run folders that belong to no process (other clusters may run on this machine)."""
    lines = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            lines.append(" ".join(process.cmdline()))
    used = "\n".join(lines)
    return {str(path) for path in Path("/tmp").glob("homing-*") if str(path) not in used}
