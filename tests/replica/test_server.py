"""A whole replica on real sockets with a small random model; transformers' `generate` is the oracle."""

import asyncio
import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import reduce
from operator import xor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq

from homing.events.config import EventsSettings
from homing.events.follow.feed import EventFeed, FeedSink
from homing.events.follow.subscription import Apply, FeedStatus, Reset
from homing.events.wire.cache_events import Cleared, Removed, Stored
from homing.events.wire.messages import HEARTBEAT_TOPIC, LOAD_TOPIC, Heartbeat, LoadReport, TierDigest
from homing.kvcache.config import KvCacheSettings
from homing.kvcache.hashing import BlockHash, wire_hash
from homing.kvcache.parity import canary_hash
from homing.replica.config import ReplicaSettings
from homing.replica.disk.disk_file import DiskFile
from homing.replica.disk.file_format import Layout, decode_header
from homing.replica.engine.step_plan import StepPlan
from homing.replica.errors import DiskTierUnusable, EngineBroken, ReplicaError, StartupError
from homing.replica.execute.runner import ModelRunner
from homing.replica.messages import Constraint, Generate, Pin
from homing.replica.parallel.rank_group import RankGroup
from homing.replica.server import MAX_FAILURES, ReplicaServer, start_replica

from .clients import PATIENCE_S, SEED, Client, Served, served
from .fakes import generate
from .toys import with_tokenizer

Reference = Callable[[Path, list[list[int]], int], list[list[int]]]


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture
def replica(folder: Path, tmp_path: Path) -> Iterator[Served]:
    with served(folder, tmp_path) as running:
        yield running


class StateListener:
    """Reads a replica's load reports, or another topic of its state."""

    def __init__(self, running: Served, topic: bytes = LOAD_TOPIC, kind: type = LoadReport) -> None:
        self.kind = kind
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.linger = 0
        self.socket.subscribe(topic)
        self.socket.connect(running.description.event_endpoints.state)

    def until(self, holds: Callable[[Any], bool]) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if self.socket.poll(1000):
                report = msgspec.msgpack.decode(self.socket.recv_multipart()[1], type=self.kind)
                if holds(report):
                    return report
        raise AssertionError(f"no matching {self.kind.__name__} arrived")

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture
def loads(replica: Served) -> Iterator[StateListener]:
    listener = StateListener(replica)
    yield listener
    listener.close()


def test_a_mixed_batch_answers_like_generate(
    replica: Served, folder: Path, prompts: list[list[int]], reference: Reference
) -> None:
    """Greedy in float32: all prompts at once, then again with cached prefixes; tokens must match exactly."""
    expected = reference(folder, prompts, 12)
    client = replica.client()
    for turn in range(2):
        ids = [turn * 100 + number for number in range(len(prompts))]
        for request_id, prompt in zip(ids, prompts, strict=True):
            client.ask(request_id, prompt, max_tokens=12, ignore_eos=False)
        client.wait(*ids)

        assert [client.tokens(request_id) for request_id in ids] == expected


def test_the_second_identical_prompt_reports_its_cached_tokens(replica: Served) -> None:
    """All but the last token are cached: three shared blocks of 8, and seven tokens copied from the fourth."""
    client, prompt = replica.client(), list(range(3, 35))
    for request_id in (1, 2):
        client.ask(request_id, prompt)
        client.wait(request_id)

    assert [client.outputs[request_id][0].cached_tokens for request_id in (1, 2)] == [0, 31]


@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_blocks_on_disk_answer_after_a_restart_unless_they_are_damaged(folder: Path, tmp_path: Path, kind: str) -> None:
    """The answers are those of the first start in either case; a pool in 8 bits has its own bytes, and another file."""
    prompt, disk, sockets = list(range(3, 35)), tmp_path / "disk", tmp_path / "sockets"
    sockets.mkdir()
    options: dict[str, Any] = {
        "kvcache": {"disk_kv": str(disk), "disk_kv_size": 1 << 20},
        "settings": {"kv_cache_dtype": kind, "dtype": "bfloat16"},
    }
    answers, cached = [], []
    for start in range(3):
        if start == 2:
            (path,) = disk.iterdir()
            with path.open("r+b") as raw:
                header = decode_header(raw.read(4096))
                assert header is not None
                layout = Layout(header.identity.block_size, header.identity.block_bytes, header.slots)
                raw.seek(layout.data_at(0))
                raw.write(b"\xa5" * (layout.file_bytes - layout.data_at(0)))
        with served(folder, sockets, **options) as running:
            client = running.client()
            client.ask(1, prompt, max_tokens=12)
            client.wait(1)
            answers.append(client.tokens(1))
            cached.append(client.outputs[1][0].cached_tokens)

    assert answers == [answers[0]] * 3
    assert cached == [0, 31, 0]


#: Ids of four prompts that share nothing, of six blocks of 8 and a bit; a pool of 14 blocks holds two.
SPREAD = [list(range(start, start + 50)) for start in (3, 53, 103, 153)]


@pytest.mark.parametrize(
    ("kind", "overlap", "disk"), [("auto", "off", True), ("fp8", "off", False), ("auto", "on", False)]
)
def test_prompts_that_the_pool_evicted_are_loaded_from_host_memory(
    folder: Path, tmp_path: Path, kind: str, overlap: str, disk: bool
) -> None:
    """The working set is three times the pool. A bit that flips in host memory is found, and the block is computed; a
    reset leaves nothing there. The answers are those of the first time in all cases.
    """
    options: dict[str, Any] = {
        "kvcache": {"num_kv_blocks": 15, "host_kv_memory": 1 << 20},
        "settings": {
            "kv_cache_dtype": kind,
            "overlap_steps": overlap,
            "dtype": "bfloat16" if kind == "fp8" else "float32",
        },
    }
    if disk:
        options["kvcache"] |= {"disk_kv": str(tmp_path / "disk"), "disk_kv_size": 1 << 20}
    (sockets := tmp_path / "sockets").mkdir()
    with served(folder, sockets, **options) as running:
        client, listener = running.client(), StateListener(running)

        def ask(first: int) -> list[list[int]]:
            for number, prompt in enumerate(SPREAD, start=first):
                client.ask(number, prompt, max_tokens=12)
                client.wait(number)
            return [client.tokens(number) for number in range(first, first + len(SPREAD))]

        computed, loaded = ask(0), ask(4)
        outputs = [client.outputs[number][0] for number in range(8)]
        assert [output.cached_tokens for output in outputs] == [0] * 4 + [48] * 4
        assert [dict(output.loaded_tokens) for output in outputs[4:]] == [{"CPU": 48}] * 4
        assert loaded == computed
        report = listener.until(lambda load: load.counters.host_hit_tokens == 192)
        tier = report.tiers[0]
        assert tier.medium == "CPU"
        assert 24 <= tier.used_blocks <= tier.total_blocks
        assert tier.load_block_s > 0

        store = running.server._engine._executor.host  # between steps: nothing runs
        store.rows[:, 5] ^= 1
        assert ask(8) == computed
        assert (
            listener.until(lambda load: "host_corrupt" in load.counters.tier_failures).counters.host_hit_tokens == 192
        )
        assert client.reset_cache(1)
        assert ask(12) == computed
        assert [client.outputs[number][0].cached_tokens for number in range(12, 16)] == [0] * 4
        listener.close()


def test_heartbeats_tell_what_is_in_the_pool_and_in_host_memory(folder: Path, tmp_path: Path) -> None:
    """A router compares its index with these digests; a change that was never announced would make them differ."""
    options: dict[str, Any] = {"kvcache": {"num_kv_blocks": 15, "host_kv_memory": 1 << 20}}
    with served(folder, tmp_path, **options) as running:
        client = running.client()
        for number, prompt in enumerate(SPREAD * 2):
            client.ask(number, prompt, max_tokens=12)
            client.wait(number)
        engine = running.server._engine
        held = running.server._ask(lambda: [*engine._host.tier._held])
        pool, tier = (reduce(xor, map(wire_hash, hashes)) for hashes in (running.resident_hashes(), held))

        listener = StateListener(running, HEARTBEAT_TOPIC, Heartbeat)
        listener.until(lambda beat: (beat.digest, beat.tiers) == (pool, [TierDigest("CPU", len(held), tier)]))
        listener.close()


def test_a_replica_that_cannot_have_its_host_memory_says_why(folder: Path) -> None:
    for memory, message in (
        (100, r"host_kv_memory 100: it holds 0 blocks of 4,096 bytes; set at least 65,536"),
        (1 << 50, r"host_kv_memory 1,125,899,906,842,624: the machine has [\d,]+ bytes left"),
    ):
        with pytest.raises(StartupError, match=message), served(folder, None, kvcache={"host_kv_memory": memory}):
            pass


def test_a_replica_that_cannot_use_its_disk_says_why(folder: Path, tmp_path: Path) -> None:
    """Nothing stays open or behind; the setting to change is named."""
    (tmp_path / "file").write_text("mine")
    for kvcache, message in (
        ({"disk_kv": str(tmp_path / "file"), "disk_kv_size": 1 << 20}, "file: it is not a folder"),
        ({"disk_kv": str(tmp_path), "disk_kv_size": 4096}, "disk_kv_size 4,096: it holds only"),
    ):
        with pytest.raises(StartupError, match=message), served(folder, None, kvcache=kvcache):
            pass
    assert os.listdir(tmp_path) == ["file"]


def test_a_replica_serves_without_a_broken_disk(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache must not keep a replica from starting; the failure is reported."""

    def broken(*settings: object) -> tuple[DiskFile, int]:
        raise DiskTierUnusable("disk_kv: broken") from OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("homing.replica.server.open_rank_file", broken)
    with served(folder, tmp_path, kvcache={"disk_kv": str(tmp_path), "disk_kv_size": 1 << 20}) as running:
        listener = StateListener(running)
        client = running.client()
        client.ask(1, [3, 4, 5])
        client.wait(1)
        listener.until(lambda load: load.counters.tier_failures == {"disk_io": 1})
        listener.close()


def test_a_description_says_how_to_reach_and_what_to_expect(replica: Served) -> None:
    """The router compares the parity fields and validates requests against the limits."""
    description = replica.description
    parity = description.parity

    assert parity.canary == canary_hash(replica.hasher, BlockHash(parity.model_root))
    assert (parity.block_size, parity.hash_algorithm) == (8, "xxh3_128")
    assert (description.model.vocab_size, description.model.max_model_len) == (211, 256)
    assert (description.num_blocks, description.pids, description.tensor_parallel_size) == (65, (os.getpid(),), 1)
    assert description.prefill_tokens_per_s > 0
    assert description.decode_step_s > 0


def test_preemption_in_a_tiny_pool_changes_no_token(
    folder: Path, tmp_path: Path, prompts: list[list[int]], reference: Reference
) -> None:
    """The pool holds about one and a half of these requests, and the budget splits prompts at odd positions."""
    longest = max(map(len, prompts)) + 24
    blocks = 1 + -(-longest // 4) + 4
    expected = reference(folder, prompts, 24)
    settings = {"max_batched_tokens": 7, "max_running_requests": 4}
    kvcache = {"block_size": 4, "num_kv_blocks": blocks}

    with served(folder, tmp_path, settings=settings, kvcache=kvcache) as running:
        client, loads = running.client(), StateListener(running)
        for number, prompt in enumerate(prompts):
            client.ask(number, prompt, max_tokens=24, ignore_eos=False)
        client.wait(*range(len(prompts)))
        last = loads.until(lambda report: bool(report.accepted) and not report.running + report.waiting)
        loads.close()

    assert last.counters.preemptions > 0
    assert [client.tokens(number) for number in range(len(prompts))] == expected


def test_answers_that_repeat_themselves_come_several_tokens_at_once(
    folder: Path, tmp_path: Path, reference: Reference
) -> None:
    """`num_speculative_tokens` must not change the tokens."""
    prompt = [40, 41, 42, 5]

    with served(folder, tmp_path, settings={"num_speculative_tokens": 8}) as running:
        client = running.client()
        client.ask(1, prompt, max_tokens=100, ignore_eos=False)
        client.wait(1)

    assert client.tokens(1) == reference(folder, [prompt], 100)[0]
    assert max(len(output.token_ids) for output in client.outputs[1]) > 1


def test_an_abort_frees_the_blocks_within_a_step(replica: Served, loads: StateListener) -> None:
    """A disconnected client must not hold memory: no token follows after the step in progress."""
    client = replica.client()
    client.ask(1, [5, 6, 7], max_tokens=200)
    client.receive()
    client.abort(1)

    report = loads.until(lambda report: report.accepted == {"router-1": 1} and not report.running)

    assert report.free_blocks == report.total_blocks == 64
    assert len(client.tokens(1)) < 200


def test_the_load_report_tells_what_was_accepted_and_measured(replica: Served, loads: StateListener) -> None:
    """Accepted counts tell a router which of its requests the report includes."""
    client = replica.client()
    client.ask(7, list(range(3, 60)))
    client.wait(7)

    report = loads.until(lambda report: report.accepted == {"router-1": 7} and not report.running)

    assert report.epoch == replica.description.epoch
    assert (report.counters.prefilled_tokens, report.counters.generated_tokens) == (57, 4)
    assert report.cached_free_blocks == 7


def test_a_frame_that_cannot_be_read_is_dropped_and_harms_nobody(
    replica: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """The frame is logged and dropped, and the next request is answered."""
    client = replica.client()
    client.socket.send(b"\xc1 no msgpack")
    client.socket.send(msgspec.msgpack.encode({"type": "generate", "request_id": "one"}))
    client.socket.send_multipart([b"three", b"frames"])
    client.socket.send(b"\x82" + b"".join(map(msgspec.msgpack.encode, ("type", "generate", "deep"))) + b"\x91" * 5000)
    client.ask(1, [5, 6, 7])
    client.wait(1)

    assert len(client.tokens(1)) == 4
    assert caplog.text.count("request_malformed") == 4


def test_a_request_that_cannot_run_is_refused_by_name(replica: Served) -> None:
    """The refusal's text becomes the client's error message."""
    client = replica.client()
    client.ask(1, [3] * 256)
    client.ask(2, [3, 4], top_p=7.0)
    client.wait(1, 2)

    assert (client.refused[1].reason, client.refused[2].reason) == ("prompt_too_long", "invalid")
    assert "top_p" in client.refused[2].message


@pytest.fixture(scope="module")
def spelling_replica(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A replica with a tokenizer, which constraints need."""
    spelling = with_tokenizer(folder, tmp_path_factory.mktemp("model"))
    with served(spelling, tmp_path_factory.mktemp("ipc")) as running:
        yield running


def guided(client: Client, number: int, constraint: Constraint, **sampling: Any) -> Generate:
    return msgspec.structs.replace(generate(number, [5, 6, 7], client.hasher, **sampling), constraint=constraint)


def test_constrained_requests_are_answered_beside_others(spelling_replica: Served) -> None:
    """Constraints compile in another thread, so later requests may be admitted earlier."""
    client = spelling_replica.client(b"guided")
    digits = Constraint(kind="regex", source="[0-9]{6}")

    client.send(guided(client, 1, digits, max_tokens=20))
    client.ask(2, [5, 6, 7], max_tokens=3)
    client.send(guided(client, 3, digits, max_tokens=20))
    client.wait(1, 2, 3)

    assert client.tokens(1) == client.tokens(3)
    assert (client.outputs[1][-1].finish_reason, client.outputs[1][-1].stop_token_id) == ("stop", None)
    assert len(client.tokens(2)) == 3
    assert spelling_replica.server.idle()


def test_a_constraint_that_cannot_be_compiled_is_refused_by_name(spelling_replica: Served) -> None:
    """A router of another version may accept it."""
    client = spelling_replica.client(b"refused")

    client.send(guided(client, 1, Constraint(kind="regex", source="(a")))
    client.wait(1)

    assert (client.refused[1].reason, client.refused[1].retry) == ("invalid", False)
    assert client.refused[1].message == "constraint: unclosed group"


def test_an_abort_reaches_a_request_whose_constraint_is_being_compiled(spelling_replica: Served) -> None:
    """Otherwise the request would start after its client has left."""
    client = spelling_replica.client(b"aborted")
    slow = Constraint(kind="json_schema", source=json.dumps({"enum": [f"value {each}" for each in range(4000)]}))

    client.send(guided(client, 1, slow, max_tokens=4000))
    client.abort(1)
    client.send(guided(client, 2, Constraint(kind="choice", source='["yes"]')))
    client.wait(2)

    while not spelling_replica.server.idle():
        time.sleep(0.01)
    assert 1 not in client.outputs
    assert 1 not in client.refused


def test_a_draining_replica_finishes_and_refuses_what_comes_later(replica: Served, loads: StateListener) -> None:
    """The refusal allows a retry on another replica."""
    client = replica.client()
    client.ask(1, [5, 6, 7], max_tokens=30)
    client.receive()
    replica.server.drain()
    client.ask(2, [5, 6])
    client.wait(1, 2)

    assert len(client.tokens(1)) == 30
    assert (client.refused[2].reason, client.refused[2].retry) == ("draining", True)
    assert loads.until(lambda report: report.draining and not report.running)


def test_a_router_that_vanished_loses_its_requests_and_stops_nobody(replica: Served, loads: StateListener) -> None:
    """Sends to the lost router fail at once; another router's stream continues."""
    client, other = replica.client(), Client(replica.description, replica.hasher, b"router-2")
    other.ask(1, [9, 8, 7], max_tokens=240)
    other.receive()
    other.close()
    client.ask(1, [5, 6, 7], max_tokens=20)
    client.wait(1)

    report = loads.until(lambda report: report.accepted == {"router-1": 1} and not report.running)

    assert len(client.tokens(1)) == 20
    assert report.free_blocks == report.total_blocks


def test_two_routers_get_their_own_tokens_only(replica: Served) -> None:
    """Request ids are unique only per router."""
    first, second = replica.client(b"router-1"), replica.client(b"router-2")
    first.ask(1, [5, 6, 7], max_tokens=6)
    second.ask(1, [5, 6, 7], max_tokens=3)
    first.wait(1)
    second.wait(1)

    assert first.tokens(1)[:3] == second.tokens(1)
    assert [len(client.tokens(1)) for client in (first, second)] == [6, 3]


class RouterView(FeedSink):
    """A sink that keeps the held blocks in a plain set."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.live = False

    def blocks_changed(self, instruction: Apply | Reset) -> None:
        if isinstance(instruction, Reset):
            self.held = {int(block.block_hash) for block in instruction.blocks}
            return
        for event in instruction.events:
            if isinstance(event, Stored):
                self.held |= set(event.hashes)
            elif isinstance(event, Removed):
                self.held -= set(event.hashes)
            elif isinstance(event, Cleared):
                self.held.clear()

    def status(self, status: FeedStatus) -> None:
        self.live = status is FeedStatus.LIVE

    def malformed(self, error: Exception) -> None:
        raise error

    def refused(self, error: Exception) -> None:
        raise error


async def test_a_set_built_from_the_stream_is_what_the_replica_holds(folder: Path, tmp_path: Path) -> None:
    """Covers eviction, a reset and a late subscriber: a router knows the cache through events alone."""
    with served(folder, tmp_path, kvcache={"num_kv_blocks": 17}) as running:
        client, view = running.client(), RouterView()
        feed = EventFeed(running.description.event_endpoints, view)
        await asyncio.to_thread(talk, client, range(4))
        feed.start(asyncio.get_running_loop())
        await asyncio.to_thread(talk, client, range(4, 12))

        await until(lambda: view.live and view.held == resident_names(running))
        resident = running.server.residents()
        assert await asyncio.to_thread(client.reset_cache, 1)
        await until(lambda: not view.held)
        feed.close()

    assert 0 < len(resident) <= 16


def test_a_router_is_told_which_blocks_go_next(folder: Path, tmp_path: Path) -> None:
    """The least recently used prompt's blocks come first, starting at its end."""
    with served(folder, tmp_path) as running:
        client, prompt = running.client(), list(range(3, 51))
        assert client.next_evictions() == []
        client.ask(1, prompt, max_tokens=1)
        client.wait(1)

        request = generate(1, prompt, running.hasher)
        assert client.next_evictions() == running.hasher.chain(request.root, request.token_ids)[::-1]


async def test_a_router_can_have_an_idle_cache_forgotten_and_everybody_hears_it(folder: Path, tmp_path: Path) -> None:
    """For new weights or a new benchmark run: refused while blocks are in use, and announced without a further step."""
    with served(folder, tmp_path) as running:
        client, view = running.client(), RouterView()
        feed = EventFeed(running.description.event_endpoints, view)
        feed.start(asyncio.get_running_loop())
        client.ask(1, list(range(3, 35)), max_tokens=200)
        await asyncio.to_thread(client.receive)

        refused = await asyncio.to_thread(client.reset_cache, 1)
        await until(lambda: bool(view.held))
        client.abort(1)
        done = await asyncio.to_thread(client.reset_cache, 2)
        await until(lambda: view.live and not view.held)
        feed.close()

    assert (refused, done) == (False, True)


def test_prefixes_are_shared_and_pinned_under_sha256(folder: Path, tmp_path: Path) -> None:
    """The whole replica with the other hash algorithm, and a pin on the wire."""
    kvcache = {"hash_algorithm": "sha256", "pin_tenant_share": 1.0}
    with served(folder, tmp_path, kvcache=kvcache) as running:
        client, prompt = running.client(), list(range(3, 35))
        pins = (Pin(32, 60.0, b"t" * 16),)
        for request_id in (1, 2):
            client.send(msgspec.structs.replace(generate(request_id, prompt, running.hasher), pins=pins))
            client.wait(request_id)
        outputs = [client.outputs[request_id][0] for request_id in (1, 2)]

    assert [(output.cached_tokens, output.pinned_tokens) for output in outputs] == [(0, 32), (31, 32)]
    assert running.description.parity.hash_algorithm == "sha256"


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - other threads make it hold
            await asyncio.sleep(0.02)


def talk(client: Client, ids: range) -> None:
    """Send requests of 30 tokens each, some of which share their first half."""
    for request_id in ids:
        client.ask(request_id, [3 + request_id % 3] * 16 + [50 + request_id] * 14, max_tokens=9)
        client.wait(request_id)


def resident_names(running: Served) -> set[int]:
    return {wire_hash(block_hash) for block_hash in running.resident_hashes()}


def test_a_stopped_replica_sends_its_requests_elsewhere(folder: Path, tmp_path: Path) -> None:
    """Unfinished requests can be continued elsewhere at once, not after a timeout."""
    with served(folder, tmp_path) as running:
        client = running.client()
        client.ask(1, [5, 6, 7], max_tokens=240)
        client.receive()
        running.server.stop()
        client.wait(1)

        assert (client.refused[1].reason, client.refused[1].retry) == ("draining", True)
        running.thread.join(PATIENCE_S)
        with pytest.raises(ReplicaError, match="stopped"):
            running.server.residents()


class FragileRunner(ModelRunner):
    """Fails the next `fail_next` forward passes; each pass first waits for the gate to open."""

    fail_next = 0
    error: type[Exception] = ValueError

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.gate = threading.Event()
        self.gate.set()

    def forward(self, plan: StepPlan) -> torch.Tensor | None:
        self.gate.wait(PATIENCE_S)
        if self.fail_next:
            self.fail_next -= 1
            raise self.error("out of luck")
        return super().forward(plan)


class Loader:
    """Keeps a reference to the runner that it loads."""

    def __call__(self, settings: ReplicaSettings, folder: Path, size: int, group: RankGroup | None) -> ModelRunner:
        self.runner = FragileRunner(settings, folder, size, group)
        return self.runner


def test_a_step_that_fails_ends_its_requests_and_the_replica_goes_on(folder: Path, tmp_path: Path) -> None:
    """A bad request must not take down the replica."""
    loader = Loader()
    with served(folder, tmp_path, load_runner=loader) as running:
        client = running.client()
        loader.runner.fail_next = 1
        client.ask(1, [5, 6, 7])
        client.wait(1)
        client.ask(2, [5, 6, 7])
        client.wait(2)

        assert "out of luck" in client.failed[1]
        assert len(client.tokens(2)) == 4


def test_a_replica_whose_steps_keep_failing_ends_so_that_it_is_rebuilt(folder: Path, tmp_path: Path) -> None:
    """A broken device fails every step; a replica that refuses every request would still look alive."""
    loader = Loader()
    with served(folder, tmp_path, load_runner=loader) as running:
        client = running.client()
        loader.runner.fail_next = MAX_FAILURES
        for request_id in range(MAX_FAILURES):
            client.ask(request_id, [5, 6, 7])
            client.wait(request_id)
        running.thread.join(PATIENCE_S)

        assert isinstance(running.error, EngineBroken)


def test_a_broken_device_ends_the_replica_at_once(folder: Path, tmp_path: Path) -> None:
    """After an illegal access, CUDA fails every later call of the process: more steps would only lose more requests."""
    loader = Loader()
    with served(folder, tmp_path, load_runner=loader) as running:
        client = running.client()
        loader.runner.fail_next, loader.runner.error = 1, torch.AcceleratorError
        client.ask(1, [5, 6, 7])
        client.wait(1)
        running.thread.join(PATIENCE_S)

        assert isinstance(running.error, EngineBroken)
        assert "out of luck" in str(running.error)


def test_a_replica_whose_publisher_fails_ends(folder: Path, tmp_path: Path) -> None:
    """Without load reports it counts as silent: it would stand idle for good, as its process answers."""
    with served(folder, tmp_path) as running:
        deadline = time.monotonic() + PATIENCE_S
        while running.thread.is_alive() and time.monotonic() < deadline:
            running.server._publisher.report(object())  # type: ignore[arg-type]  # which cannot be encoded
            time.sleep(0.005)  # the engine's own report may replace it

        assert isinstance(running.error, EngineBroken)
        assert "publisher" in str(running.error)


def step_s_until(server: ReplicaServer, done: Callable[[float], bool]) -> float:
    """Wait until `step_s` is as wanted, and return it."""
    deadline = time.monotonic() + PATIENCE_S
    while not done(value := server.step_s()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return value


@pytest.mark.parametrize("place", ["the device", "sending", "publishing"])
def test_a_turn_that_does_not_end_shows(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """A hung rank, device or socket raises nothing; only the turn's duration reveals it (cluster/control/actors.py)."""
    loader, sending = Loader(), threading.Event()
    with served(folder, tmp_path, load_runner=loader) as running:
        server, client = running.server, running.client()
        before = step_s_until(server, lambda value: value == 0)
        gate = loader.runner.gate
        if place == "sending":
            gate, send = sending, server._requests.send
            monkeypatch.setattr(
                server._requests, "send", lambda *message: (sending.wait(PATIENCE_S), send(*message))[1]
            )
        elif place == "publishing":
            gate, send_batches = sending, server._publisher._send_batches
            monkeypatch.setattr(
                server._publisher, "_send_batches", lambda sockets: sending.wait(PATIENCE_S) and send_batches(sockets)
            )
        gate.clear()
        client.ask(1, [5, 6, 7])
        during = step_s_until(server, lambda value: value > 0.1)
        gate.set()
        client.wait(1)

        assert before == 0
        assert during > 0.1
        assert len(client.tokens(1)) == 4


@pytest.mark.parametrize("aborted", [False, True])
def test_steps_that_can_run_nothing_show_like_one_that_does_not_end(replica: Served, aborted: bool) -> None:
    """Whatever the reason, the replica must be rebuilt, and its requests moved."""
    client, server = replica.client(), replica.server
    taken = server._ask(lambda: server._cache.allocate(server._cache.free_blocks))
    assert taken is not None
    client.ask(1, [5, 6, 7])
    deadline = time.monotonic() + PATIENCE_S
    during = step_s_until(server, lambda value: value >= 0.1)
    if aborted:
        client.abort(1)
        while not server.idle() and time.monotonic() < deadline:
            time.sleep(0.005)
    server._ask(lambda: server._cache.release(taken))
    if not aborted:
        client.wait(1)

    assert during >= 0.1
    assert server.idle()
    assert step_s_until(server, lambda value: value == 0) == 0


def test_ports_of_the_system_serve_where_no_folder_is_given(folder: Path) -> None:
    """Routers on other nodes connect by TCP."""
    with served(folder, None) as running:
        client = running.client()
        client.ask(1, [5, 6, 7])
        client.wait(1)

        assert running.description.request_endpoint.startswith("tcp://127.0.0.1:")
        assert len(client.tokens(1)) == 4


def test_settings_that_cannot_work_are_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    """The error names the setting, and nothing is left behind."""
    settings = ReplicaSettings(dtype="float32", device="cpu", cpu_threads=1, max_model_len=100_000)
    kvcache = KvCacheSettings(num_kv_blocks=9)

    with pytest.raises(StartupError, match="max_model_len"):
        start_replica(
            settings, kvcache, EventsSettings(), model_dir=folder, replica_id="r0", cluster_seed=SEED, ipc_dir=tmp_path
        )

    assert not list(tmp_path.iterdir())
