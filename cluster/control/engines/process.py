"""vLLM or SGLang as a replica: the replica's actor starts, examines, watches and stops it on its node.

`EngineProcess` handles the process and its output; `EngineServer` is what the actor runs in place of our own engine.
Requests do not pass through here: routers talk to the engine directly, as to any other (router/replicas/external). A
reaper between actor and engine (reaper.py) kills all of the engine's processes, whatever happens to the actor.
command.py builds the engine's command line.
"""

import asyncio
import http.client
import logging
import os
import re
import secrets
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path

import msgspec
import zmq

from ....events.errors import EventError
from ....events.wire.cache_events import Stored
from ....events.wire.dialects import BatchDecoder
from ....events.wire.frames import read_replay, replay_request
from ....kvcache.hashing import BlockHash, BlockHasher, tenant_root, token_bytes, wire_hash
from ....replica.load.cpu_threads import usable_cores
from ....replica.messages import ReplicaDescription
from ....replica.progress import report
from ....replica.rank_server import RankServer
from ....router.replicas.external.addresses import ReplicaAddress, describe, external_root
from ....router.replicas.external.block_keys import ExternalBlocks
from ....router.replicas.external.http_client import Address, Client, EngineUnreachableError
from ....router.replicas.external.load import EngineMetrics
from ....router.replicas.external.probe import CANARY, Card, EngineRequirements, probe, read_cards
from ....router.replicas.external.wire import error_message
from ....router.replicas.membership import own_parity, text_digests
from ....router.text.export import load_parts
from ...config import Settings
from ...errors import EngineLost, StartFailed
from ...model_source import model_limits, text_folder
from ..control_messages import HEALTH_INTERVAL_S, RankSpec
from .command import EnginePlace, EventAddresses, command, environment

log = logging.getLogger(__name__)

REAPER = Path(__file__).with_name("reaper.py")
#: Time for an engine to exit when asked; then it is killed.
STOP_GRACE_S = 3.0
#: Time for all killed processes to exit, which is used up only if one is stuck in the kernel.
END_S = 10.0
#: Share of `start_timeout_s`: fail before the controller does, which cannot report the engine's last output.
START_SHARE = 0.9
#: Long, because the first request may compile kernels. Not tuned.
CANARY_TIMEOUT_S = 120.0
EVENTS_TIMEOUT_S = 10.0
#: The same limit as for our event subscribers.
MAX_FRAME_BYTES = 256 * 1024 * 1024
HEALTH_TIMEOUT_S = 5.0
POLL_S = 0.2
LINES_KEPT = 200
LINE_BYTES = 16 * 1024


def error_summary(lines: Sequence[str]) -> str:
    """The first error that an engine wrote and its last lines, joined to one line for a user."""
    written = [line.strip()[:300] for line in lines if line.strip()]
    relevant = [line for line in written if not re.search(r"\b(DEBUG|INFO|WARNING)\b", line)] or written
    errors = [line for line in relevant if re.search(r"\b\w*(Error|Exception): ", line)]
    return " | ".join(dict.fromkeys(errors[:1] + relevant[-3:])) or "it wrote nothing"


class EngineProcess:
    """A running engine with its reaper. `ended` is set when none of its processes is left."""

    def __init__(self, words: Sequence[str], environ: Mapping[str, str], name: str) -> None:
        reaper = [sys.executable, "-I", str(REAPER), str(STOP_GRACE_S), *words]
        self._reaper = subprocess.Popen(
            reaper,
            env=dict(environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._name = name
        self._closing = threading.Lock()
        self.lines: deque[str] = deque(maxlen=LINES_KEPT)
        self.ended = threading.Event()
        threading.Thread(target=self._read, name="engine output", daemon=True).start()

    def end(self, *, ask: bool) -> None:
        """Start to end the engine; `ask`: let it clean up first. Harmless when repeated."""
        with self._closing:
            assert self._reaper.stdin is not None
            if self._reaper.stdin.closed:
                return
            try:
                self._reaper.stdin.write(b"." if ask else b"")
                self._reaper.stdin.close()
            except BrokenPipeError:
                pass  # the reaper has exited

    def _read(self) -> None:
        assert self._reaper.stdout is not None
        with self._reaper.stdout as output:
            for line in iter(lambda: output.readline(LINE_BYTES), b""):
                # Keep only the final state of a progress bar, which overwrites its line.
                text = line.decode(errors="replace").rstrip().rpartition("\r")[2]
                self.lines.append(text)
                log.info("%s: %s", self._name, text)
        self._reaper.wait()
        self.end(ask=False)
        self.ended.set()


class EngineServer(RankServer):
    """One engine that is ready to serve. Keeps the default `drain` and `idle`: only routers know its requests."""

    def __init__(self, process: EngineProcess, description: ReplicaDescription, settings: Settings) -> None:
        self.description: ReplicaDescription = description
        self._process = process
        self._kind = settings.replica.engine
        self.interval_s = HEALTH_INTERVAL_S
        self._timeout_s = settings.cluster.health_timeout_s
        self._stopping = False

    def run(self) -> None:
        """Watch the engine until it exits. Raises EngineLost unless it was stopped."""
        healthy_at = time.monotonic()
        try:
            while not self._process.ended.wait(self.interval_s):
                problem = self._health_problem()
                if not problem:
                    healthy_at = time.monotonic()
                elif time.monotonic() - healthy_at > self._timeout_s:
                    raise EngineLost(f"{self._kind} has been unhealthy for {self._timeout_s:g} s: {problem}")
        finally:
            self._process.end(ask=False)
            self._process.ended.wait(END_S)
        if not self._stopping:
            raise EngineLost(f"{self._kind} has exited: {error_summary(self._process.lines)}")

    def stop(self) -> None:
        self._stopping = True
        self._process.end(ask=True)

    def _health_problem(self) -> str:
        if not _answers_health(self.description.request_endpoint, min(HEALTH_TIMEOUT_S, self._timeout_s)):
            return "/health does not return 200"
        if replay := self.description.event_endpoints.replay:
            try:
                read_replay_payloads(replay, (1 << 64) - 2)  # no batch has this number: only the end marker comes
            except (zmq.ZMQError, EventError):
                return f"no answer from its event publisher at {replay}"
        return ""


def start_engine(spec: RankSpec, model_dir: Path, folder: Path | None, node: str) -> EngineServer:
    """Start an engine on this node and examine it. `folder`: folder for its sockets; None: TCP.

    Raises StartFailed, ParityMismatch, ModelUnavailable, SettingsError or TokenizerUnavailable, leaving nothing behind.
    """
    settings, host = spec.model.settings, spec.model.host or node
    place, ends = _find_place(spec, model_dir, folder, host)
    words = command(place)
    log.info("engine_starts replica=%s command=%s", spec.replica_id, shlex.join(words))
    report(f"starting {settings.replica.engine}")
    process = EngineProcess(words, environment(place, os.environ), settings.replica.engine)
    url = f"http://{f'[{host}]' if ':' in host else host}:{place.port}"
    try:
        description = _check_engine(process, ReplicaAddress(spec.replica_id, Address.of(url), *ends), spec, model_dir)
    except BaseException:
        process.end(ask=False)
        process.ended.wait(END_S)
        raise
    return EngineServer(process, description, settings)


def _find_place(spec: RankSpec, model_dir: Path, folder: Path | None, host: str) -> tuple[EnginePlace, EventAddresses]:
    """The place where the engine will run, and the addresses at which routers reach its events."""
    settings = spec.model.settings
    port, *event_ports = _free_ports(host, 3)
    binds = ends = EventAddresses()
    if settings.events.publish_events:
        binds, ends = _event_addresses(folder, host, event_ports)
    sharing = max(1, settings.cluster.replicas) if spec.model.run_dir else 1
    cores = settings.replica.cpu_threads or max(1, usable_cores() // sharing)
    return EnginePlace(settings, model_dir, host, port, binds, cores), ends


def _check_engine(
    process: EngineProcess, engine: ReplicaAddress, spec: RankSpec, model_dir: Path
) -> ReplicaDescription:
    """Wait until the engine is ready and check it; returns its description as a replica."""
    settings = spec.model.settings
    replica, cache, texts = settings.replica, settings.kvcache, text_folder(settings.replica, model_dir)
    limits = model_limits(model_dir, replica, spec.model.name)
    _until_ready(process, engine, settings)
    canary, root = _canary_ids(texts), BlockHash(external_root(limits.name))
    # Two full blocks and one token, or fewer if the context is shorter.
    prompt = list(islice(cycle(canary), min(2 * cache.block_size + 1, limits.max_model_len - 1)))
    card, metrics = asyncio.run(_probe_engine(engine, settings, canary, prompt))
    if engine.replay and cache.prefix_caching:
        _check_blocks(engine, BlockHasher(cache.block_size, spec.model.seed, cache.hash_algorithm), root, prompt)
    limits = msgspec.structs.replace(limits, max_model_len=card.max_model_len or limits.max_model_len)
    parity = own_parity(text_digests(texts), cache, spec.model.seed, root)
    described = describe(engine, parity, limits, max_running_requests=replica.max_running_requests)
    return msgspec.structs.replace(
        described,
        epoch=secrets.randbits(63),
        num_blocks=metrics.num_blocks or described.num_blocks,
        max_batched_tokens=replica.max_batched_tokens,
        tensor_parallel_size=replica.tensor_parallel_size,
    )


def _free_ports(host: str, count: int) -> list[int]:
    """Find free ports. If one is taken before the engine binds it, the engine exits and is restarted with others."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    probes = [socket.socket(family) for _ in range(count)]
    try:
        for each in probes:
            each.bind((host, 0))
        return [each.getsockname()[1] for each in probes]
    finally:
        for each in probes:
            each.close()


def _event_addresses(folder: Path | None, host: str, ports: Sequence[int]) -> tuple[EventAddresses, EventAddresses]:
    """The addresses that the engine binds for events and replay, and those at which routers reach them."""
    if folder is not None:
        local = EventAddresses(f"ipc://{folder}/events", f"ipc://{folder}/replay")
        return local, local
    # Engines bind only TCP addresses with *; they connect to others.
    binds, ends = ([f"tcp://{name}:{port}" for port in ports] for name in ("*", host))
    return EventAddresses(*binds), EventAddresses(*ends)


def _until_ready(process: EngineProcess, engine: ReplicaAddress, settings: Settings) -> None:
    kind, limit_s = settings.replica.engine, settings.cluster.start_timeout_s * START_SHARE
    deadline = time.monotonic() + limit_s
    while not _answers_health(engine.address.url):
        if process.ended.wait(POLL_S):
            raise StartFailed(f"{kind} exited during startup: {error_summary(process.lines)}")
        if time.monotonic() > deadline:
            raise StartFailed(f"{kind} is not ready after {limit_s:g} s: {error_summary(process.lines)}")


def _answers_health(url: str, timeout_s: float = HEALTH_TIMEOUT_S) -> bool:
    address = Address.of(url)
    connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


# Checks beyond a router's parity check: whether the engine's tokens and blocks are those that our hashes assume.


def _canary_ids(folder: Path) -> tuple[int, ...]:
    from tokenizers import Tokenizer  # imported here because it is slow

    return tuple(Tokenizer.from_str(load_parts(folder).tokenizer).encode(CANARY, add_special_tokens=False).ids)


async def _probe_engine(
    engine: ReplicaAddress, settings: Settings, canary: tuple[int, ...], prompt: Sequence[int]
) -> tuple[Card, EngineMetrics]:
    """Compare model, tokenizer and block size; have it compute the prompt. Raises StartFailed and ParityMismatch."""
    client = Client(engine.address, loop=asyncio.get_running_loop())
    requirements = EngineRequirements(
        model_names=(settings.served_name,),
        max_model_len=settings.replica.max_model_len,
        block_size=settings.kvcache.block_size,
        canary_ids=canary,
        max_running_requests=settings.replica.max_running_requests,
    )
    kind = settings.replica.engine
    asked = {"model": settings.served_name, "prompt": prompt, "max_tokens": 1, "temperature": 0, "seed": 0}
    try:
        name, _, metrics = await probe(client, engine.replica_id, requirements)
        cards = await read_cards(client)
        body = msgspec.json.encode(asked)
        answer = await client.ask("POST", "/v1/completions", body, timeout_s=CANARY_TIMEOUT_S)
    except EngineUnreachableError as error:
        raise StartFailed(f"{kind} does not answer a canary prompt: {error}") from error
    if answer.status != 200:
        raise StartFailed(f"{kind} returned {answer.status} for a canary prompt: {error_message(answer.body)}")
    return next((card for card in cards or () if card.id == name), Card(name)), metrics


def _check_blocks(engine: ReplicaAddress, hasher: BlockHasher, root: BlockHash, prompt: Sequence[int]) -> None:
    """Check that the engine's events announce the prompt's blocks. Raises StartFailed and ParityMismatch."""
    wanted = {wire_hash(each) for each in hasher.chain(tenant_root(root), token_bytes(prompt))}
    deadline = time.monotonic() + EVENTS_TIMEOUT_S
    while True:
        blocks, decoder, held = ExternalBlocks(engine.replica_id, hasher, root), BatchDecoder(token_ids=True), set()
        try:
            for payload in read_replay_payloads(engine.replay, 0):
                for event in decoder.decode(payload).events:
                    if isinstance(event, Stored):
                        held |= {*blocks.stored(event)}
        except (zmq.ZMQError, EventError) as error:
            raise StartFailed(f"the event publisher at {engine.replay} does not answer: {error}") from error
        if wanted <= held:
            return
        if time.monotonic() > deadline:
            raise StartFailed(
                f"the events at {engine.events} announce {len(wanted & held)} of the {len(wanted)} blocks of a canary "
                f"prompt (not understood: {dict(blocks.unplaced) or 'none'})"
            )
        time.sleep(POLL_S)


def read_replay_payloads(endpoint: str, since: int) -> list[bytes]:
    """The payloads of all event batches from number `since` on. Raises zmq.ZMQError and EventError."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.linger = 0
        sock.maxmsgsize = MAX_FRAME_BYTES
        sock.rcvtimeo = int(EVENTS_TIMEOUT_S * 1000)
        sock.connect(endpoint)
        sock.send_multipart(replay_request(since))
        payloads: list[bytes] = []
        while (frame := read_replay(sock.recv_multipart())) is not None:
            payloads.append(frame.payload)
        return payloads
