"""Random schedules, an engine that runs them, and transformers' answers as the oracle.

A schedule covers what a replica may meet: prompts that branch inside blocks, arrivals at any step, few tokens a step,
pools too small for all, aborts, several choices of one prompt, every sampling parameter.
"""

from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from homing.kvcache.hashing import BlockHasher
from homing.kvcache.prefix_cache import PrefixCache
from homing.replica.config import ReplicaSettings
from homing.replica.engine.drafts import Drafter
from homing.replica.engine.engine import Engine
from homing.replica.engine.logit_edits import SamplingRow, banned_before
from homing.replica.engine.logprobs import prompt_logprobs
from homing.replica.engine.overlapped import DrawTerms, OverlappedEngine
from homing.replica.engine.request import RequestPhase
from homing.replica.engine.sampler import sample
from homing.replica.engine.scheduler import SchedulerLimits
from homing.replica.engine.step_plan import StepPlan
from homing.replica.engine.throughput import SmoothedRates
from homing.replica.execute.gpu_runner import DrawnTokens, GpuRunner
from homing.replica.execute.runner import ModelRunner
from homing.replica.messages import Generate, PositionLogprobs, SamplingParams, TokenOutput, decoded_positions

from .fakes import generate
from .toys import BLOCK_SIZE, NUM_BLOCKS

SEEDS = 1 << 64
HANG = 5_000
#: Several ids, as in newer models; a sixth of the vocabulary, so that answers do end.
EOS = (2, *range(60, 95))
STOPS = tuple(range(100, 160))
#: Sampling parameters that the device can apply without the host.
ON_DEVICE: dict[str, dict[str, Any]] = {
    "greedy": {"ignore_eos": True},
    "greedy until the end": {},
    "temperature": {"temperature": 0.8, "seed": 5, "ignore_eos": True},
    "top-k and top-p": {"temperature": 1.0, "seed": 1 << 63, "top_p": 0.9, "top_k": 20, "ignore_eos": True},
    "top-k of all": {"temperature": 1.3, "seed": SEEDS - 1, "top_k": 1 << 40},
    "min-p": {"temperature": 1.5, "seed": 3, "min_p": 0.05, "ignore_eos": True},
    "stop ids": {"temperature": 1.0, "seed": 8, "stop_token_ids": STOPS, "ignore_eos": True},
}
WITH_HOST: dict[str, dict[str, Any]] = {
    "repetition and presence": {"temperature": 0.6, "seed": 3, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    "frequency": {"temperature": 1.0, "seed": 4, "frequency_penalty": 1.5, "top_p": 0.95, "ignore_eos": True},
    "greedy with penalties": {"repetition_penalty": 1.5, "frequency_penalty": -0.5, "ignore_eos": True},
    "bias": {"temperature": 1.0, "seed": 6, "logit_bias": {5: 4.0, 9: -100.0, 210: 3.0}, "ignore_eos": True},
    "greedy bias": {"logit_bias": {7: 9.0, 8: -9.0}},
    "greedy repetition": {"repetition_penalty": 1.3},
    "greedy min tokens": {"min_tokens": 2},
    "min tokens": {"temperature": 1.0, "seed": 2, "min_tokens": 2, "stop_token_ids": STOPS},
    "echo": {"prompt_logprobs": 1, "ignore_eos": True},
    "drawn echo": {"temperature": 0.9, "seed": 1, "prompt_logprobs": 0, "min_p": 0.01},
}
SAMPLINGS = ON_DEVICE | WITH_HOST
#: The parameters that transformers' `generate` supports, in its terms; for others, our sampler draws from its logits.
GENERATE: dict[str, dict[str, Any]] = {
    "greedy": {},
    "echo": {},
    "greedy until the end": {"eos_token_id": EOS},
    "greedy bias": {"eos_token_id": EOS, "sequence_bias": [[[7], 9.0], [[8], -9.0]]},
    "greedy repetition": {"eos_token_id": EOS, "repetition_penalty": 1.3},
    "greedy min tokens": {"eos_token_id": EOS, "min_new_tokens": 2},
}


@dataclass(frozen=True)
class Ask:
    """One request of a schedule, or several choices of one prompt."""

    prompt: tuple[int, ...]
    sampling: str
    max_tokens: int
    steps_before: int
    abort_after: int | None = None  #: in steps after its arrival
    choices: int = 1
    logprobs: int | None = None
    priority: int = 0

    def params(self, choice: int = 0) -> SamplingParams:
        """The parameters of one choice; as in the router, each choice has its own seed."""
        wanted = {"temperature": 0.0, "seed": 0} | SAMPLINGS[self.sampling]
        wanted["seed"] = (wanted["seed"] + choice) % SEEDS
        minimum = min(wanted.pop("min_tokens", 0), self.max_tokens)
        return SamplingParams(max_tokens=self.max_tokens, min_tokens=minimum, logprobs=self.logprobs, **wanted)


def asks_with(samplings: Sequence[str], logprobs: Sequence[int | None]) -> st.SearchStrategy[list[Ask]]:
    """A strategy for schedules with a small vocabulary, so that prefixes are shared and diverge anywhere."""
    ask = st.builds(
        lambda shared, own, *rest: Ask((*range(40, 40 + shared), *own), *rest),
        st.integers(0, 30),
        st.lists(st.integers(3, 6), min_size=1, max_size=9).map(tuple),
        st.sampled_from(samplings),
        st.integers(1, 10),
        st.integers(0, 6),
        st.sampled_from([None, None, None, 0, 2, 5]),
        st.sampled_from([1, 1, 1, 2, 3]),
        st.sampled_from(logprobs),
        st.integers(0, 1),
    )
    return st.lists(ask, min_size=2, max_size=6)


#: In half of the schedules, the device draws every step without the host.
ASKS = asks_with(tuple(ON_DEVICE), (None,)) | asks_with(tuple(SAMPLINGS), (None, 0, 2))


@dataclass(frozen=True)
class Setup:
    """A replica's limits: token budget per step, pool size, and the prefix length that is worth waiting for."""

    budget: int = 64
    blocks: int = 40
    worth_waiting: int = 128


SETUPS = st.builds(Setup, st.integers(3, 40), st.integers(7, 14), st.sampled_from([8, 16, 128]))


@cache
def runner_of(folder: Path, provider: str, resident: bool) -> ModelRunner:
    """A runner shared by all examples: leftovers of an earlier example in its blocks must not matter."""
    # Covers both CPU attention backends, one per provider.
    backend = "auto" if provider == "native" or resident else "cpu-scratch"
    return made_runner(folder, resident, dtype="float32", model_provider=provider, attention_backend=backend)


def made_runner(folder: Path, resident: bool, **values: str) -> ModelRunner:
    """A runner with enough blocks and requests for the schedules, and with these settings."""
    kind = GpuRunner if resident else ModelRunner
    given = {"device": "cpu", "max_running_requests": 4, "max_model_len": 200} | values
    runner = kind(msgspec.convert(given, ReplicaSettings), folder, BLOCK_SIZE)
    runner.allocate_kv(NUM_BLOCKS)
    return runner


class Watched:
    """A runner that counts the situations that a schedule actually produced."""

    def __init__(self, runner: ModelRunner, seen: Counter[str]) -> None:
        self._runner = runner
        self._seen = seen

    def forward(self, plan: StepPlan) -> torch.Tensor | None:
        self._watch(plan)
        return self._runner.forward(plan)

    def launch(self, plan: StepPlan) -> DrawnTokens | None:
        self._watch(plan)
        self._seen["step launched ahead"] += bool(plan.fed)
        return self._runner.launch(plan)

    def draw(self, terms: DrawTerms) -> DrawnTokens:
        self._seen["step drawn when the one before is known"] += 1
        return self._runner.draw(terms)

    def _watch(self, plan: StepPlan) -> None:
        ends = set(torch.tensor(plan.q_lens).cumsum(0).sub(1).tolist())
        self._seen["chunk of a prompt"] += not ends <= set(plan.logits_at)
        self._seen["decodes beside a prefill"] += len({count == 1 for count in plan.q_lens}) == 2
        self._seen["copy inside a block"] += len(plan.copies)


@dataclass
class Got:
    """The output of one choice."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    finish_reason: str | None = None


class Schedule:
    """An engine of one kind and provider that runs a schedule."""

    def __init__(self, runner: ModelRunner, setup: Setup, drafter: Drafter | None = None, executor: Any = None) -> None:
        """`executor`: runs the plans if that is not `runner`, such as all ranks of a group."""
        size = runner.block_size
        resident = isinstance(runner, GpuRunner)
        self.seen: Counter[str] = Counter()
        self.hasher = BlockHasher(size, seed=3)
        self.cache = PrefixCache(setup.blocks + 1, size)
        self.engine: Engine = (OverlappedEngine if resident else Engine)(
            limits=SchedulerLimits(4, setup.budget, setup.blocks * size, setup.worth_waiting),
            vocab_size=runner.spec.vocab_size,
            eos_token_ids=EOS,
            cache=self.cache,
            hasher=self.hasher,
            executor=Watched(executor or runner, self.seen),
            rates=SmoothedRates(1000.0, 0.01),
            epoch=11,
            drafter=drafter,
        )
        self.got: dict[int, Got] = defaultdict(Got)
        self.refused: dict[int, str] = {}
        self._asked: dict[int, Ask] = {}
        self._steps = 0
        self._aborts: dict[int, int] = {}

    def run(self, asks: Sequence[Ask]) -> dict[tuple[Ask, int], Got]:
        """Run all requests to the end. Results by ask and choice; a refusal's finish reason is its message."""
        numbers: dict[tuple[int, int], int] = {}
        for place, ask in enumerate(asks):
            self._step(ask.steps_before)
            for choice in range(ask.choices):
                numbers[place, choice] = self.add(ask, choice)
        self.finish()
        for number, message in self.refused.items():
            self.got[number].finish_reason = message
        return {
            (replace(asks[place], steps_before=place), choice): self.got[number]
            for (place, choice), number in numbers.items()
        }

    def add(self, ask: Ask, choice: int = 0, generated: Sequence[int] = ()) -> int:
        """Add a request and return its number; `generated` are tokens from another engine."""
        number = len(self._asked)
        self._asked[number] = ask
        self.engine.add("a", self._request(number, ask, choice, generated), self.guide(ask))
        if ask.abort_after is not None:
            self._aborts[number] = self._steps + ask.abort_after
        return number

    def guide(self, ask: Ask) -> Any:
        """The guide of a request; None if any token may follow."""
        return None

    def _request(self, number: int, ask: Ask, choice: int, generated: Sequence[int]) -> Generate:
        made = generate(number, [*ask.prompt, *generated], self.hasher, prompt_tokens=len(ask.prompt))
        return Generate(
            request_id=number,
            token_ids=made.token_ids,
            prompt_tokens=made.prompt_tokens,
            root=made.root,
            block_hashes=made.block_hashes,
            sampling=ask.params(choice),
            priority=ask.priority,
        )

    def finish(self) -> None:
        """Run until all requests are done and check that everything held was released."""
        while self.engine.has_work:
            assert self._steps < HANG, "requests did not finish"
            self._step(1)
        assert len(self.engine.scheduler) == 0
        assert self.cache.free_blocks == self.cache.total_blocks
        if isinstance(self.engine, OverlappedEngine):
            self.engine.slots.assign(())
            assert self.engine.slots.free == self.engine.scheduler.limits.running
        counters = self.engine.load().counters
        self.seen["preemption"] += counters.preemptions
        self.seen["prefix hit"] += counters.hit_tokens > counters.partial_hit_tokens

    def _step(self, count: int) -> None:
        for _ in range(count):
            self._abort_what_is_due()
            result = self.engine.step()
            self.refused.update((refused.request_id, refused.message) for refused in result.refused["a"])
            for output in result.outputs["a"]:
                self._take(output)
            self.engine.scheduler.check()
            self._steps += 1

    def _abort_what_is_due(self) -> None:
        due = {number for number, when in self._aborts.items() if when <= self._steps}
        for request in self.engine.scheduler.requests():
            if request.key.request_id in due:
                self.seen[f"abort of a {request.phase.value} request"] += 1
                self.seen["abort of a row in flight"] += bool(request.in_flight)
        self.engine.abort("a", due)

    def _take(self, output: TokenOutput) -> None:
        got, ask = self.got[output.request_id], self._asked[output.request_id]
        got.tokens += output.token_ids
        got.logprobs += output.logprobs or []
        got.prompt_logprobs = got.prompt_logprobs or decoded_positions(output.prompt_logprobs or ()) or None
        got.finish_reason = output.finish_reason
        self.seen[f"sampling: {ask.sampling}"] += 1
        self.seen["several tokens of a step"] += len(output.token_ids) > 1
        self.seen["several choices"] += ask.choices > 1
        self.seen["end by a token"] += output.finish_reason == "stop"
        self.seen["logprobs"] += bool(output.logprobs)
        request = self.engine.scheduler.get(("a", output.request_id))  # type: ignore[arg-type]
        if request is not None and request.phase is RequestPhase.RUNNING:
            self.seen["hit on what came after it"] += (request.cached_tokens or 0) > request.expected_cached


class Oracle:
    """transformers' model, one request at a time; for greedy sampling, its own `generate`."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self._model.eval().generation_config.eos_token_id = None
        self._known: dict[tuple[Any, ...], Got] = {}

    def answer(self, ask: Ask, choice: int = 0) -> Got:
        """The answer of an undisturbed run."""
        params = ask.params(choice)
        key = (ask.prompt, ask.sampling, ask.max_tokens, ask.logprobs, choice)
        if key not in self._known:
            got = self._generated(ask, params) if ask.sampling in GENERATE else self._drawn(ask, params)
            if params.prompt_logprobs is not None:
                got.prompt_logprobs = self._echo(ask, params.prompt_logprobs)
            self._known[key] = got
        return self._known[key]

    @torch.inference_mode()
    def _generated(self, ask: Ask, params: SamplingParams) -> Got:
        options = {"min_new_tokens": 0} | GENERATE[ask.sampling]
        out = self._model.generate(
            torch.tensor([ask.prompt]),
            attention_mask=torch.ones(1, len(ask.prompt), dtype=torch.int64),
            max_new_tokens=ask.max_tokens,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
            **options | {"min_new_tokens": min(options["min_new_tokens"], ask.max_tokens)},
        )
        tokens = out.sequences[0, len(ask.prompt) :].tolist()
        logprobs = prompt_logprobs(torch.cat(out.logits), tokens, params.logprobs or 0)
        ended = "eos_token_id" in options and tokens[-1] in EOS
        return Got(tokens, logprobs if params.logprobs is not None else [], None, "stop" if ended else "length")

    @torch.inference_mode()
    def _drawn(self, ask: Ask, params: SamplingParams) -> Got:
        got, ends = Got(finish_reason="length"), set(params.stop_token_ids) | (set() if params.ignore_eos else set(EOS))
        for position in range(ask.max_tokens):
            logits = self._model(torch.tensor([[*ask.prompt, *got.tokens]])).logits[:, -1]
            banned = banned_before(params, position, EOS)
            (drawn,) = sample(logits, [SamplingRow(params, position, ask.prompt, array("I", got.tokens), banned)])
            got.tokens.append(drawn.token_id)
            got.logprobs += [drawn.logprobs] if drawn.logprobs else []
            if drawn.token_id in ends:
                got.finish_reason = "stop"
                break
        return got

    @torch.inference_mode()
    def _echo(self, ask: Ask, top: int) -> list[PositionLogprobs | None]:
        logits = self._model(torch.tensor([ask.prompt])).logits[0]
        return [None, *prompt_logprobs(logits[:-1], ask.prompt[1:], top)]


@cache
def oracle_of(folder: Path) -> Oracle:
    """The oracle shared by all examples."""
    return Oracle(folder)
