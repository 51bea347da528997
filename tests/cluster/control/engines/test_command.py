"""The command line of each kind of external engine, and settings that it cannot have."""

import json
from pathlib import Path

import pytest

from homing.cluster.config import Settings, load_settings
from homing.cluster.control.engines.command import EnginePlace, EventAddresses, command, environment, for_engine
from homing.cluster.errors import SettingsError

MODEL = Path("/models/fox")
EVENTS = EventAddresses("ipc:///s/events", "ipc:///s/replay")


def place(**flags: str) -> EnginePlace:
    """An engine of this model with these settings, next to its sockets."""
    given = {"engine": "vllm", "served_model_name": "fox", "max_running_requests": "8", "max_batched_tokens": "512"}
    settings = for_engine(load_settings(given | flags, {}))
    return EnginePlace(settings, MODEL, "10.0.0.1", 4000, EVENTS, cpu_threads=2)


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_vllm_gets_the_settings_in_its_own_words() -> None:
    """We assign the addresses; events report what is cached, and usage what was hit."""
    words = command(place(engine_python="/env/bin/python", engine_args="--enforce-eager --seed 3", gpus_per_rank="1"))

    assert words[:5] == ["/env/bin/python", "-m", "vllm.entrypoints.cli.main", "serve", "/models/fox"]
    assert words[-3:] == ["--enforce-eager", "--seed", "3"]
    flags = ("--served-model-name", "--host", "--port", "--block-size", "--max-num-seqs", "--gpu-memory-utilization")
    assert [value(words, flag) for flag in flags] == ["fox", "10.0.0.1", "4000", "16", "8", "0.9"]
    assert {"--enable-prefix-caching", "--enable-prompt-tokens-details"} <= {*words}
    assert json.loads(value(words, "--kv-events-config")) == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "ipc:///s/events",
        "replay_endpoint": "ipc:///s/replay",
        "buffer_steps": 10_000,
    }


def test_sglang_gets_the_settings_in_its_own_words() -> None:
    """Its events need no separate switch."""
    words = command(place(engine="sglang", max_model_len="2048", tensor_parallel_size="2", prefix_caching="false"))

    assert words[1:5] == ["-m", "sglang.launch_server", "--model-path", "/models/fox"]
    flags = ("--page-size", "--tp-size", "--context-length", "--device")
    assert [value(words, flag) for flag in flags] == ["16", "2", "2048", "cpu"]
    assert "--disable-radix-cache" in words
    assert json.loads(value(words, "--kv-events-config"))["endpoint"] == "ipc:///s/events"


def test_vllm_shares_a_gpu_and_its_ranks_use_several() -> None:
    """A replica that reserves half of a GPU takes half of its memory."""
    half = command(place(gpus_per_rank="0.5"))
    four = command(place(gpus_per_rank="1", tensor_parallel_size="4"))

    assert value(half, "--gpu-memory-utilization") == "0.45"
    assert (value(four, "--tensor-parallel-size"), value(four, "--distributed-executor-backend")) == ("4", "mp")


def test_on_a_cpu_vllm_gets_memory_threads_and_blocks_that_it_takes() -> None:
    """Its CPU attention needs multiples of 32, and its default memory would be half of the machine."""
    there = place(block_size="40")
    words, environ = command(there), environment(there, {})

    assert (value(words, "--block-size"), value(words, "--kv-cache-memory-bytes")) == ("64", str(512 * 1024**2))
    assert (environ["OMP_NUM_THREADS"], environ["VLLM_CPU_OMP_THREADS_BIND"]) == ("2", "nobind")
    assert environ["SGLANG_USE_CPU_ENGINE"] == "1"


def test_an_engine_inherits_gpus_and_nothing_of_ray_or_homing() -> None:
    """Another environment must not import our packages, and vLLM must not join the surrounding Ray."""
    actor = {"CUDA_VISIBLE_DEVICES": "3", "HF_HOME": "/m", "OMP_NUM_THREADS": "1"}
    foreign = {"RAY_ADDRESS": "a", "HOMING_API_KEY": "secret", "PYTHONPATH": "/x"}

    environ = environment(place(gpus_per_rank="1"), actor | foreign)

    assert environ == {"CUDA_VISIBLE_DEVICES": "3", "HF_HOME": "/m", "VLLM_NO_USAGE_STATS": "1"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"engine_args": "--port 80"}, "engine_args: --port cannot be given: homing assigns it"),
        ({"engine_args": "--max_num_seqs=3"}, "--max-num-seqs cannot be given: use --max-running-requests"),
        ({"engine_args": "--x 'y"}, "engine_args: .* cannot be split into words: No closing quotation"),
        ({"engine": "homing", "engine_args": "--x"}, "homing's own engine takes no engine_python or engine_args"),
        ({"quantization": "int8"}, "quantization: only homing's own engine has it; unset it for engine vllm"),
        ({"events_curve_keys": "keys"}, "events_curve_keys: vllm cannot encrypt"),
        ({"gpus_per_rank": "0.5", "tensor_parallel_size": "2"}, "gpus_per_rank: ranks of vllm cannot share a GPU"),
    ],
)
def test_settings_that_an_engine_cannot_have_are_refused_by_name(flags: dict[str, str], message: str) -> None:
    """Users would notice an ignored setting at the worst time."""
    with pytest.raises(SettingsError, match=message):
        place(**flags)


def test_our_own_engine_is_left_alone() -> None:
    """Any block size is allowed, also on a CPU."""
    settings = load_settings({"block_size": "40"}, {})

    assert for_engine(settings) == settings == Settings(kvcache=settings.kvcache)
