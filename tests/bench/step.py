"""What the host does for a decode step: schedule, plan, land, answer; on a device that computes nothing.

    python tests/bench/step.py [--out FILE] [--profile ROWS]

Thread CPU time of one step, median of 200, all rows decoding, in blocks of 16. Launched
ahead, this must take less than the step itself, or the device waits. In it: the engine's step, what each rank works out
from a plan before it launches (execute/request_table.py), the load report and the message to the router; not in it: the
calls to the device, and sockets.
"""

import cProfile
import pstats
from random import Random
from statistics import median
from time import thread_time_ns
from typing import Any

import msgspec
import torch
from report import Row, arguments, publish

from homing.kvcache.hashing import BlockHash, BlockHasher, join_hashes, token_bytes
from homing.kvcache.prefix_cache import PrefixCache
from homing.replica.engine.overlapped import OverlappedEngine
from homing.replica.engine.scheduler import SchedulerLimits
from homing.replica.engine.step_plan import StepPlan
from homing.replica.engine.throughput import SmoothedRates
from homing.replica.execute.request_table import TableMirror
from homing.replica.messages import Generate, SamplingParams, TokenBatch

BLOCK_SIZE = 16
VOCABULARY = 151_936
STEPS = 200
ROOT = BlockHash(bytes(16))
HASHER = BlockHasher(BLOCK_SIZE, seed=7)
#: Rows, their context, and what a step of Qwen3-0.6B would take one H200 at the bandwidth of its memory: the goal.
POINTS = ((1, 1_024, None), (64, 1_024, 2_030), (256, 1_024, 7_380), (64, 8_192, 14_300), (256, 8_192, 56_200))


class Drawn:
    """Tokens that are there at once."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def tokens(self) -> list[int]:
        return self._tokens


class Nothing:
    """A device that draws the same token for everybody."""

    def __init__(self) -> None:
        self._mirror = TableMirror(BLOCK_SIZE)

    def launch(self, plan: StepPlan) -> Drawn:
        self._mirror.delta(plan)
        return Drawn([7] * len(plan.drawn))

    def forward(self, plan: StepPlan) -> torch.Tensor:
        raise AssertionError(f"step {plan.step} was not launched")


def engine_of(rows: int, context: int) -> OverlappedEngine:
    """All rows past their prompts."""
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
    """One step, and what is told of it."""
    result = engine.step()
    told: list[Any] = [TokenBatch(step=result.step, outputs=outputs) for outputs in result.outputs.values()]
    return [msgspec.msgpack.encode(each) for each in [*told, engine.load()]]


def step_us(engine: OverlappedEngine) -> float:
    """Median CPU time of a step."""
    found = []
    for _ in range(STEPS):
        started = thread_time_ns()
        step(engine)
        found.append(thread_time_ns() - started)
    return median(found) / 1000


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--profile", type=int, metavar="ROWS", help="print where the time goes with so many at 8,192")
    options = parser.parse_args()
    torch.set_num_threads(1)
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
