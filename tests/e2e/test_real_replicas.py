"""vLLM and SGLang themselves as the engine of replicas, on a CPU. Runs for each whose program is named:

    HOMING_TEST_VLLM=vllm/bin/vllm HOMING_TEST_SGLANG=.venv-sglang/bin/python pytest tests/e2e/test_real_replicas.py

test_real_engines.py explains how to make these environments. Two replicas take two to four minutes to start on two
cores.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from homing.replica.demo import demo_model_path

from ..replica.toys import save_checkpoint
from .engines import (
    BLOCK_SIZE,
    LONG,
    Load,
    cached_tokens,
    continued,
    engines,
    held_blocks,
    text_of,
    text_with_a_kill,
    zombies,
)
from .running import Serving, homing, serving, until

VLLM, SGLANG = os.environ.get("HOMING_TEST_VLLM", ""), os.environ.get("HOMING_TEST_SGLANG", "")
pytestmark = [pytest.mark.compat, pytest.mark.slow, pytest.mark.timeout(3600)]
PATIENCE_S = 1200.0


@dataclass(slots=True, frozen=True)
class Kind:
    """A kind of engine, and how its environment is used."""

    name: str
    python: Path | None
    program: str  #: a word of its command line
    args: str


KINDS = {
    "vllm": Kind(
        "vllm", Path(VLLM).absolute().with_name("python") if VLLM else None, "vllm.entrypoints", "--enforce-eager"
    ),
    "sglang": Kind(
        "sglang", Path(SGLANG).absolute() if SGLANG else None, "sglang.launch_server", "--disable-overlap-schedule"
    ),
}


def random_model(folder: Path) -> Path:
    """A small random Llama without tokenizer, of a shape that vLLM's attention on CPUs supports."""
    shape = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    return save_checkpoint(folder, "llama", vocab_size=4096, max_position_embeddings=2048, **shape)


@pytest.fixture(scope="module", params=["vllm demo", "vllm random", "sglang demo"])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serving, Kind]]:
    """Two replicas of the model on the engine."""
    engine, model = request.param.split()
    kind = KINDS[engine]
    if kind.python is None:
        pytest.skip(f"HOMING_TEST_{engine.upper()} names no program")
    path = "demo" if model == "demo" else str(random_model(tmp_path_factory.mktemp("random")))
    flags = ["--engine", kind.name, "--engine-python", str(kind.python), "--engine-args", kind.args]
    flags += ["--dtype", "float32", "--max-running-requests", "8", "--block-size", str(BLOCK_SIZE), "--replicas", "2"]
    flags += ["--tokenizer", str(demo_model_path()), "--served-model-name", "demo", "--start-timeout-s", "1200"]
    with serving(tmp_path_factory.mktemp("state"), path, *flags, patience_s=PATIENCE_S) as cluster:
        cluster.serving(2)
        yield cluster, kind


@pytest.fixture(scope="module")
def cluster(running: tuple[Serving, Kind]) -> Serving:
    return running[0]


@pytest.fixture(scope="module")
def kind(running: tuple[Serving, Kind]) -> Kind:
    return running[1]


def largest(engine: psutil.Process) -> psutil.Process:
    """The engine's process that uses the most memory, which the kernel kills when memory runs out."""
    return max([engine, *engine.children(recursive=True)], key=lambda each: each.memory_info().rss)


def test_what_an_engine_has_cached_is_known_before_it_is_asked(cluster: Serving) -> None:
    """The events, rehashed by content, predict the cached tokens that the engine reports for the next request."""
    assert cached_tokens(cluster) == 0

    held = held_blocks(cluster)

    assert cached_tokens(cluster) == held * BLOCK_SIZE


@pytest.mark.parametrize("victim", [None, largest])
def test_a_stream_continues_when_its_engine_is_killed(
    cluster: Serving, kind: Kind, victim: Callable[[psutil.Process], psutil.Process] | None
) -> None:
    """The text is unchanged whichever process is killed, and no process of the killed engine remains."""
    expected, before = text_of(cluster.post("/v1/completions", LONG)), continued(cluster)

    assert text_with_a_kill(cluster, kind.program, after=5, victim=victim) == expected
    assert continued(cluster) == before + 1
    until(lambda: True if len(engines(cluster, kind.program)) == 2 else None, "another engine starts", PATIENCE_S)
    until(lambda: True if len(cluster.replicas()) == 2 else None, "it serves", PATIENCE_S)
    cluster.serving(2)
    until(lambda: True if not zombies(cluster) else None, "no zombie is left")


def test_an_update_under_load_fails_and_changes_no_answer(cluster: Serving, kind: Kind) -> None:
    """Each engine is replaced by one with other arguments, whose cache is warmed, while two clients send requests."""
    before, warmed = engines(cluster, kind.program).keys(), cluster.cluster()["counters"]["warm_up_tokens"]
    seed = "--seed" if kind.name == "vllm" else "--random-seed"
    with Load(cluster) as load:
        updated = homing(cluster.state, "update", "--engine-args", f"{kind.args} {seed} 1", patience_s=PATIENCE_S)

    assert updated.returncode == 0, updated.stderr
    assert load.wrong == []
    assert load.answers > 0
    assert cluster.cluster()["counters"]["warm_up_tokens"] > warmed
    until(lambda: None if before & engines(cluster, kind.program).keys() else True, "the old engines have exited")
    until(lambda: True if not zombies(cluster) else None, "no zombie is left")
