"""Helpers for testing any cluster whose replicas run an external engine."""

import contextlib
import re
import threading
from collections.abc import Callable
from typing import Any

import httpx
import psutil

from .running import PATIENCE_S, Serving, until

PROMPT = "One morning the fox went to the river and sat down. " * 20
#: A request whose stream lasts long enough to be interrupted.
LONG = {"prompt": PROMPT, "max_tokens": 1000, "temperature": 0, "seed": 5, "ignore_eos": True}
SHORT = {**LONG, "max_tokens": 20}
#: The block size of vLLM on a CPU: 16 is rounded up to 32.
BLOCK_SIZE = 32


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["text"]
    return text


def cached_tokens(cluster: Serving) -> int:
    """Cached tokens of the prompt, as the engine reports them."""
    count: int = cluster.post("/v1/completions", SHORT)["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def held_blocks(cluster: Serving) -> int:
    """Blocks of the prompt that the router's index holds; waits until there are some."""

    def held() -> int | None:
        return max(row["held_blocks"] for row in cluster.post("/explain", SHORT)["replicas"]) or None

    return until(held, "the blocks are announced")


def engines(cluster: Serving, word: str) -> dict[int, psutil.Process]:
    """The engines' processes by pid: those with `word` in their first four arguments (their parents have it later)."""
    found = {}
    for process in cluster.family():
        with contextlib.suppress(psutil.Error):
            if any(word in each for each in process.cmdline()[:4]):
                found[process.pid] = process
    return found


def zombies(cluster: Serving) -> list[psutil.Process]:
    found = []
    for process in cluster.family():
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def continued(cluster: Serving) -> float:
    """Number of requests continued on another replica, from the router's metrics."""
    text = cluster.http.get(f"{cluster.url}/metrics").text
    return sum(
        float(found) for found in re.findall(r"^homing_routing_continuations_total\S* (\S+)$", text, re.MULTILINE)
    )


def text_with_a_kill(
    cluster: Serving,
    word: str,
    *,
    after: int,
    then: Callable[[], object] = lambda: None,
    victim: Callable[[psutil.Process], psutil.Process] | None = None,
) -> str:
    """Stream LONG, kill its engine (SIGKILL) after `after` chunks, call `then`, and return the whole text.

    `victim`: chooses one of the engine's processes; None: its server.
    """
    running = engines(cluster, word)  # looked up first: a fast engine could finish during the search
    below = {
        name: {process.pid for process in psutil.Process(each["pids"][0]).children(recursive=True)}
        for name, each in cluster.replicas().items()
    }
    with cluster.client() as client:
        response = client.completions.with_raw_response.create(
            model="demo", prompt=PROMPT, stream=True, extra_body=LONG
        )
        stream = response.parse()
        pieces = [next(stream) for _ in range(after)]
        (engine,) = [process for pid, process in running.items() if pid in below[response.headers["x-homing-replica"]]]
        (victim(engine) if victim else engine).kill()
        then()
        return "".join(piece.choices[0].text for piece in [*pieces, *stream] if piece.choices)


class Load:
    """Two clients that repeat the same short request; answers that differ and errors are collected in `wrong`."""

    def __init__(self, cluster: Serving) -> None:
        self._cluster = cluster
        self._over = threading.Event()
        self.wrong: list[str] = []
        self.answers = 0

    def __enter__(self) -> "Load":
        self._expected = text_of(self._cluster.post("/v1/completions", SHORT))
        self._threads = [threading.Thread(target=self._ask) for _ in range(2)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _ask(self) -> None:
        while not self._over.is_set():
            try:
                text = text_of(self._cluster.post("/v1/completions", SHORT))
            except httpx.HTTPError as error:
                self.wrong.append(repr(error))
                continue
            self.answers += 1
            if text != self._expected:
                self.wrong.append(text)
