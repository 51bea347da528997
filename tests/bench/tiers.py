"""Measure what a host tier gains: hits, time to first token, steps of other requests, and the cost of a block.

    python tests/bench/tiers.py MODEL [--requests N] [--rounds N] [--kinds KIND...] [--cpu] [--out FILE]

Each kind of traffic (workloads.py) has a working set of three times the pool. It runs through one engine on one thread
with the pool alone, with a host tier for all of it, and with one pool of the joint size, alternating, one prompt at a
time beside a request that decodes. `--cpu` counts the thread's processor time, on a machine that others use.
MODEL is made if it is missing (`engine_model.py`: 125M parameters, bfloat16).
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count, islice
from pathlib import Path
from random import Random
from statistics import mean, median, quantiles

import report
import torch
import workloads
from engine_model import VOCABULARY, make_model

from homing.kvcache.hashing import BlockHash, BlockHasher, join_hashes, token_bytes
from homing.kvcache.host_tier import HostTier
from homing.kvcache.prefix_cache import PrefixCache
from homing.replica.config import ReplicaSettings
from homing.replica.engine.engine import Engine
from homing.replica.engine.host_blocks import HostBlocks
from homing.replica.engine.scheduler import SchedulerLimits
from homing.replica.engine.step_plan import Load, Save
from homing.replica.execute.runner import ModelRunner
from homing.replica.load.startup import CPU_PREFILL_STEP_TOKENS, measure_move, measure_rates
from homing.replica.messages import Generate, SamplingParams

ROOT, BLOCK_SIZE = BlockHash(b"root-of-a-tenant"), 16
HASHER = BlockHasher(BLOCK_SIZE, seed=7)
#: Tokens of an answer, and of each answer that decodes beside it.
ANSWER, BESIDE = 4, 64
#: Blocks whose moves are measured: more than the processor's caches hold.
BLOCKS_MOVED = 600
#: Blocks that the request beside takes of each pool.
BESIDE_BLOCKS = 8


@cache
def tokens_of(block: int) -> tuple[int, ...]:
    random = Random(block)
    return tuple(random.randrange(3, VOCABULARY) for _ in range(BLOCK_SIZE))


def chats(random: Random, requests: int) -> Iterator[workloads.Chain]:
    """Conversations whose next turn comes at random; all share one system prompt."""
    fresh, histories = count(1_000), [list(range(4)) for _ in range(16)]
    for _ in range(requests):
        history = random.choice(histories)
        history += islice(fresh, random.randint(2, 6))
        yield tuple(history)


def documents(random: Random, requests: int) -> Iterator[workloads.Chain]:
    """Questions about a few documents, the first of them most often."""
    fresh, texts = count(1_000_000), [range(1000 * each, 1000 * each + random.randint(16, 60)) for each in range(16)]
    weights = [1 / (rank + 1) ** 0.5 for rank in range(len(texts))]
    for _ in range(requests):
        yield (*random.choices(texts, weights)[0], *islice(fresh, random.randint(1, 2)))


KINDS = {"agents": workloads.agents, "chats": chats, "documents": documents}


@dataclass(slots=True)
class Figures:
    """Of one kind of traffic on one configuration."""

    first_token_s: list[float] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)  #: those in which the request beside decoded
    hits: list[float] = field(default_factory=list)  #: the share of the prompts' tokens, by round
    failures: int = 0

    @property
    def step_p99(self) -> float:
        return quantiles(self.steps_s, n=100)[98]


class Replica:
    """An engine with so many blocks in its pool and in host memory."""

    def __init__(self, runner: ModelRunner, pool: int, host: int, clock: Callable[[], float]) -> None:
        self.clock = clock
        runner.allocate_kv(pool + 1)
        limits = SchedulerLimits(8, 2048, pool * BLOCK_SIZE, prefill_step_tokens=CPU_PREFILL_STEP_TOKENS)
        self.rates = measure_rates(runner, limits, BLOCK_SIZE, clock)
        self.host: HostBlocks | None = None
        if host:
            runner.allocate_host(host)
            block_s = measure_move(runner, clock)
            self.host = HostBlocks(HostTier(host), runner.move, clock, block_s=block_s)
        self.cache = PrefixCache(pool + 1, BLOCK_SIZE, lower=self.host)
        self.engine = Engine(
            limits=limits,
            vocab_size=VOCABULARY,
            eos_token_ids=(),
            cache=self.cache,
            hasher=HASHER,
            executor=runner,
            rates=self.rates,
            epoch=1,
            clock=clock,
            host=self.host,
        )
        self._numbers = 0

    def add(self, prompt: Sequence[int], count: int) -> int:
        self._numbers += 1
        data = token_bytes(prompt)
        hashes = join_hashes(HASHER.chain(ROOT, data))
        sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        request = Generate(
            request_id=self._numbers,
            token_ids=data,
            prompt_tokens=len(prompt),
            root=ROOT,
            block_hashes=hashes,
            sampling=sampling,
        )
        self.engine.add("bench", request)
        return self._numbers

    def run(self, chains: Sequence[workloads.Chain], figures: Figures) -> None:
        random, beside, decodes = Random(1), 0, False
        for chain in chains:
            prompt = [token for block in chain for token in tokens_of(block)] + [3, 4, 5]
            began, wanted, first = self.clock(), self.add(prompt, ANSWER), None
            while True:
                if not beside:
                    beside = self.add([random.randrange(3, VOCABULARY) for _ in range(BLOCK_SIZE)], BESIDE)
                step = self.clock()
                result = self.engine.step()
                now = self.clock()
                ended = False
                for output in result.outputs["bench"]:
                    if output.request_id == wanted:
                        first = now - began if first is None else first
                        ended = output.finish_reason is not None
                    elif decodes:
                        figures.steps_s.append(now - step)
                    if output.request_id == beside:
                        decodes = output.finish_reason is None
                        beside = beside if decodes else 0
                if ended:
                    break
            assert first is not None
            figures.first_token_s.append(first)
        counters = self.engine.load().counters
        figures.hits.append(counters.hit_tokens / counters.query_tokens)
        if self.host is not None:
            figures.failures += sum(self.host.failures.values())


def block_costs(runner: ModelRunner, clock: Callable[[], float]) -> tuple[float, float, float]:
    """Seconds per block to compute, save and load many, none of them in the processor's caches."""
    runner.allocate_kv(BLOCKS_MOVED + 1)
    limits = SchedulerLimits(8, 2048, BLOCKS_MOVED * BLOCK_SIZE, prefill_step_tokens=CPU_PREFILL_STEP_TOKENS)
    rates = measure_rates(runner, limits, BLOCK_SIZE, clock)
    runner.allocate_host(BLOCKS_MOVED)
    saves_s, loads_s = [], []
    for turn in range(4):
        saves = [Save(block + 1, block, 1 + block + turn * BLOCKS_MOVED) for block in range(BLOCKS_MOVED)]
        began = clock()
        runner.move(saves, [])
        saved = clock()
        failed = runner.move([], [Load(save.slot, save.generation, save.block_id) for save in saves])
        loads_s.append((clock() - saved) / BLOCKS_MOVED)
        saves_s.append((saved - began) / BLOCKS_MOVED)
        assert not any(failed), failed
    # The first turn takes the memory from the system.
    return BLOCK_SIZE / rates.prefill_tokens_per_s, median(saves_s[1:]), median(loads_s[1:])


def measure(
    runner: ModelRunner, kind: str, requests: int, rounds: int, clock: Callable[[], float]
) -> dict[str, Figures]:
    """Figures by configuration."""
    found: dict[str, Figures] = {name: Figures() for name in ("pool", "tier", "joint")}
    for number in range(rounds):
        chains = list(islice(KINDS[kind](Random(number), requests), requests))
        working_set = len({block for chain in chains for block in chain})
        pool = max(working_set // 3, max(map(len, chains)) + 1) + BESIDE_BLOCKS
        sizes = {"pool": (pool, 0), "tier": (pool, working_set), "joint": (pool + working_set, 0)}
        for name in (*list(sizes)[number % 3 :], *list(sizes)[: number % 3]):
            Replica(runner, *sizes[name], clock).run(chains, found[name])
        length = mean(map(len, chains)) * BLOCK_SIZE
        print(f"{kind}: {requests} prompts of {length:.0f} tokens, {working_set} blocks, a pool of {pool}", flush=True)
    return found


def main() -> int:
    parser = report.arguments("Measure what a host tier gains.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--requests", type=int, default=120, help="of each kind and round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    parser.add_argument("--cpu", action="store_true", help="count processor time instead of wall-clock time")
    options = parser.parse_args()
    clock = time.thread_time if options.cpu else time.perf_counter
    torch.set_num_threads(1)
    runner = ModelRunner(ReplicaSettings(device="cpu"), make_model(options.model), BLOCK_SIZE)
    compute_s, save_s, load_s = block_costs(runner, clock)
    rows = [
        report.Row("a block: computed", "µs", 1e6 * compute_s),
        report.Row("a block: saved, by computed", "ratio", save_s / compute_s),
        report.Row("a block: loaded, by computed", "ratio", load_s / compute_s, 0.03),
    ]
    Replica(runner, 64, 64, clock).run([(1, 2, 3), (1, 2, 4)], Figures())  # compiles what is compiled on first use
    for kind in options.kinds:
        found = measure(runner, kind, options.requests, options.rounds, clock)
        pool, tier, joint = found["pool"], found["tier"], found["joint"]
        for name, figures in found.items():
            rows.append(report.Row(f"{kind}, {name}: hits", "%", 100 * mean(figures.hits), higher_is_better=True))
            rows.append(report.Row(f"{kind}, {name}: mean TTFT", "ms", 1e3 * mean(figures.first_token_s)))
            rows.append(report.Row(f"{kind}, {name}: step p99", "ms", 1e3 * figures.step_p99))
        share = mean(tier.hits) / mean(joint.hits)
        wait = mean(tier.first_token_s) / mean(pool.first_token_s)
        rows += [
            report.Row(f"{kind}: hits, tier by joint pool", "ratio", share, 0.98, higher_is_better=True),
            report.Row(f"{kind}: mean TTFT, tier by pool", "ratio", wait, 0.4),
            report.Row(f"{kind}: step p99, tier by pool", "ratio", tier.step_p99 / pool.step_p99, 1.03),
            report.Row(f"{kind}: blocks that failed", "number", tier.failures, 0),
        ]
    print(f"load {os.getloadavg()[0]:.1f}")
    report.publish(rows, options.out, ("torch", "xxhash"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
