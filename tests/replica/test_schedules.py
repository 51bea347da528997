"""For any schedule, both providers and both engines generate transformers' tokens and release everything they held.

One engine per provider and kind runs the same random schedule (`schedules.py`). The overlapped engine uses the eager
stand-in for CUDA graphs.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from homing.replica.engine.prompt_lookup import PromptLookup
from homing.replica.messages import PositionLogprobs

from .fakes import Guesses
from .schedules import ASKS, SAMPLINGS, SETUPS, Ask, Got, Schedule, Setup, made_runner, oracle_of, runner_of
from .toys import without_numbers

#: A token that ends some prompts and that may also be generated.
DAMAGED = 6
PROVIDERS = ("native", "transformers")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral with a window": ("mistral", {"sliding_window": 12}),
    "qwen3 with tied embeddings": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_moe": (
        "qwen3_moe",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
}
#: Events that the schedules must produce. Each must occur in several of them, or the property would hold vacuously.
REACHED = (
    "prefix hit",
    "copy inside a block",
    "hit on what came after it",
    "chunk of a prompt",
    "decodes beside a prefill",
    "preemption",
    "abort of a waiting request",
    "abort of a running request",
    "several choices",
    "logprobs",
    "end by a token",
)
REACHED_AHEAD = ("step launched ahead", "abort of a row in flight", "preemption", "copy inside a block")


def assert_same(got: Got, wanted: Got, whole: bool) -> None:
    """Tokens must match exactly, logprobs within 1e-4. Without `whole`, `got` need only be a prefix of `wanted`."""
    count = len(got.tokens)
    assert got.tokens == wanted.tokens[:count]
    assert_alike(got.logprobs, wanted.logprobs[:count])
    if whole:
        assert (count, got.finish_reason) == (len(wanted.tokens), wanted.finish_reason)
    if count and wanted.prompt_logprobs is not None:
        assert got.prompt_logprobs is not None
        assert got.prompt_logprobs[0] is None
        assert_alike(got.prompt_logprobs[1:], wanted.prompt_logprobs[1:])


def assert_alike(got: Sequence[PositionLogprobs | None], wanted: Sequence[PositionLogprobs | None]) -> None:
    def of(values: Sequence[PositionLogprobs | None]) -> list[PositionLogprobs]:
        return [value for value in values if value is not None]

    assert [value.chosen.token_id for value in of(got)] == [value.chosen.token_id for value in of(wanted)]
    for one, other in zip(of(got), of(wanted), strict=True):
        assert one.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-4)
        assert [top.logprob for top in one.top] == pytest.approx([top.logprob for top in other.top], abs=1e-4)


@pytest.mark.parametrize("model", MODELS)
@settings(
    max_examples=12,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(ASKS, SETUPS)
def test_every_engine_answers_as_transformers_whatever_the_schedule(
    checkpoint: Callable[..., Path], model: str, asks: list[Ask], setup: Setup
) -> None:
    """Tokens must match exactly in float32, logprobs within 1e-4; an aborted request must have received a prefix."""
    model_type, overrides = MODELS[model]
    folder = checkpoint(model_type, **overrides)
    oracle = oracle_of(folder)

    for provider in PROVIDERS:
        for resident in (False, True):
            schedule = Schedule(runner_of(folder, provider, resident), setup)
            found = schedule.run(asks)

            for (ask, choice), got in found.items():
                assert_same(got, oracle.answer(ask, choice), whole=ask.abort_after is None)
            for name in sorted(name for name, count in schedule.seen.items() if count):
                event(f"{'ahead' if resident else 'plain'}: {name}")


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ASKS, SETUPS, st.sampled_from([0.3, 0.8, 1.0]))
def test_drafts_change_no_token(checkpoint: Callable[..., Path], asks: list[Ask], setup: Setup, right: float) -> None:
    """Drafts, right and wrong, must not change tokens under any sampling; right ones yield several tokens per step."""
    folder = checkpoint("llama")
    oracle = oracle_of(folder)
    answers = [[*ask.prompt, *oracle.answer(ask, choice).tokens] for ask in asks for choice in range(ask.choices)]
    guesses = Guesses(right, following=partial(following, answers))

    for provider in PROVIDERS:
        for resident in (False, True):
            schedule = Schedule(runner_of(folder, provider, resident), setup, guesses)
            found = schedule.run(asks)

            for (ask, choice), got in found.items():
                assert_same(got, oracle.answer(ask, choice), whole=ask.abort_after is None)
            for name in sorted(name for name, count in schedule.seen.items() if count):
                event(f"{'resident' if resident else 'plain'}: {name}")


@pytest.mark.parametrize("resident", [False, True], ids=["plain", "ahead"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_found_by_lookup_are_the_same_to_the_last_bit(
    checkpoint: Callable[..., Path], dtype: str, resident: bool
) -> None:
    """Includes bfloat16, where other kernels would round differently. Small random models repeat themselves."""
    runner = made_runner(checkpoint("llama"), resident, dtype=dtype)
    copying = [Ask((40 + number, 41, 42, 5), "greedy", 100, 2) for number in range(3)]
    others = [Ask((50, 51), "top-k and top-p", 20, 9), Ask((52, 53), "greedy bias", 20, 1, logprobs=2)]

    found = {}
    for drafter in (None, PromptLookup(8)):
        schedule = Schedule(runner, Setup(blocks=80), drafter)
        found[drafter] = schedule.run([*copying, *others]), schedule.engine.load().step
    (wanted, steps), (got, fewer) = found.values()

    assert got == wanted
    assert fewer < steps


@pytest.fixture(scope="module", params=["llama", "qwen3_moe"])
def sound_and_damaged(
    request: pytest.FixtureRequest, checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A model, and a copy in which the embedding of a token that many prompts contain is NaN."""
    model_type, overrides = MODELS[request.param]
    sound = checkpoint(model_type, **overrides)
    return sound, without_numbers(sound, DAMAGED, tmp_path_factory.mktemp("damaged"))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ASKS, SETUPS, st.none() | st.just(Guesses(0.7, following=lambda _: DAMAGED)))
def test_a_token_without_numbers_ends_the_requests_that_hold_it_and_no_others(
    sound_and_damaged: tuple[Path, Path], asks: list[Ask], setup: Setup, guesses: Guesses | None
) -> None:
    """Affected requests fail when they first draw. Requests that share their batch, prefix or reused blocks must be
    unaffected, and so must requests for which the damaged token was only a draft.
    """
    sound, damaged = sound_and_damaged
    oracle = oracle_of(sound)

    for provider in PROVIDERS:
        for resident in (False, True):
            found = Schedule(runner_of(damaged, provider, resident), setup, guesses).run(asks)

            for (ask, choice), got in found.items():
                wanted = sound_part(oracle.answer(ask, choice), ask.prompt)
                assert_same(got, wanted, whole=ask.abort_after is None and wanted.finish_reason != "refused")
                if wanted.finish_reason == "refused" and ask.abort_after is None:
                    assert len(got.tokens) == len(wanted.tokens)
                    assert "NaN" in str(got.finish_reason)


def sound_part(answer: Got, prompt: Sequence[int]) -> Got:
    """The expected answer if it is cut off after the damaged token."""
    if DAMAGED in prompt:
        return Got(finish_reason="refused")
    count = answer.tokens.index(DAMAGED) + 1 if DAMAGED in answer.tokens[:-1] else None
    if count is None:
        return answer
    return Got(answer.tokens[:count], answer.logprobs[:count], answer.prompt_logprobs, "refused")


def following(answers: Sequence[list[int]], tokens: Sequence[int]) -> int:
    """The token that follows `tokens` in an answer that starts with them; 0 if there is none."""
    count = len(tokens)
    return next((answer[count] for answer in answers if answer[:count] == tokens and len(answer) > count), 0)


@pytest.mark.parametrize(("resident", "reached"), [(False, REACHED), (True, REACHED_AHEAD)], ids=["plain", "ahead"])
def test_these_schedules_reach_what_they_are_for(
    checkpoint: Callable[..., Path], resident: bool, reached: Sequence[str]
) -> None:
    """The first examples must cover hits, copies, chunks, preemptions and aborts; no case may silently disappear."""
    runner, seen = runner_of(checkpoint("llama"), "native", resident), Counter[str]()

    @settings(max_examples=60, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(ASKS, SETUPS)
    def watch(asks: list[Ask], setup: Setup) -> None:
        schedule = Schedule(runner, setup)
        schedule.run(asks)
        seen.update(name for name, count in schedule.seen.items() if count)

    watch()

    assert [name for name in reached if seen[name] < 2] == [], seen
    assert sum(name.startswith("sampling") for name in seen) > len(SAMPLINGS) // 2
