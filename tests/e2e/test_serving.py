"""End to end with OpenAI's client: requests go to the replica that has their prefix cached, and survive its death."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from operator import eq
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from homing.cluster.local_ray import RAY_ENVIRONMENT
from homing.events.wire.messages import SnapshotBlock, SnapshotChunk, SnapshotRequest

from .running import HOMING, LONG_PROMPTS, Serving, environment, until

pytestmark = pytest.mark.cluster
log = logging.getLogger(__name__)

QUESTIONS = (
    "Who is the fox?",
    "What is the capital?",
    "Tell me a story.",
    "How much is 2 plus 3?",
    "Why?",
    "And then?",
)
FOX = [{"role": "user", "content": "Tell me a story about a fox."}]


def long_system_prompt(cluster: Serving, tokens: int) -> str:
    """A text of at least `tokens` tokens that no other test sends."""
    sentence = "You answer briefly, kindly and in plain words, and you never invent what you do not know. "
    text = sentence * 10
    return text * (1 + tokens // cluster.tokens(text))


class Watch:
    """A running `homing watch --json` and its output."""

    def __init__(self, cluster: Serving, path: Path) -> None:
        self._path = path
        with path.open("w") as out:
            command = [*HOMING, "watch", "--json"]
            self._process = subprocess.Popen(command, env=environment(cluster.state), stdout=out)

    def events(self) -> list[dict[str, Any]]:
        """Events from all complete lines so far."""
        text = self._path.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def trees(self) -> dict[tuple[str, int], dict[int, int | None]]:
        """Per replica and epoch: block -> parent, rebuilt only from the printed events."""
        trees: dict[tuple[str, int], dict[int, int | None]] = {}
        for event in self.events():
            tree = trees.setdefault((event["replica"], int(event["epoch"], 16)), {})
            apply(tree, event)
        return trees

    def close(self) -> int:
        """Stop it with SIGINT, as Ctrl-C would."""
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(30)


def apply(tree: dict[int, int | None], event: dict[str, Any]) -> None:
    match event["event"]:
        case "stored":
            names = [int(name, 16) for name in event["hashes"]]
            first = int(event["parent"], 16) if "parent" in event else None
            tree.update(zip(names, [first, *names], strict=False))
        case "removed":
            for name in event["hashes"]:
                del tree[int(name, 16)]
        case "cleared":
            tree.clear()


def snapshot(endpoint: str) -> dict[int, int | None]:
    """The replica's cached blocks (block -> parent), read from its snapshot socket with plain pyzmq."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.linger = 0
        sock.connect(endpoint)
        sock.send_multipart([b"", msgspec.msgpack.encode(SnapshotRequest())])
        blocks: list[SnapshotBlock] = []
        while True:
            assert sock.poll(30_000), f"no snapshot from {endpoint}"
            chunk = msgspec.msgpack.decode(sock.recv_multipart()[-1], type=SnapshotChunk)
            blocks += chunk.blocks
            if chunk.last:
                return {int(b.block_hash): None if b.parent is None else int(b.parent) for b in blocks}


#: Asks each replica's rank 0, through Ray and independently of the event stream, which blocks its cache holds.
ASK_RESIDENTS = """
import json, sys
import ray
from homing.kvcache.hashing import wire_hash
ray.init(address=sys.argv[1], namespace="homing-default", log_to_driver=False, logging_level="ERROR")
found = {}
short = lambda name: None if name is None else wire_hash(name)
ranks = [name for name in ray.util.list_named_actors() if name.count(".") == 2]  # replica, rank, generation
for name in ranks:
    blocks = ray.get(ray.get_actor(name).residents.remote())
    found[name.split(".")[0]] = [[short(block.block_hash), short(block.parent)] for block in blocks]
print("RESIDENTS", json.dumps(found))
"""


def residents(cluster: Serving) -> dict[str, dict[int, int | None]]:
    """Each replica's cached blocks, from the replica itself: block -> parent."""
    command = [sys.executable, "-P", "-c", ASK_RESIDENTS, cluster.note()["ray_address"]]
    # The cluster listens only on loopback and requires its token, so a joining client needs both settings.
    loopback = environment(cluster.state) | RAY_ENVIRONMENT | {"RAY_AUTH_MODE": "token"}
    done = subprocess.run(command, env=loopback, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    told = next(line for line in done.stdout.splitlines() if line.startswith("RESIDENTS"))
    return {name: dict(map(tuple, blocks)) for name, blocks in json.loads(told.removeprefix("RESIDENTS")).items()}


@pytest.fixture(scope="module")
def watch(cluster: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watch]:
    """A watch that runs from before the module's first request to its end."""
    watching = Watch(cluster, tmp_path_factory.mktemp("watch") / "events")
    until(lambda: True if sum(e.get("status") == "live" for e in watching.events()) >= 2 else None, "watch is live")
    yield watching
    assert watching.close() == 0


def test_requests_with_one_system_prompt_go_to_the_replica_that_holds_it(cluster: Serving, watch: Watch) -> None:
    """The purpose of the project: later requests reuse the KV of the first one, whichever replica holds it."""
    system = long_system_prompt(cluster, 1000)
    replicas, cached = [], []

    with cluster.client() as client:
        for question in QUESTIONS:
            until(lambda: True if cluster.idle() else None, "no other request's load influences the routing")
            raw = client.chat.completions.with_raw_response.create(
                model="demo",
                messages=[{"role": "system", "content": system}, {"role": "user", "content": question}],
                max_tokens=8,
                temperature=0,
            )
            usage = raw.parse().usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            assert usage.prompt_tokens > 1000
            replicas.append(raw.headers["x-homing-replica"])
            cached.append(usage.prompt_tokens_details.cached_tokens or 0)

    messages = [{"role": "system", "content": system}, {"role": "user", "content": QUESTIONS[0]}]
    explained = cluster.post("/explain", {"messages": messages})
    holders = [row["replica_id"] for row in explained["replicas"] if row["held_blocks"] >= 60]

    assert cached[0] < 100
    assert holders == replicas[:1], (replicas, explained)
    assert min(cached[1:]) >= 960, cached
    assert len(set(replicas)) == 1, replicas


def test_prompts_that_come_together_each_find_their_home(cluster: Serving) -> None:
    """Load spreads prompts, but cached ones stay. (test_lifecycle.py has the same test without events.)"""
    first = [cluster.home(prompt) for prompt in LONG_PROMPTS]

    # On a busy machine, moving the last one of a queue may be right. By chance, 5 of 10 would stay.
    together = cluster.homes_at_once(LONG_PROMPTS)
    assert sum(map(eq, together, first)) >= len(first) - 2


def test_two_streams_at_once_give_the_same_text_as_one_alone(cluster: Serving) -> None:
    """Batching must not change an answer."""
    alone = "".join(stream(cluster))
    together: list[str] = ["", ""]

    def run(index: int) -> None:
        together[index] = "".join(stream(cluster))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert together == [alone, alone]
    assert "fox" in alone


def stream(cluster: Serving, max_tokens: int = 100) -> Iterator[str]:
    """The pieces of a greedy answer that ends only at `max_tokens`."""
    with cluster.client() as client:
        chunks = client.chat.completions.create(
            model="demo",
            messages=FOX,  # type: ignore[arg-type]
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for chunk in chunks:
            if chunk.choices and chunk.choices[0].delta.content:
                yield chunk.choices[0].delta.content


def test_a_client_that_goes_away_frees_its_blocks(cluster: Serving) -> None:
    """An abandoned answer must not keep blocks that other requests wait for."""
    until(lambda: True if cluster.idle() else None, "no earlier request is running")
    pieces = stream(cluster, max_tokens=4000)
    next(pieces)
    assert not cluster.idle()

    pieces.close()  # type: ignore[attr-defined]

    until(lambda: True if cluster.idle() else None, "its blocks are free")
    assert cluster.cluster()["counters"]["cancelled"] >= 1


def test_a_stream_survives_the_death_of_its_replica(cluster: Serving, watch: Watch) -> None:
    """SIGKILL mid-stream: the text is unchanged, the dead replica leaves routing, and a new one serves."""
    before = cluster.serving(2)
    undisturbed = "".join(stream(cluster, 1500))
    until(lambda: True if cluster.idle() else None, "nothing else runs, so that the stream shows its replica")

    pieces = stream(cluster, 1500)
    text = next(pieces)
    victim = until(lambda: next((r for r in cluster.replicas().values() if r["in_flight"]), None), "it runs somewhere")
    os.kill(victim["pids"][0], signal.SIGKILL)
    killed = time.monotonic()
    name, epoch = victim["replica_id"], victim["epoch"]
    until(lambda: True if cluster.replicas().get(name, {}).get("epoch") != epoch else None, "it leaves routing")
    log.warning("replica_left_routing after_s=%.3f", time.monotonic() - killed)
    text += "".join(pieces)

    assert text == undisturbed
    assert cluster.cluster()["counters"]["continued"] >= 1
    after = cluster.serving(2)
    assert after[name]["pids"] != before[name]["pids"]
    assert "".join(stream(cluster, 50)) == undisturbed[: len("".join(stream(cluster, 50)))]


def test_a_tree_rebuilt_from_the_printed_events_is_the_replicas_own_cache(cluster: Serving, watch: Watch) -> None:
    """Other tools build on `homing watch`: its output must be exact, even after a replica's death."""
    replicas = cluster.serving(2)
    cluster.home(LONG_PROMPTS[0])
    own = {(name, r["epoch"]): snapshot(r["event_endpoints"]["snapshot"]) for name, r in replicas.items()}

    def rebuilt() -> dict[tuple[str, int], dict[int, int | None]] | None:
        trees = watch.trees()
        return {key: trees.get(key, {}) for key in own} if all(trees.get(key) == own[key] for key in own) else None

    trees = until(rebuilt, f"the printed stream gives {[len(tree) for tree in own.values()]} blocks")

    assert trees == own
    assert {name: tree for (name, _), tree in trees.items()} == residents(cluster)
    assert sum(len(tree) for tree in own.values()) > 0
