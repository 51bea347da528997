"""Whatever the schedule, both providers give the tokens of transformers' `generate`, and give everything back.

One engine per provider runs the same random schedule: arrivals, budgets of a few tokens, prompts that branch off inside
blocks, pools too small for all, aborts, greedy and drawn tokens. What an undisturbed run would give is worked out from
transformers' own forward passes, once for each request, with its sampler or ours on its logits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from homing.kvcache.cache import PrefixCache
from homing.kvcache.hashing import BlockHasher
from homing.replica.engine import Engine, EngineModel
from homing.replica.messages import SamplingParams
from homing.replica.rates import Rates
from homing.replica.runner import ModelRunner
from homing.replica.sampler import SamplingRow, prompt_logprobs, sample
from homing.replica.scheduler import Limits
from homing.replica.worker import LocalExecutor

from .fakes import generate

PROVIDERS = ("native", "transformers")
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.0, "seed": 9, "top_p": 0.9, "top_k": 20},
    {"temperature": 0.6, "seed": 3, "min_p": 0.02, "repetition_penalty": 1.2, "presence_penalty": 0.3},
)


@dataclass(frozen=True)
class Ask:
    """One request of a schedule."""

    prompt: tuple[int, ...]
    sampling: int
    max_tokens: int
    steps_before: int
    abort_after: int | None  #: steps after its arrival


ASKS = st.lists(
    st.builds(
        lambda shared, own, *rest: Ask((*range(40, 40 + shared), *own), *rest),
        st.integers(0, 30),
        st.lists(st.integers(3, 6), min_size=1, max_size=9).map(tuple),
        st.integers(0, len(SAMPLINGS) - 1),
        st.integers(1, 6),
        st.integers(0, 6),
        st.sampled_from([None, None, None, 0, 2, 5]),
    ),
    min_size=2,
    max_size=6,
)


@cache
def runner_of(folder: Path, provider: str) -> ModelRunner:
    """One for all examples: what stands in its blocks from an example before must not matter."""
    from .toys import make_runner

    return make_runner(folder, provider)


@dataclass
class Schedule:
    """An engine of one provider, and what its requests got."""

    runner: ModelRunner
    budget: int
    blocks: int
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = self.runner.block_size
        self.hasher = BlockHasher(size, seed=3)
        self.cache = PrefixCache(self.blocks + 1, size)
        self.engine = Engine(
            limits=Limits(4, self.budget, self.blocks * size),
            model=EngineModel(self.runner.spec.vocab_size, ()),
            cache=self.cache,
            hasher=self.hasher,
            executor=LocalExecutor(self.runner),
            rates=Rates(1000.0, 0.01),
            epoch=11,
        )
        self._steps = 0
        self._aborts: dict[int, int] = {}

    def run(self, asks: Sequence[Ask]) -> None:
        """All of it, to the last token."""
        for number, ask in enumerate(asks):
            self._step(ask.steps_before)
            self.tokens[number], self.logprobs[number] = [], []
            params = SAMPLINGS[ask.sampling] | {"logprobs": 0, "max_tokens": ask.max_tokens}
            self.engine.add("a", generate(number, ask.prompt, self.hasher, **params))
            if ask.abort_after is not None:
                self._aborts[number] = self._steps + ask.abort_after
        while self.engine.has_work:
            self._step(1)

    def _step(self, count: int) -> None:
        for _ in range(count):
            self.engine.abort("a", [number for number, when in self._aborts.items() if when <= self._steps])
            for output in self.engine.step().outputs["a"]:
                self.tokens[output.request_id] += output.token_ids
                self.logprobs[output.request_id] += [values.chosen.logprob for values in output.logprobs or []]
            self.engine.scheduler.check()
            self._steps += 1


class Oracle:
    """transformers' model, one request at a time."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self._model.eval().generation_config.eos_token_id = None
        self._known: dict[tuple[Any, ...], tuple[list[int], list[float]]] = {}

    def answer(self, ask: Ask) -> tuple[list[int], list[float]]:
        """Tokens and their logprobs."""
        key = (ask.prompt, ask.sampling, ask.max_tokens)
        if key not in self._known:
            self._known[key] = self._greedy(ask) if not SAMPLINGS[ask.sampling] else self._drawn(ask)
        return self._known[key]

    @torch.inference_mode()
    def _greedy(self, ask: Ask) -> tuple[list[int], list[float]]:
        out = self._model.generate(
            torch.tensor([ask.prompt]),
            attention_mask=torch.ones(1, len(ask.prompt), dtype=torch.int64),
            max_new_tokens=ask.max_tokens,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = out.sequences[0, len(ask.prompt) :].tolist()
        values = prompt_logprobs(torch.cat(out.logits), tokens, 0)
        return tokens, [each.chosen.logprob for each in values]

    @torch.inference_mode()
    def _drawn(self, ask: Ask) -> tuple[list[int], list[float]]:
        params = SamplingParams(max_tokens=ask.max_tokens, logprobs=0, **SAMPLINGS[ask.sampling])
        tokens, logprobs = list(ask.prompt), []
        for position in range(ask.max_tokens):
            logits = self._model(torch.tensor([tokens])).logits[:, -1]
            generated = tokens[len(ask.prompt) :]
            (drawn,) = sample(logits, [SamplingRow(params, position, ask.prompt, generated)])
            tokens.append(drawn.token_id)
            assert drawn.logprobs is not None
            logprobs.append(drawn.logprobs.chosen.logprob)
        return tokens[len(ask.prompt) :], logprobs


@cache
def oracle_of(folder: Path) -> Oracle:
    """One for all examples."""
    return Oracle(folder)


@pytest.mark.parametrize("model_type", MODELS)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ASKS, st.integers(3, 40), st.integers(6, 20))
def test_both_providers_answer_as_transformers_whatever_the_schedule(
    checkpoint: Callable[..., Path], model_type: str, asks: list[Ask], budget: int, blocks: int
) -> None:
    """Token for token in float32, logprobs within 1e-4; an aborted request got the beginning of it."""
    folder = checkpoint(model_type, **MODELS[model_type])
    oracle = oracle_of(folder)

    for provider in PROVIDERS:
        schedule = Schedule(runner_of(folder, provider), budget, blocks)
        schedule.run(asks)

        for number, ask in enumerate(asks):
            tokens, logprobs = oracle.answer(ask)
            got = schedule.tokens[number]
            assert got == tokens[: len(got)], (provider, number)
            assert len(got) == ask.max_tokens or ask.abort_after is not None
            assert schedule.logprobs[number] == pytest.approx(logprobs[: len(got)], abs=1e-4)
        assert len(schedule.engine.scheduler) == 0
        assert schedule.cache.free_blocks == schedule.cache.total_blocks == blocks


def test_these_schedules_reach_what_they_are_for(checkpoint: Callable[..., Path]) -> None:
    """Prefix hits, copies inside blocks, chunks and preemptions all happen in one of them; none may vanish unseen."""
    asks = [Ask((*range(40, 40 + shared), 3, 4), 0, 6, 1, None) for shared in (30, 30, 27, 13)]
    schedule = Schedule(runner_of(checkpoint("llama"), "native"), budget=12, blocks=9)

    schedule.run(asks)

    counters = schedule.engine.load().counters
    assert counters.hit_tokens > counters.partial_hit_tokens > 0
    assert counters.preemptions > 0
