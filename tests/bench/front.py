"""Measure what the router costs: requests per second, CPU, time to first token and memory of a whole router process.

    python tests/bench/front.py [--rounds N] [--peers FOLDER] [--out FILE] [--scale X]
    python tests/bench/front.py --routers 1,2,4

The router process runs what `homing serve` runs (service, policy, index, transport, HTTP server) over two fast fake
replicas in a second process; a third sends raw HTTP over kept-alive connections. `--peers FOLDER` is a virtual
environment with `smg`, `sglang-router` or `vllm-router`: each runs over two fast fake OpenAI servers under the same
load, alternating with ours. CPU is the router process's (user and system). Peers do not tokenize; ours is measured with
its tokenizer and without (prompts as token ids, or a stand-in that makes four bytes of text a token id). Texts never
repeat, except the shared documents of the 16 KB load. The time to the first token after a long prompt is also printed
over that of a fake replica alone, which is sent the same number of token ids with their hashes.

`--routers` measures several router processes on one port, with 32 paced streams per router: CPU per chunk and per plain
request, over all routers together.
"""

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from statistics import median
from urllib.request import urlopen

import msgspec
import psutil
import uvloop
import zmq

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench.front_client import Load, Result
from tests.bench.front_workers import PACED_TOKENS

HERE = Path(__file__).parent
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ANSWER = 16
STREAMS = 128
#: Per router, when several are measured.
STREAMS_OF_ROUTER = 32
PEERS = ("smg", "sglang-router", "vllm-router")
#: Between two requests of a load that measures the TTFT: the replica's events of the one are over before the other.
PAUSE_S = 0.01
#: Replaced by another number in every request, so that texts differ from its place on.
UNIQUE = "#######"
LONG_TOKENS = 32_000
_numbers = count()


def chat(text: str, tokens: int, *, stream: bool = False) -> bytes:
    """A chat request with one message."""
    body = {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": tokens, "ignore_eos": True}
    return json.dumps(body | ({"stream": True} if stream else {})).encode()


def completion(prompt: str | list[int], tokens: int) -> bytes:
    """A completion request."""
    return json.dumps({"model": "demo", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}).encode()


def long_texts() -> list[str]:
    """64 prompts of 16 KB: one of eight shared documents of 12 KB, then a unique tail."""
    rng, words = Random(3), ["fox", "river", "house", "story", "morning", "quiet", "letter", "garden"]
    documents = [" ".join(rng.choice(words) for _ in range(2400))[:12_000] for _ in range(8)]
    return [
        f"{rng.choice(documents)} {n} " + " ".join(rng.choice(words) for _ in range(900))[:4_100] for n in range(64)
    ]


def long_ids() -> list[list[int]]:
    """64 prompts of token ids, as long in bytes as those of `long_texts`."""
    rng = Random(3)
    documents = [[rng.randrange(300, 3000) for _ in range(2000)] for _ in range(8)]
    return [rng.choice(documents) + [rng.randrange(300, 3000) for _ in range(700)] for _ in range(64)]


def english(characters: int, count: int) -> list[str]:
    """Texts of words that are one token each in the demo model's vocabulary; no two texts are alike."""
    layout = json.loads((HERE.parents[1] / "replica" / "demo" / "model" / "tokenizer.json").read_text())
    words = [each[1:] for each in layout["model"]["vocab"] if each.startswith("Ġ") and each[1:].isalpha()]
    rng = Random(5)
    return [" ".join(rng.choices(words, k=characters // 4))[:characters] for _ in range(count)]


def loads(scale: float, *, ids: bool) -> dict[str, Load]:
    """The loads by name. With `ids`, prompts are sent as token ids, and the loads are those that suit them."""
    small = f"Tell me a story about a fox, number {UNIQUE}."
    if ids:
        rng = Random(4)
        plain = Load(
            path=COMPLETIONS,
            bodies=[completion([rng.randrange(300, 3000) for _ in range(14)], ANSWER) for _ in range(64)],
            connections=32,
            requests=int(10_000 * scale),
        )
        long = [completion(each, ANSWER) for each in long_ids()]
        return {
            "plain": plain,
            "16 KB": Load(path=COMPLETIONS, bodies=long, connections=32, requests=int(3_000 * scale)),
            "alone, 128": alone([rng.randrange(300, 3000) for _ in range(128)], int(600 * scale)),
            "alone, 32000": alone([rng.randrange(300, 3000) for _ in range(LONG_TOKENS)], int(200 * scale)),
        }
    return {
        "plain": Load(
            path=CHAT,
            bodies=[chat(small, ANSWER)] * int(10_000 * scale),
            connections=32,
            requests=int(10_000 * scale),
        ),
        "16 KB": Load(
            path=CHAT, bodies=[chat(text, ANSWER) for text in long_texts()], connections=32, requests=int(3_000 * scale)
        ),
        "unique 16 KB": Load(
            path=CHAT,
            bodies=[chat(UNIQUE + text, ANSWER) for text in english(16_384, int(2_000 * scale))],
            connections=32,
            requests=int(2_000 * scale),
        ),
        # `LONG_TOKENS` of the demo model.
        "alone, long": Load(
            path=CHAT,
            bodies=[chat(UNIQUE + text, ANSWER, stream=True) for text in english(190_000, int(200 * scale))],
            connections=1,
            requests=int(200 * scale),
            stream=True,
            pause_s=PAUSE_S,
        ),
        "paced": Load(
            path=CHAT,
            bodies=[chat(small, PACED_TOKENS, stream=True)] * int(STREAMS * 3 * scale),
            connections=STREAMS,
            requests=int(STREAMS * 3 * scale),
            stream=True,
            stagger_s=1.0,
        ),
    }


def shared_loads(texts: dict[str, Load], routers: int) -> dict[str, Load]:
    """The plain and paced loads for several routers, scaled so that each router gets the same load at any count."""
    change, plain, paced = msgspec.structs.replace, texts["plain"], texts["paced"]
    streams = STREAMS_OF_ROUTER * routers
    requests = paced.requests * streams // STREAMS
    return {
        "plain": change(plain, connections=streams),
        "paced": change(paced, bodies=paced.bodies[:1] * requests, connections=streams, requests=requests),
    }


def alone(prompt: list[int], requests: int) -> Load:
    """One stream at a time, with prompts that differ in the last token: measures what the router adds to the TTFT."""
    bodies = [
        json.dumps({"model": "demo", "prompt": [*prompt[:-1], last], "max_tokens": ANSWER, "stream": True}).encode()
        for last in range(300, 308)
    ]
    return Load(path=COMPLETIONS, bodies=bodies, connections=1, requests=requests, stream=True, pause_s=PAUSE_S)


@dataclass
class Row:
    """One router's figures for one load."""

    rates: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)  #: per request, or per chunk of a paced stream
    #: TTFT of streams, otherwise the time to the whole answer
    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)


@dataclass
class Subject:
    """A router under test."""

    name: str
    port: int
    processes: list[psutil.Process]
    loads: dict[str, Load]
    replicas: Path | None = None  #: file with the descriptions of its fake replicas
    rows: dict[str, Row] = field(default_factory=dict)
    memory_mb: float = 0.0


def family(subject: Subject) -> list[psutil.Process]:
    """A router's processes and all their descendants."""
    return [each for process in subject.processes for each in (process, *process.children(recursive=True))]


def cpu_s(subject: Subject) -> float:
    """CPU seconds that a router has used so far."""
    return sum(each.cpu_times().user + each.cpu_times().system for each in family(subject))


def free_port() -> int:
    """A port that was free when this returned."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def started(*command: str | Path, quiet: bool = True, folder: Path | None = None) -> Iterator[psutil.Process]:
    """Run a process for the duration of the block."""
    output = subprocess.DEVNULL if quiet else None
    process = subprocess.Popen([*map(str, command)], stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=folder)
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(url: str, seconds: float = 60.0) -> None:
    """Wait until `url` answers with success. Raises OSError after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urlopen(url, timeout=2):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


# Ours


def router(port: int, descriptions: Path, text: str, name: str) -> None:
    """Run a router process as a router actor would. `name` identifies it to the replicas."""
    from homing.replica.messages import ReplicaDescription

    members = msgspec.msgpack.decode(descriptions.read_bytes(), type=list[ReplicaDescription])
    run = asyncio.run if os.environ.get("BENCH_LOOP") == "asyncio" else uvloop.run
    run(serve(port, members, text, name))


async def serve(port: int, members: Sequence[object], text: str, name: str) -> None:
    """Serve until killed."""
    from homing.kvcache.config import KvCacheSettings
    from homing.router.config import RouterSettings
    from homing.router.http.front import TextModels
    from homing.router.metrics import RouterMetrics
    from homing.router.replicas.service import RouterService
    from homing.router.server import RouterServer, settle
    from tests.router.fakes import BLOCK, SEED

    settings, metrics = RouterSettings(access_log=os.devnull), RouterMetrics()
    service = RouterService(settings, KvCacheSettings(block_size=BLOCK), router_id=name, observer=metrics.of("demo"))
    texts = None if text == "tokenizer" else TextModels(stand_in)
    server = RouterServer(settings, service, metrics=metrics, texts=texts)
    await server.start("127.0.0.1", port, shared=True)
    service.apply_membership(members, SEED)  # type: ignore[arg-type]
    await server.front.load_texts()
    settle()
    await asyncio.Event().wait()


def stand_in(folder: Path) -> object:
    """A text model that does not tokenize: every four bytes of text become one token id."""
    from array import array

    from homing.router.text.template import TemplateInput
    from homing.router.text.tokenizer import TextModel

    class StandIn(TextModel):
        """Encodes text as raw bytes; decodes as the model's own tokenizer does."""

        def ids(self, text: str) -> array:
            data = text.encode()
            return array("I", data[: len(data) & ~3] or b"fox ")

        async def encode_chat(self, chat: TemplateInput | Callable[[], TemplateInput], **options: object) -> array:
            messages = (chat if isinstance(chat, TemplateInput) else chat()).messages
            return self.ids("".join(message["content"] for message in messages))

        async def encode(self, texts: Sequence[str], **options: object) -> list[array]:
            return [self.ids(text) for text in texts]

    return StandIn.load(folder, cache_bytes=0)


def ours(stack: ExitStack, name: str, text: str, chosen: dict[str, Load], routers: int = 1) -> Subject:
    """Our router over two fast fake replicas, or several routers on one port."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    descriptions = folder / "replicas"
    stack.enter_context(started(sys.executable, HERE / "front_workers.py", "engine", descriptions, quiet=False))
    while not descriptions.exists() or not descriptions.stat().st_size:
        time.sleep(0.05)
    port = free_port()
    processes = []
    for index in range(routers):
        command = (sys.executable, __file__, "--router", str(port), str(descriptions), text, f"bench-{index}")
        processes.append(stack.enter_context(started(*command, quiet=False)))
    for process in processes:
        wait_until_listening(process, port)
    wait_for(f"http://127.0.0.1:{port}/ready")
    return Subject(name, port, processes, chosen, descriptions)


def wait_until_listening(process: psutil.Process, port: int, seconds: float = 60.0) -> None:
    """Wait until this process, one of several that share the port, is listening."""
    deadline = time.monotonic() + seconds
    while not any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in process.net_connections()):
        if time.monotonic() > deadline:
            raise SystemExit(f"router {process.pid} does not listen on port {port}")
        time.sleep(0.05)


# Peers


def peer_command(name: str, folder: Path, port: int, workers: Sequence[str]) -> list[str]:
    """The command that starts a peer over these workers."""
    python = str(folder / "bin" / "python")
    module = {
        "smg": "smg.cli",
        "sglang-router": "sglang_router.launch_router",
        "vllm-router": "vllm_router.launch_router",
    }
    command = [str(folder / "bin" / "smg"), "launch"] if name == "smg" else [python, "-m", module[name]]
    ports = ["--port", str(port), "--prometheus-port", str(free_port())]
    return [*command, "--host", "127.0.0.1", *ports, "--policy", "cache_aware", "--worker-urls", *workers]


def peer(stack: ExitStack, name: str, folder: Path, chosen: dict[str, Load]) -> Subject | None:
    """A peer over two fast fake OpenAI servers; None when it is not installed or does not start."""
    if not (folder / "bin" / name).exists():
        print(f"{name}: not installed in {folder}", file=sys.stderr)
        return None
    urls = []
    for _ in range(2):
        port = free_port()
        stack.enter_context(started(sys.executable, HERE / "front_workers.py", "openai", str(port), quiet=False))
        wait_for(f"http://127.0.0.1:{port}/health")
        urls.append(f"http://127.0.0.1:{port}")
    port = free_port()
    process = stack.enter_context(started(*peer_command(name, folder, port, urls)))
    try:
        wait_for(f"http://127.0.0.1:{port}/health")
    except OSError as error:
        print(f"{name}: does not start: {error}", file=sys.stderr)
        return None
    return Subject(name, port, [process], chosen)


# Measuring


def run_load(port: int, load: Load) -> Result:
    """Run the load from a separate process, with texts that were not sent before."""
    command = [sys.executable, str(HERE / "front_client.py"), str(port)]
    marks = UNIQUE.encode()
    bodies = [body.replace(marks, b"%07d" % next(_numbers)) if marks in body else body for body in load.bodies]
    load = msgspec.structs.replace(load, bodies=bodies)
    done = subprocess.run(command, input=msgspec.json.encode(load), stdout=subprocess.PIPE, check=True)
    return msgspec.json.decode(done.stdout, type=Result)


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile; NaN when there are no values."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else float("nan")


def measure(subject: Subject, kind: str) -> None:
    """Run one load once and add its figures. Exits when a request failed."""
    load, row = subject.loads[kind], subject.rows.setdefault(kind, Row())
    before = cpu_s(subject)
    result = run_load(subject.port, load)
    spent = cpu_s(subject) - before
    if result.failed or not result.requests:
        raise SystemExit(f"{subject.name}: {result.failed} of {result.requests} requests failed")
    row.rates.append(result.requests / result.seconds)
    row.cpu_us.append(spent / (result.chunks if load.stream else result.requests) * 1e6)
    times = result.ttft_s if load.stream else result.latency_s
    row.p50_ms.append(percentile(times, 0.5) * 1e3)
    row.p99_ms.append(percentile(times, 0.99) * 1e3)
    memory = sum(each.memory_info().rss for each in family(subject))
    subject.memory_mb = max(subject.memory_mb, memory / 1e6)


def replica_alone(descriptions: Path, requests: int) -> float:
    """Milliseconds to the first token of a fake replica that gets `LONG_TOKENS` ids and their hashes directly."""
    from homing.kvcache.hashing import HASH_BYTES, TOKEN_BYTES
    from homing.replica.messages import Generate, ReplicaDescription, SamplingParams
    from tests.router.fakes import BLOCK, ROOT

    members = msgspec.msgpack.decode(descriptions.read_bytes(), type=list[ReplicaDescription])
    times = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as sender:
        sender.linger, sender.identity = 0, b"alone"
        sender.connect(members[0].request_endpoint)
        for request_id in range(requests + 1):  # the first one connects
            message = Generate(
                request_id=request_id,
                token_ids=os.urandom(LONG_TOKENS * TOKEN_BYTES),
                prompt_tokens=LONG_TOKENS,
                root=ROOT,
                block_hashes=os.urandom(LONG_TOKENS // BLOCK * HASH_BYTES),
                sampling=SamplingParams(max_tokens=ANSWER),
            )
            payload = msgspec.msgpack.encode(message)
            began = time.perf_counter()
            sender.send(payload)
            sender.recv()
            times.append(time.perf_counter() - began)
            time.sleep(PAUSE_S)
    return median(times[1:]) * 1e3


def warm_up(subject: Subject) -> None:
    """Open connections, fill caches and exercise the code paths before measuring."""
    for load in subject.loads.values():
        run_load(subject.port, msgspec.structs.replace(load, requests=load.connections, stagger_s=0.0))


def report(subjects: Sequence[Subject]) -> list[dict[str, object]]:
    """One row per router and load, for the table and the JSON file."""
    rows: list[dict[str, object]] = []
    for subject in subjects:
        for kind, row in subject.rows.items():
            rows.append(
                {
                    "router": subject.name,
                    "load": kind,
                    "requests_per_s": round(max(row.rates)),
                    "cpu_us": round(median(row.cpu_us), 1),
                    "p50_ms": round(median(row.p50_ms), 2),
                    "p99_ms": round(median(row.p99_ms), 2),
                    "memory_mb": round(subject.memory_mb),
                }
            )
    return rows


def print_table(rows: Sequence[dict[str, object]]) -> None:
    """CPU is per request, or per chunk of paced streams; p99 is TTFT for streams, otherwise the whole answer's."""
    print(f"{'router':28} {'load':14} {'req/s':>8} {'us CPU':>8} {'p50 ms':>8} {'p99 ms':>8} {'MB':>6}")
    for row in sorted(rows, key=lambda each: str(each["load"])):
        figures = (
            f"{row['requests_per_s']:8} {row['cpu_us']:8} {row['p50_ms']:8} {row['p99_ms']:8} {row['memory_mb']:6}"
        )
        print(f"{row['router']:28} {row['load']:14} {figures}")


def print_overheads(rows: Sequence[dict[str, object]], alone_ms: float) -> None:
    """What our routers add to the replica's own time to the first token after a long prompt."""
    print(f"TTFT of {LONG_TOKENS} ids without a router, median: {alone_ms:.2f} ms")
    for row in rows:
        if row["load"] in ("alone, long", "alone, 32000") and str(row["router"]).startswith("homing"):
            print(f"{row['router']:28} adds {float(str(row['p50_ms'])) - alone_ms:.2f} ms")


def start_all(
    stack: ExitStack, options: argparse.Namespace, texts: dict[str, Load], ids: dict[str, Load]
) -> list[Subject]:
    """Start the selected routers, each over its own workers."""
    if options.routers:
        counts = [int(each) for each in options.routers.split(",")]
        return [ours(stack, f"homing, {n} routers", "tokenizer", shared_loads(texts, n), n) for n in counts]
    kinds = [
        ("homing, token ids", "tokenizer", ids),
        ("homing, no tokenizer", "none", texts),
        ("homing", "tokenizer", texts),
    ]
    subjects = [ours(stack, name, text, chosen) for name, text, chosen in kinds if options.only in name]
    names = [name for name in PEERS if options.peers and options.only in name]
    return subjects + [each for name in names if (each := peer(stack, name, options.peers, texts)) is not None]


def main() -> None:
    """Start everything, run the loads in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--router", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on each load's number of requests")
    parser.add_argument("--peers", type=Path, help="virtual environment with the peers")
    parser.add_argument("--only", default="", help="measure only routers whose name contains this")
    parser.add_argument("--routers", default="", metavar="N,N", help="measure these numbers of routers on one port")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.router:
        port, descriptions, text, name = options.router
        router(int(port), Path(descriptions), text, name)
        return
    texts, ids = loads(options.scale, ids=False), loads(options.scale, ids=True)
    with ExitStack() as stack:
        subjects = start_all(stack, options, texts, ids)
        for subject in subjects:
            warm_up(subject)
        for _ in range(options.rounds):
            for kind in texts | ids:
                for subject in subjects:
                    if kind in subject.loads:
                        measure(subject, kind)
        alone = [replica_alone(each.replicas, 50) for each in subjects if each.replicas is not None]
    rows = report(subjects)
    print_table(rows)
    if alone:
        print_overheads(rows, median(alone))
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
