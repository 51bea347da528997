"""vLLM itself as the engine of replicas, on a CPU. Runs where `HOMING_TEST_VLLM` names the `vllm` program.

    HOMING_TEST_VLLM=vllm/bin/vllm pytest tests/e2e/test_vllm_replicas.py --timeout 3600

test_vllm.py explains how to make that environment. Two replicas take two minutes to start on two cores.
"""

import os
from collections.abc import Iterator
from pathlib import Path

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

VLLM = os.environ.get("HOMING_TEST_VLLM", "")
pytestmark = [
    pytest.mark.compat,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not VLLM, reason="HOMING_TEST_VLLM names no vllm program"),
]
PROGRAM = "vllm.entrypoints"
PATIENCE_S = 1200.0


def random_model(folder: Path) -> Path:
    """A small random Llama without tokenizer, of a shape that vLLM's attention on CPUs supports."""
    shape = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    return save_checkpoint(folder, "llama", vocab_size=4096, max_position_embeddings=2048, **shape)


@pytest.fixture(scope="module", params=["demo", "random"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Two replicas of the model on vLLM."""
    model = "demo" if request.param == "demo" else str(random_model(tmp_path_factory.mktemp("random")))
    flags = ["--engine", "vllm", "--engine-python", str(Path(VLLM).absolute().with_name("python"))]
    flags += ["--engine-args", "--enforce-eager", "--dtype", "float32", "--max-running-requests", "8"]
    flags += ["--tokenizer", str(demo_model_path()), "--served-model-name", "demo", "--replicas", "2"]
    with serving(tmp_path_factory.mktemp("state"), model, *flags, patience_s=PATIENCE_S) as running:
        running.serving(2)
        yield running


def test_what_vllm_has_cached_is_known_before_it_is_asked(cluster: Serving) -> None:
    """The events, rehashed by content, predict the cached tokens that vLLM reports for the next request."""
    assert cached_tokens(cluster) == 0

    held = held_blocks(cluster)

    assert cached_tokens(cluster) == held * BLOCK_SIZE


def test_a_stream_continues_when_its_vllm_is_killed(cluster: Serving) -> None:
    """The text is unchanged, and no process of the killed engine remains."""
    expected, before = text_of(cluster.post("/v1/completions", LONG)), continued(cluster)

    assert text_with_a_kill(cluster, PROGRAM, after=20) == expected
    assert continued(cluster) == before + 1
    until(lambda: True if len(engines(cluster, PROGRAM)) == 2 else None, "another engine starts", PATIENCE_S)
    until(lambda: True if len(cluster.replicas()) == 2 else None, "it serves", PATIENCE_S)
    cluster.serving(2)
    until(lambda: True if not zombies(cluster) else None, "no zombie is left")


def test_an_update_under_load_fails_and_changes_no_answer(cluster: Serving) -> None:
    """Each vLLM is replaced by one with other arguments while two clients send requests."""
    before = engines(cluster, PROGRAM).keys()
    with Load(cluster) as load:
        updated = homing(cluster.state, "update", "--engine-args", "--enforce-eager --seed 1", patience_s=PATIENCE_S)

    assert updated.returncode == 0, updated.stderr
    assert load.wrong == []
    assert load.answers > 0
    until(lambda: None if before & engines(cluster, PROGRAM).keys() else True, "the old engines have exited")
    until(lambda: True if not zombies(cluster) else None, "no zombie is left")
