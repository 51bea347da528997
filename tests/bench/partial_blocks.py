"""Measure what copying inside blocks gains: prompt tokens that need no computing, and what a copy costs instead.

    python tests/bench/partial_blocks.py [--seed N]

The first table replays a synthetic chat workload through the prefix cache alone, with and without copying; the cache is
large enough to keep everything. The second compares, on the demo model and one thread, the CPU time of a copied token
with that of a computed one. The third shows the cost of a lookup that finds nothing.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from random import Random
from statistics import median
from time import thread_time_ns

import torch

from homing.kvcache.block_index import CacheStats
from homing.kvcache.hashing import BlockHash, BlockHasher, token_bytes
from homing.kvcache.prefix_cache import PrefixCache
from homing.replica.attention.paged import KvPool
from homing.replica.config import ReplicaSettings
from homing.replica.demo import demo_model_path
from homing.replica.engine.step_plan import BlockCopy, PlanRow, lay_out, plan_of_rows
from homing.replica.execute.runner import ModelRunner
from homing.replica.kernels.base import TorchKernels
from homing.replica.models.loading import TORCH_DTYPES

ROOT = BlockHash(b"root-of-a-tenant")
BLOCK_SIZES = (16, 64, 256)
VOCABULARY = 50_000


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation: its prompt and its answer."""

    prompt: list[int]
    answer: list[int]


def chat(random: Random) -> Iterator[Turn]:
    """400 conversations of 1 to 5 turns under 12 system prompts; of five turns, one is repeated and one reworded."""

    def tokens(least: int, most: int) -> list[int]:
        return [random.randrange(VOCABULARY) for _ in range(random.randint(least, most))]

    systems = [tokens(50, 900) for _ in range(12)]
    for _ in range(400):
        history = list(random.choice(systems))
        for _ in range(random.randint(1, 5)):
            question, answer = tokens(10, 150), tokens(20, 300)
            yield Turn(history + question, answer)
            again = random.random()
            if again < 0.2:
                answer = tokens(20, 300)
                yield Turn(history + question, answer)
            elif again < 0.4:
                question = question[: len(question) // 2] + tokens(5, 60)
                yield Turn(history + question, answer)
            history += question + answer


def replay(turns: list[Turn], block_size: int, *, copying: bool) -> CacheStats:
    longest = max(len(turn.prompt) + len(turn.answer) for turn in turns)
    blocks = sum(-(-(len(turn.prompt) + len(turn.answer)) // block_size) for turn in turns) + longest
    cache = PrefixCache(blocks, block_size, partial_block_reuse=copying)
    hasher = BlockHasher(block_size, seed=7)
    for turn in turns:
        prompt = token_bytes(turn.prompt)
        match = cache.match(ROOT, hasher.chain(ROOT, prompt), prompt, len(turn.prompt))
        # The KV of an answer's last token is never computed.
        whole = token_bytes([*turn.prompt, *turn.answer[:-1]])
        hashes = hasher.chain(ROOT, whole)
        table = cache.acquire(match, -(-len(whole) // (4 * block_size)) - len(match.blocks))
        assert table is not None, "the cache keeps everything"
        cache.commit(table[: len(hashes)], 0, ROOT, hashes, whole[: len(hashes) * block_size * 4])
        cache.release(table)
    return cache.counters


def cpu_us(work: Callable[[], object], repeats: int = 30) -> float:
    runs = []
    for _ in range(repeats):
        begin = thread_time_ns()
        work()
        runs.append(thread_time_ns() - begin)
    return median(runs) / 1000


def print_shares(seed: int) -> None:
    turns = list(chat(Random(seed)))
    print(f"{len(turns)} requests of {sum(len(turn.prompt) for turn in turns) // len(turns)} prompt tokens on average")
    print("block   computed, whole blocks only   computed, with copies   copied per request")
    for size in BLOCK_SIZES:
        without, copying = replay(turns, size, copying=False), replay(turns, size, copying=True)
        queries = copying.query_tokens
        shares = [(queries - counters.hit_tokens) / queries for counters in (without, copying)]
        copied = copying.partial_hit_tokens / len(turns)
        print(f"{size:5}   {shares[0]:27.1%}   {shares[1]:21.1%}   {copied:18.1f}")


def print_copy_cost() -> None:
    torch.set_num_threads(1)
    print("\nblock   computed, µs a token   one copy of half a block, µs   µs a token   8 copies in a step, µs a token")
    for size in BLOCK_SIZES:
        runner = ModelRunner(ReplicaSettings(device="cpu"), demo_model_path(), size)
        runner.allocate_kv(40)
        table = list(range(1, 2 + 256 // size))
        prefill = cpu_us(partial(runner.forward, plan_of_rows(0, [PlanRow([1] * 256, 0, table)])))
        pool = KvPool(runner.spec, 40, size, TORCH_DTYPES[runner.spec.dtype], runner.device)
        tokens = size // 2
        one, eight = (_copy_us(pool, count, tokens) for count in (1, 8))
        print(f"{size:5}   {prefill / 256:20.1f}   {one:28.1f}   {one / tokens:10.2f}   {eight / (8 * tokens):30.2f}")


def _copy_us(pool: KvPool, count: int, tokens: int) -> float:
    """Compute the slots from the plan and copy them, as the runner does."""
    copies = [BlockCopy(2 + place, 20 + place, tokens) for place in range(count)]
    plan = plan_of_rows(0, [PlanRow([1], 0, [1])], copies=copies)
    kernels = TorchKernels()
    return cpu_us(lambda: pool.copy(torch.from_numpy(lay_out(plan, pool.block_size).copied_slots), kernels), 300)


def print_look_up_cost() -> None:
    hasher = BlockHasher(16, seed=7)
    print("\nlook-up that finds nothing, µs   copying off   copying on")
    for blocks in (1, 64, 2_048):
        wanted = token_bytes(range(16 * blocks))
        hashes = hasher.chain(ROOT, wanted)
        costs = []
        for copying in (False, True):
            cache = PrefixCache(1_100, 16, partial_block_reuse=copying)
            _fill(cache, hasher)
            costs.append(cpu_us(partial(cache.match, ROOT, hashes, wanted, 16 * blocks), 2_000))
        print(f"{blocks:25} blocks   {costs[0]:11.2f}   {costs[1]:10.2f}")


def _fill(cache: PrefixCache, hasher: BlockHasher) -> None:
    """Add a thousand one-block prompts of one tenant, without common first tokens."""
    for first in range(1, 1_001):
        tokens = token_bytes([VOCABULARY + first] * 16)
        table = cache.allocate(1)
        assert table is not None
        cache.commit(table, 0, ROOT, hasher.chain(ROOT, tokens), tokens)
        cache.release(table)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what copying inside blocks gains.")
    parser.add_argument("--seed", type=int, default=1, help="seed of the workload")
    print_shares(parser.parse_args().seed)
    print_copy_cost()
    print_look_up_cost()
    return 0


if __name__ == "__main__":
    sys.exit(main())
