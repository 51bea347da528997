"""How to start each kind of external engine: settings in, command line and environment out. Pure.

`KINDS` has an entry for each kind. homing's settings are translated to flags; `engine_args` follow unchanged.
"""

import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from ...config import SETTINGS, Settings
from ...errors import SettingsError

#: KV memory on a CPU if it is not set; vLLM's own default is half of a NUMA node's memory.
CPU_KV_BYTES = 512 * 1024 * 1024

Flags = dict[str, str | float]  #: True: a switch; 0, False and empty: the flag is left out


class EventAddresses(NamedTuple):
    """ZeroMQ addresses; empty: the engine publishes no events."""

    events: str = ""
    replay: str = ""


@dataclass(slots=True, frozen=True)
class EnginePlace:
    """Where one engine runs, and the resources it gets."""

    settings: Settings
    model_dir: Path
    host: str
    port: int
    events: EventAddresses  #: addresses that the engine binds
    cpu_threads: int

    @property
    def name(self) -> str:
        return self.settings.served_name

    @property
    def on_cpu(self) -> bool:
        return self.settings.replica.device == "cpu" or not self.settings.cluster.gpus_per_rank

    @property
    def kv_bytes(self) -> int:
        return self.settings.kvcache.kv_cache_bytes or (CPU_KV_BYTES if self.on_cpu else 0)

    @property
    def memory_share(self) -> float:
        """Share of each GPU's memory that the engine may use; 0 on a CPU."""
        return (
            0.0
            if self.on_cpu
            else self.settings.kvcache.gpu_memory_utilization * min(1.0, self.settings.cluster.gpus_per_rank)
        )


def vllm_flags(place: EnginePlace) -> Flags:
    """Flags for vLLM 0.32."""
    replica, cache = place.settings.replica, place.settings.kvcache
    return {
        "--block-size": cache.block_size,
        "--tensor-parallel-size": replica.tensor_parallel_size,
        "--max-num-seqs": replica.max_running_requests,
        "--max-num-batched-tokens": replica.max_batched_tokens,
        "--enable-prefix-caching": cache.prefix_caching,
        "--no-enable-prefix-caching": not cache.prefix_caching,
        "--enable-prompt-tokens-details": True,
        "--disable-uvicorn-access-log": True,
        "--dtype": replica.dtype,
        "--kv-events-config": _events_config(place, enable_kv_cache_events=True),
        "--max-model-len": replica.max_model_len,
        "--tokenizer": replica.tokenizer,
        "--num-gpu-blocks-override": cache.num_kv_blocks,
        "--kv-cache-memory-bytes": place.kv_bytes,
        "--gpu-memory-utilization": place.memory_share,
        "--generation-config": "" if place.settings.router.generation_config else "vllm",
        "--distributed-executor-backend": "mp" if replica.tensor_parallel_size > 1 else "",
    }


def sglang_flags(place: EnginePlace) -> Flags:
    """Flags for SGLang 0.5.23."""
    replica, cache = place.settings.replica, place.settings.kvcache
    return {
        "--page-size": cache.block_size,
        "--tp-size": replica.tensor_parallel_size,
        "--max-running-requests": replica.max_running_requests,
        "--chunked-prefill-size": replica.max_batched_tokens,
        "--dtype": replica.dtype,
        "--enable-cache-report": True,
        "--enable-metrics": True,
        "--log-level-http": "warning",
        "--kv-events-config": _events_config(place),
        "--disable-radix-cache": not cache.prefix_caching,
        "--context-length": replica.max_model_len,
        "--tokenizer-path": replica.tokenizer,
        "--max-total-tokens": cache.num_kv_blocks * cache.block_size,
        "--device": "cpu" if place.on_cpu else "",
        "--mem-fraction-static": place.memory_share,
        "--sampling-defaults": "" if place.settings.router.generation_config else "openai",
    }


def _events_config(place: EnginePlace, **more: object) -> str:
    """The JSON value of `--kv-events-config`; empty: no events."""
    if not place.events.events:
        return ""
    ends = {"publisher": "zmq", "endpoint": place.events.events, "replay_endpoint": place.events.replay}
    batches = place.settings.events.replay_batches
    return msgspec.json.encode(more | ends | {"buffer_steps": batches}).decode()


@dataclass(slots=True, frozen=True)
class EngineKind:
    """How one kind of engine is started."""

    module: tuple[str, ...]  #: the words after `python -m`
    model_flag: tuple[str, ...]
    flags: Callable[[EnginePlace], Flags]
    environment: Mapping[str, str]
    cpu_block_multiple: int = 1  #: the block size on CPUs must be a multiple of this; ours is rounded up


KINDS = {
    "vllm": EngineKind(
        ("vllm.entrypoints.cli.main", "serve"),
        (),
        vllm_flags,
        {"VLLM_NO_USAGE_STATS": "1"},
        cpu_block_multiple=32,
    ),
    "sglang": EngineKind(("sglang.launch_server",), ("--model-path",), sglang_flags, {}),
}

#: Flags that `engine_args` must not contain, with the reason or what to use instead.
_ASSIGNED = {
    **dict.fromkeys(("--host", "--port", "--kv-events-config", "--enable-metrics"), "homing assigns it"),
    **dict.fromkeys(("--api-key", "--ssl-keyfile", "--ssl-certfile"), "only routers talk to the engine"),
    **dict.fromkeys(("--model", "--model-path"), "give the model to homing serve"),
    **dict.fromkeys(("--tokenizer", "--tokenizer-path"), "use --tokenizer"),
    **dict.fromkeys(("--block-size", "--page-size"), "use --block-size"),
    **dict.fromkeys(("--max-model-len", "--context-length"), "use --max-model-len"),
    **dict.fromkeys(("--max-num-seqs", "--max-running-requests"), "use --max-running-requests"),
    **dict.fromkeys(("--tensor-parallel-size", "--tp-size", "--tp", "-tp"), "use --tensor-parallel-size"),
    **dict.fromkeys(("--data-parallel-size", "--dp-size", "--dp", "-dp"), "use --replicas"),
    "--served-model-name": "use --served-model-name",
}


def extra_arguments(engine_args: str) -> list[str]:
    """Split `engine_args` into words. Raises SettingsError."""
    try:
        words = shlex.split(engine_args)
    except ValueError as error:
        raise SettingsError(f"engine_args: {engine_args!r} cannot be split into words: {error}") from error
    for word in words:
        flag = word.partition("=")[0].replace("_", "-")
        if flag in _ASSIGNED:
            raise SettingsError(f"engine_args: {flag} cannot be given: {_ASSIGNED[flag]}")
    return words


#: Settings that only our own engine has.
_OWN = (
    "kv_cache_dtype",
    "quantization",
    "model_provider",
    "attention_backend",
    "overlap_steps",
    *("hash_only", "events_preset", "events_port", "events_replay_port", "events_topic"),
)


def for_engine(settings: Settings) -> Settings:
    """The settings, adjusted for the engine. Raises SettingsError for those that do not fit it."""
    replica, cluster = settings.replica, settings.cluster
    if replica.engine == "homing":
        if given := replica.engine_python or replica.engine_args:
            raise SettingsError(
                f"engine: homing's own engine takes no engine_python or engine_args ({given}): unset them"
            )
        return settings
    extra_arguments(replica.engine_args)
    for name in _OWN:
        section = getattr(settings, SETTINGS[name].section)
        if getattr(section, name) != SETTINGS[name].default:
            raise SettingsError(f"{name}: only homing's own engine has it; unset it for engine {replica.engine}")
    if settings.events.events_curve_keys:
        raise SettingsError(f"events_curve_keys: {replica.engine} cannot encrypt its events")
    if cluster.gpus_per_rank < 1 < replica.tensor_parallel_size and cluster.gpus_per_rank:
        raise SettingsError(f"gpus_per_rank: ranks of {replica.engine} cannot share a GPU: set it to 1 or use 1 rank")
    multiple = 1 if cluster.gpus_per_rank else KINDS[replica.engine].cpu_block_multiple
    size = -(-settings.kvcache.block_size // multiple) * multiple
    return msgspec.structs.replace(settings, kvcache=msgspec.structs.replace(settings.kvcache, block_size=size))


def command(place: EnginePlace) -> list[str]:
    replica = place.settings.replica
    kind = KINDS[replica.engine]
    ours = {"--served-model-name": place.name, "--host": place.host, "--port": str(place.port)}
    words = [replica.engine_python or sys.executable, "-m", *kind.module, *kind.model_flag, str(place.model_dir)]
    for flag, value in (ours | kind.flags(place)).items():
        if value:
            words += [flag] if value is True else [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    return words + extra_arguments(replica.engine_args)


def environment(place: EnginePlace, environ: Mapping[str, str]) -> dict[str, str]:
    """The engine's environment: keeps the GPUs that Ray assigned to the actor, drops Ray's and our own variables."""
    kept = {name: value for name, value in environ.items() if not name.startswith(("RAY_", "HOMING_", "PYTHON"))}
    kept |= KINDS[place.settings.replica.engine].environment
    if place.on_cpu:
        # Otherwise engines on one machine would bind their threads to the same cores.
        kept |= {"OMP_NUM_THREADS": str(place.cpu_threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        kept |= {"SGLANG_USE_CPU_ENGINE": "1"}  # without it, SGLang looks for a GPU in spite of `--device cpu`
    else:
        kept.pop("OMP_NUM_THREADS", None)  # Ray sets it to the actor's number of CPUs, often 1
    return kept
