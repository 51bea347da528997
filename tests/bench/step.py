"""Measure the host's work for a decode step (schedule, plan, land, answer) on a device that computes nothing.

    python tests/bench/step.py [--out FILE] [--profile ROWS | --lookup DTYPE]

Thread CPU time of one step, median of 200, with all rows decoding, in blocks of 16. Steps are launched ahead, so this
must take less time than the device's step, or the device waits. Included: the engine's step, what each rank computes
from a plan before it launches (execute/request_table.py), the load report and the message to the router. Not included:
calls to the device, and sockets.

`--lookup` measures what guessing by prompt lookup (`num_speculative_tokens` 8) gains and costs. An engine on one CPU
thread answers prompts of 192 tokens with 96, alternately with guesses and without; figures are the median CPU time of
the decoding steps. The model has the shape of bench-engine's (125 M parameters), with weights that follow token n with
n + 1. It therefore edits if the prompt has the answer's text with every 20th token changed, and writes new text if the
prompt has none of it. In the worst case, the prompt has the text three tokens at a time, each before another token.
"""

import cProfile
import pstats
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time, thread_time_ns
from typing import Any

import msgspec
import torch
from engine_model import SPECIALS, random_model
from engine_model import VOCABULARY as MODEL_VOCABULARY
from report import Row, arguments, publish

from homing.kvcache.hashing import BlockHash, BlockHasher, join_hashes, token_bytes
from homing.kvcache.prefix_cache import PrefixCache
from homing.replica.config import ReplicaSettings
from homing.replica.engine.engine import Engine
from homing.replica.engine.overlapped import OverlappedEngine
from homing.replica.engine.prompt_lookup import CPU_STEP_TOKENS, PromptLookup
from homing.replica.engine.scheduler import SchedulerLimits
from homing.replica.engine.step_plan import StepPlan
from homing.replica.engine.throughput import SmoothedRates
from homing.replica.execute.request_table import TableMirror
from homing.replica.execute.runner import ModelRunner
from homing.replica.messages import Generate, PositionLogprobs, SamplingParams, TokenBatch

BLOCK_SIZE = 16
VOCABULARY = 151_936
STEPS = 200
ROOT = BlockHash(bytes(16))
HASHER = BlockHasher(BLOCK_SIZE, seed=7)
#: Rows, context, and the goal: the us of a step of Qwen3-0.6B on one H200, computed from its memory bandwidth.
POINTS = ((1, 1_024, None), (64, 1_024, 2_030), (256, 1_024, 7_380), (64, 8_192, 14_300), (256, 8_192, 56_200))

GUESSES, PROMPT, ANSWER, ROUNDS = 8, 192, 96, 5
#: Numbers of concurrent requests with lookup.
BATCHES = (1, 4, 8)


class Drawn:
    """Drawn tokens that are available immediately."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def tokens(self) -> list[int]:
        return self._tokens

    def logprobs(self) -> list[PositionLogprobs]:
        return []


class Nothing:
    """A device that draws the same token for every row."""

    def __init__(self) -> None:
        self._mirror = TableMirror(BLOCK_SIZE)

    def launch(self, plan: StepPlan) -> Drawn:
        self._mirror.delta(plan)
        return Drawn([7] * len(plan.drawn))

    def forward(self, plan: StepPlan) -> torch.Tensor:
        raise AssertionError(f"step {plan.step} was not launched")


def engine_of(rows: int, context: int) -> OverlappedEngine:
    """An engine whose rows are all past their prompts."""
    blocks = rows * 2 * context // BLOCK_SIZE
    engine = OverlappedEngine(
        limits=SchedulerLimits(rows, rows * context, 2 * context),
        vocab_size=VOCABULARY,
        eos_token_ids=(),
        cache=PrefixCache(blocks + 1, BLOCK_SIZE),
        hasher=HASHER,
        executor=Nothing(),
        rates=SmoothedRates(1000.0, 0.01),
        epoch=1,
    )
    random = Random(1)
    for number in range(rows):
        data = token_bytes([random.randrange(VOCABULARY) for _ in range(context)])
        engine.add(
            "r",
            Generate(
                request_id=number,
                token_ids=data,
                prompt_tokens=context,
                root=ROOT,
                block_hashes=join_hashes(HASHER.chain(ROOT, data)),
                sampling=SamplingParams(max_tokens=context, temperature=0.7, seed=number),
            ),
        )
    for _ in range(3):
        step(engine)
    assert engine.scheduler.backlog().running == rows, "some rows wait"
    return engine


def step(engine: OverlappedEngine) -> list[bytes]:
    """Run one step and encode the messages that it sends."""
    result = engine.step()
    told: list[Any] = [TokenBatch(step=result.step, outputs=outputs) for outputs in result.outputs.values()]
    return [msgspec.msgpack.encode(each) for each in [*told, engine.load()]]


def step_us(engine: OverlappedEngine) -> float:
    """Median CPU time of a step, in microseconds."""
    found = []
    for _ in range(STEPS):
        started = thread_time_ns()
        step(engine)
        found.append(thread_time_ns() - started)
    return median(found) / 1000


def counting_model(folder: Path) -> Path:
    """Make a model that follows token n with n + 1: layers add nothing, the head is the embeddings shifted by one."""
    model = random_model()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
        first = len(SPECIALS)
        model.lm_head.weight[first + 1 :] = model.model.embed_tokens.weight[first:-1]
    model.save_pretrained(folder)
    return folder


def edits(start: int) -> list[int]:
    """The text that follows `start` with one token in twenty changed; ends with `start`."""
    return [*(token if token % 20 else token - 2_000 for token in range(start - 10, start + PROMPT - 11)), start]


def unseen(start: int) -> list[int]:
    """A prompt without any of the text that follows `start`; ends with `start`."""
    return list(range(start + 1 - PROMPT, start + 1))


def misleading(start: int) -> list[int]:
    """Runs of three tokens of the text that follows `start`, each before a token that does not; ends with `start`."""
    text = [token for run in range(PROMPT // 4) for token in (*range(start + 3 * run, start + 3 * run + 3), 100)]
    return [*text[: PROMPT - 1], start]


def counting_engine(runner: ModelRunner, prompts: list[list[int]], guesses: int) -> Engine:
    """An engine whose requests are all past their prompts."""
    longest = PROMPT + ANSWER
    engine = Engine(
        limits=SchedulerLimits(len(prompts), len(prompts) * PROMPT, longest, drafted_step_tokens=CPU_STEP_TOKENS),
        vocab_size=MODEL_VOCABULARY,
        eos_token_ids=(),
        cache=PrefixCache(len(prompts) * longest // BLOCK_SIZE + 1, BLOCK_SIZE, enabled=False),
        hasher=HASHER,
        executor=runner,
        rates=SmoothedRates(1000.0, 0.01),
        epoch=1,
        drafter=PromptLookup(guesses) if guesses else None,
    )
    for number, prompt in enumerate(prompts):
        data = token_bytes(prompt)
        request = Generate(
            request_id=number,
            token_ids=data,
            prompt_tokens=PROMPT,
            root=ROOT,
            block_hashes=join_hashes(HASHER.chain(ROOT, data)),
            sampling=SamplingParams(max_tokens=ANSWER, temperature=0.0),
        )
        engine.add("r", request)
    engine.step()
    return engine


def answering_s(runner: ModelRunner, starts: list[int], prompt_of: Callable[[int], list[int]], guesses: int) -> float:
    """CPU seconds until all requests are answered."""
    engine = counting_engine(runner, [prompt_of(start) for start in starts], guesses)
    told: dict[int, list[int]] = {number: [] for number in range(len(starts))}
    started = process_time()
    while engine.has_work:
        for output in engine.step().outputs["r"]:
            told[output.request_id] += output.token_ids
    spent = process_time() - started
    for number, start in enumerate(starts):
        assert told[number] == list(range(start + 2, start + 1 + ANSWER)), f"request {number} got {told[number][:20]}"
    return spent


def lookups(dtype: str) -> Iterator[Row]:
    with TemporaryDirectory() as folder:
        settings = msgspec.convert({"device": "cpu", "dtype": dtype, "max_model_len": 1_024}, ReplicaSettings)
        runner = ModelRunner(settings, counting_model(Path(folder)), BLOCK_SIZE)
    runner.allocate_kv(max(BATCHES) * (PROMPT + ANSWER) // BLOCK_SIZE + 1)
    for prompt_of, gains in ((edits, True), (unseen, False), (misleading, False)):
        for count in BATCHES:
            starts = [5_000 + 1_000 * number for number in range(count)]
            # Alternating and sequential, because all runs use the same blocks; the first round warms up.
            pairs = [[answering_s(runner, starts, prompt_of, each) for each in (0, GUESSES)] for _ in range(1 + ROUNDS)]
            ratio = median(plain / guessed for plain, guessed in pairs[1:])
            name = f"{dtype}, {prompt_of.__name__}, {count} at once"
            if gains:
                yield Row(f"tokens per second, {name}", "times", ratio, 1.5, higher_is_better=True)
            else:
                yield Row(f"longer, {name}", "%", (1 / ratio - 1) * 100, 2)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--profile", type=int, metavar="ROWS", help="profile steps with ROWS rows of 8,192 tokens")
    parser.add_argument("--lookup", metavar="DTYPE", help="measure what prompt lookup gains and costs with this dtype")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.lookup:
        publish(list(lookups(options.lookup)), options.out, ["msgspec", "numpy", "torch"])
        return
    if options.profile:
        engine = engine_of(options.profile, 8_192)
        profile = cProfile.Profile()
        profile.runcall(step_us, engine)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return
    rows = [
        Row(f"host, a step of {count} rows at {context}", "us", step_us(engine_of(count, context)), goal)
        for count, context, goal in POINTS
    ]
    publish(rows, options.out, ["msgspec", "numpy", "torch"])


if __name__ == "__main__":
    main()
