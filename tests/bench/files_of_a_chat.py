"""Print the product's files that one streamed chat passes through: on the way in, in the replica, and on the way back.

python -m tests.bench.files_of_a_chat

A file counts if one of its functions is called (`sys.setprofile`): in, in the router's thread until the request is sent
to the replica; replica, in the replica's thread; back, in the router's thread afterwards, in calls that begin with a
reply's arrival. The fifth of five chats counts, so nothing is loaded for the first time. Computing (models, attention,
kernels, their execution) is counted apart.
"""

import asyncio
import json
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import uvloop

from homing.events.config import EventsSettings
from homing.kvcache.config import KvCacheSettings
from homing.replica.config import ReplicaSettings
from homing.replica.demo import demo_model_path
from homing.replica.server import ReplicaServer, start_replica
from homing.router.config import RouterSettings
from homing.router.metrics import RouterMetrics
from homing.router.replicas.service import RouterService
from homing.router.server import RouterServer

from ..router.fakes import until

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cluster", "events", "kvcache", "replica", "router")
COMPUTING = ("replica/models", "replica/attention", "replica/kernels", "replica/execute")
LINK = "router/replicas/request_link.py"
SEED = 7


def file_of(frame: FrameType) -> str | None:
    """The product's file of a frame; None for others."""
    path = Path(frame.f_code.co_filename)
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
    return name if name.startswith(PACKAGES) else None


def callers_of(frame: FrameType | None) -> Iterator[tuple[str, str]]:
    """The file and the function of each of the product's frames, from this one outwards."""
    while frame is not None:
        if (name := file_of(frame)) is not None:
            yield name, frame.f_code.co_name
        frame = frame.f_back


class Walk:
    """The files by part, in the order of their first calls."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, None]] = {"in": {}, "replica": {}, "back": {}}
        self.tracing = False
        self._part = ""

    def in_router(self, frame: FrameType, event: str, _: object) -> None:
        name = file_of(frame)
        if name is None or event not in ("call", "return"):
            return
        function = frame.f_code.co_name
        if event == "return":
            if self._part == "in" and (name, function) == (LINK, "send"):
                self._part = "back"
            return
        if not self._part and function == "data_received":
            self._part = "in"
        callers = list(callers_of(frame))
        if self._part == "in" and not callers[-1][0].startswith("events/"):  # events and heartbeats arrive meanwhile
            self.files["in"][name] = None
        elif self._part == "back" and (LINK, "_on_reply") in callers:
            self.files["back"][name] = None

    def in_replica(self, frame: FrameType, event: str, _: object) -> None:
        if self.tracing and event == "call" and (name := file_of(frame)) is not None:
            self.files["replica"][name] = None

    def lines(self) -> Iterator[str]:
        replica = list(self.files["replica"])
        computing = [name for name in replica if name.startswith(COMPUTING)]
        parts = {**self.files, "replica": [name for name in replica if name not in computing], "computing": computing}
        for part, names in parts.items():
            yield f"{part}: {len(names)} files"
            yield from (f"    {name}" for name in names)


def chat(port: int, number: int) -> None:
    question = {"role": "user", "content": f"What is the capital of country {number}?"}
    body = {"messages": [question], "max_tokens": 4, "stream": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


async def traced(replica: ReplicaServer, walk: Walk, folder: Path) -> None:
    """Serve five chats with one router, and trace the last."""
    metrics, kvcache = RouterMetrics(), KvCacheSettings(block_size=16, num_kv_blocks=257)
    settings = RouterSettings(access_log=str(folder / "access"))
    service = RouterService(settings, kvcache, router_id="walk", observer=metrics.of("demo"))
    server = RouterServer(settings, service, metrics=metrics)
    port = await server.start("127.0.0.1", 0)
    service.apply_membership([replica.description], SEED)
    await server.front.load_texts()
    await until(lambda: any(each.state == "serving" for each in service.view().replicas))
    for number in range(4):
        await asyncio.to_thread(chat, port, number)
    walk.tracing = True
    sys.setprofile(walk.in_router)
    await asyncio.to_thread(chat, port, 4)
    sys.setprofile(None)
    walk.tracing = False
    await server.stop()
    service.close()


def trace(folder: Path) -> Walk:
    """Start a replica and trace one chat."""
    walk = Walk()
    replica = start_replica(
        ReplicaSettings(dtype="float32", device="cpu", cpu_threads=1),
        KvCacheSettings(block_size=16, num_kv_blocks=257),
        EventsSettings(),
        model_dir=demo_model_path(),
        replica_id="r0",
        cluster_seed=SEED,
        ipc_dir=folder,
    )

    def run() -> None:
        sys.setprofile(walk.in_replica)
        replica.run()

    thread = threading.Thread(target=run)
    thread.start()
    uvloop.run(traced(replica, walk, folder))
    replica.stop()
    thread.join()
    return walk


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        print(*trace(Path(made)).lines(), sep="\n")
