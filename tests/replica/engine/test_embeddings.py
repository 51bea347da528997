"""Embeddings equal transformers' last hidden states, however the steps that compute them are scheduled."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModel

from homing.kvcache.hashing import BlockHasher
from homing.kvcache.prefix_cache import PrefixCache
from homing.replica.config import ReplicaSettings
from homing.replica.demo import demo_model_path
from homing.replica.engine.engine import Engine
from homing.replica.engine.overlapped import OverlappedEngine
from homing.replica.engine.scheduler import SchedulerLimits
from homing.replica.engine.throughput import SmoothedRates
from homing.replica.errors import InvalidRequest, PromptTooLong
from homing.replica.execute.gpu_runner import GpuRunner
from homing.replica.execute.runner import ModelRunner
from homing.replica.messages import EmbeddingParams, Pooling, TokenOutput

from ..fakes import FakeClock, generate
from ..toys import BLOCK_SIZE, NUM_BLOCKS, without_numbers

POOLINGS: tuple[Pooling, ...] = ("last", "mean")
SHARED = list(range(30, 30 + 3 * BLOCK_SIZE))
TEXTS = [[7], list(range(40, 61)), [*SHARED, 5, 6, 7], [*SHARED, 8, 9], [*SHARED, 8, 9, 10, 11]]


class Rig:
    """An engine on a real model with small steps."""

    def __init__(self, runner: ModelRunner, *, budget: int = 11, blocks: int = 40) -> None:
        self.hasher = BlockHasher(runner.block_size, seed=3)
        self.cache = PrefixCache(blocks + 1, runner.block_size)
        self.engine: Engine = (OverlappedEngine if isinstance(runner, GpuRunner) else Engine)(
            limits=SchedulerLimits(4, budget, min(200, blocks * runner.block_size)),
            vocab_size=runner.spec.vocab_size,
            eos_token_ids=(),
            cache=self.cache,
            hasher=self.hasher,
            executor=runner,
            rates=SmoothedRates(1000.0, 0.01),
            epoch=11,
            clock=FakeClock(tick=0.02),
        )
        self.outputs: dict[int, list[TokenOutput]] = {}
        self.refused: dict[int, str] = {}

    def embed(self, number: int, tokens: Sequence[int], pooling: Pooling, dimensions: int | None = None) -> None:
        request = generate(number, tokens, self.hasher)
        asked = EmbeddingParams(pooling, dimensions)
        self.engine.add("a", msgspec.structs.replace(request, embedding=asked))

    def step(self) -> None:
        result = self.engine.step()
        for output in result.outputs["a"]:
            self.outputs.setdefault(output.request_id, []).append(output)
        self.refused |= {each.request_id: each.message for each in result.refused["a"]}
        self.engine.scheduler.check()

    def run(self) -> None:
        while self.engine.has_work:
            self.step()

    def vector(self, number: int) -> np.ndarray:
        (output,) = self.outputs[number]
        assert (output.token_ids, output.finish_reason) == ([], "stop")
        assert output.embedding is not None
        return np.frombuffer(output.embedding, dtype="<f4")


@cache
def runner_of(folder: Path, provider: str = "native", kind: type[ModelRunner] = ModelRunner) -> ModelRunner:
    given = {"device": "cpu", "dtype": "float32", "model_provider": provider, "max_model_len": 200}
    runner = kind(msgspec.convert({**given, "max_running_requests": 4}, ReplicaSettings), folder, BLOCK_SIZE)
    runner.allocate_kv(NUM_BLOCKS)
    return runner


@cache
def reference_model(folder: Path) -> torch.nn.Module:
    return AutoModel.from_pretrained(folder, dtype=torch.float32).eval()


def expected(folder: Path, tokens: Sequence[int], pooling: Pooling, dimensions: int | None = None) -> np.ndarray:
    """The expected vector, from transformers' last hidden states."""
    with torch.inference_mode():
        hidden = reference_model(folder)(input_ids=torch.tensor([list(tokens)])).last_hidden_state[0].double()
    pooled = (hidden[-1] if pooling == "last" else hidden.mean(0))[:dimensions]
    return (pooled / pooled.norm()).numpy()


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize(
    ("model_type", "overrides", "provider", "kind"),
    [
        ("llama", {}, "native", ModelRunner),
        ("llama", {}, "native", GpuRunner),
        ("qwen3", {"head_dim": 32}, "native", ModelRunner),
        ("qwen3_moe", {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2}, "native", ModelRunner),
        ("llama", {}, "transformers", ModelRunner),
        ("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16}, "transformers", ModelRunner),
    ],
)
def test_vectors_are_those_of_transformers(
    checkpoint: Callable[..., Path],
    model_type: str,
    overrides,
    provider: str,
    kind: type[ModelRunner],
    pooling: Pooling,
) -> None:
    """Computed in chunks, in parallel and next to an answer, then again with the prefixes that are cached by then."""
    folder = checkpoint(model_type, **overrides)
    rig = Rig(runner_of(folder, provider, kind))
    rig.engine.add("a", generate(100, list(range(90, 99)), rig.hasher, max_tokens=30))

    for number, text in enumerate(TEXTS * 2):
        rig.embed(number, text, pooling)
    rig.run()

    for number, text in enumerate(TEXTS * 2):
        np.testing.assert_allclose(rig.vector(number), expected(folder, text, pooling), atol=2e-5)
    alone = Rig(runner_of(folder, provider, kind))
    alone.engine.add("a", generate(100, list(range(90, 99)), alone.hasher, max_tokens=30))
    alone.run()
    assert [each.token_ids for each in rig.outputs[100]] == [each.token_ids for each in alone.outputs[100]]


@pytest.mark.parametrize("pooling", POOLINGS)
def test_vectors_of_the_demo_model_are_those_of_transformers(pooling: Pooling) -> None:
    """The quick start serves this model."""
    folder = demo_model_path()
    rig = Rig(runner_of(folder), budget=64)

    rig.embed(1, SHARED * 4, pooling)
    rig.embed(2, SHARED * 4, pooling, dimensions=16)
    rig.run()

    np.testing.assert_allclose(rig.vector(1), expected(folder, SHARED * 4, pooling), atol=2e-5)
    np.testing.assert_allclose(rig.vector(2), expected(folder, SHARED * 4, pooling, 16), atol=2e-5)
    assert np.linalg.norm(rig.vector(2)) == pytest.approx(1)


def test_only_the_last_tokens_state_can_be_had_with_cached_blocks(checkpoint: Callable[..., Path]) -> None:
    """Mean pooling needs the states of all tokens, but blocks hold only keys and values."""
    rig = Rig(runner_of(checkpoint("llama")))
    rig.embed(0, SHARED, "mean")
    rig.run()

    for number, pooling in enumerate(POOLINGS, 1):
        rig.embed(number, [*SHARED, 5], pooling)
        rig.run()

    cached = [rig.outputs[number][0].cached_tokens for number in range(3)]
    assert cached == [0, len(SHARED), 0]


@pytest.mark.parametrize("pooling", POOLINGS)
def test_preempted_request_begins_its_sum_anew(checkpoint: Callable[..., Path], pooling: Pooling) -> None:
    """A more urgent, growing answer takes its blocks, so its sum must restart from zero."""
    folder, text = checkpoint("llama"), list(range(40, 40 + 4 * BLOCK_SIZE))
    rig = Rig(runner_of(folder), budget=5, blocks=8)
    urgent = generate(1, list(range(90, 90 + 4 * BLOCK_SIZE - 1)), rig.hasher, max_tokens=20)
    rig.engine.add("a", msgspec.structs.replace(urgent, priority=-1))
    while not rig.outputs:
        rig.step()

    rig.embed(2, text, pooling)
    rig.run()

    assert rig.engine.scheduler.preemptions
    np.testing.assert_allclose(rig.vector(2), expected(folder, text, pooling), atol=2e-5)


def test_aborted_request_leaves_nothing(checkpoint: Callable[..., Path]) -> None:
    """The abort arrives between two chunks."""
    rig = Rig(runner_of(checkpoint("llama")))
    rig.embed(1, SHARED, "mean")
    rig.step()

    rig.engine.abort("a", [1])

    assert not rig.engine.has_work
    assert rig.cache.free_blocks == rig.cache.total_blocks
    assert not rig.outputs


def test_prompt_may_fill_the_context(checkpoint: Callable[..., Path]) -> None:
    """No room for an answer is needed; one more token is refused."""
    rig = Rig(runner_of(checkpoint("llama")), budget=64)
    rig.embed(1, [5] * 200, "last")
    rig.run()

    with pytest.raises(PromptTooLong):
        rig.embed(2, [5] * 201, "last")

    assert rig.vector(1).shape == (64,)


def test_damaged_weights_are_no_vector(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """The request fails with an error, as an answer would; a concurrent request is unaffected."""
    rig = Rig(runner_of(without_numbers(checkpoint("llama"), 17, tmp_path)), budget=64)

    rig.embed(1, [5, 17, 6], "mean")
    rig.embed(2, [5, 6], "mean")
    rig.run()

    assert "NaN" in rig.refused[1]
    assert rig.vector(2).shape == (64,)


def test_request_for_a_vector_has_no_tokens_yet(checkpoint: Callable[..., Path]) -> None:
    """A router of another version might send generated tokens with such a request."""
    rig = Rig(runner_of(checkpoint("llama")))
    request = generate(1, [5, 6, 7], rig.hasher, prompt_tokens=2)

    with pytest.raises(InvalidRequest, match="embedding"):
        rig.engine.add("a", msgspec.structs.replace(request, embedding=EmbeddingParams("last")))
