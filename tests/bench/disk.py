"""Measure what blocks on disk gain after a restart: time to read one against computing it, and the hits that are back.

    python tests/bench/disk.py MODEL [--folder FOLDER] [--rounds N]

Prompts of 32 blocks are computed on one thread, and kept in a file in FOLDER; then an empty pool is filled from it, and
compared byte for byte. MODEL is made if it is missing (`engine_model.py`: 125M parameters, bfloat16). The page cache is
bypassed where the file system allows it.
"""

import argparse
import os
import shutil
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time

import torch
from engine_model import VOCABULARY, make_model

from homing.kvcache.hashing import BlockHash, BlockHasher, token_bytes
from homing.kvcache.prefix_cache import PrefixCache
from homing.replica.config import ReplicaSettings
from homing.replica.disk.file_format import Identity
from homing.replica.disk.folder import open_rank_file
from homing.replica.disk.keeper import IDLE_BLOCKS, DiskKeeper
from homing.replica.engine.step_plan import PlanRow, plan_of_rows
from homing.replica.execute.runner import ModelRunner

ROOT, BLOCK_SIZE = BlockHash(b"root-of-a-tenant"), 16
PROMPTS, PROMPT_BLOCKS = 24, 32
HASHER = BlockHasher(BLOCK_SIZE, seed=7)


class Nobody:
    """Nobody listens to the cache's events."""

    def stored(self, *event: object) -> None:
        """A block was cached."""

    def removed(self, *event: object) -> None:
        """A block was evicted."""

    def cleared(self) -> None:
        """All were."""


@dataclass(slots=True, frozen=True)
class Round:
    """Seconds per block, wall clock, and of the processor in brackets; and the share of hits after the restart."""

    compute: tuple[float, float]
    keep: tuple[float, float]
    restore: tuple[float, float]
    hits: float


def timed(work) -> tuple[float, float]:
    wall, processor = perf_counter(), process_time()
    work()
    count = PROMPTS * PROMPT_BLOCKS
    return (perf_counter() - wall) / count, (process_time() - processor) / count


class Replica:
    """A pool with a cache, and the file that it is kept in."""

    def __init__(self, runner: ModelRunner, folder: str) -> None:
        assert runner.pool is not None
        self.runner, self.pool, self.failures = runner, runner.pool, Counter[str]()
        identity = Identity(
            model="bench", root="", seed="", layout="", block_size=BLOCK_SIZE, block_bytes=self.pool.block_bytes
        )
        self.file, _ = open_rank_file(folder, 1 << 30, identity)
        self.keeper = DiskKeeper(self.file, Nobody(), self.pool.copy_out, self.failures)
        self.cache = PrefixCache(PROMPTS * PROMPT_BLOCKS + 1, BLOCK_SIZE, listener=self.keeper)

    def restore(self) -> None:
        self.keeper.restore(self.cache, self.pool.copy_in)

    def found(self, prompt: list[int]) -> int:
        ids = token_bytes(prompt)
        return len(self.cache.match(ROOT, HASHER.chain(ROOT, ids), ids, len(prompt) + 1).blocks)

    def compute(self, prompt: list[int]) -> None:
        table = self.cache.allocate(PROMPT_BLOCKS)
        assert table is not None
        self.runner.forward(plan_of_rows(0, [PlanRow(prompt, 0, [block.block_id for block in table])]))
        ids = token_bytes(prompt)
        self.cache.commit(table, 0, ROOT, HASHER.chain(ROOT, ids), ids)
        self.cache.release(table)

    def keep(self) -> None:
        assert self.keeper._worker is not None
        while self.keeper.pending:
            if not self.keeper.work(IDLE_BLOCKS):
                self.keeper._worker.wait_for_end(1.0)
        self.keeper._worker.wait(60.0)
        self.keeper.work(0)

    def contents(self, prompt: list[int]) -> list[bytes]:
        """The KV of a prompt's blocks."""
        data = memoryview(bytearray(self.pool.block_bytes))
        contents = []
        for block_hash in HASHER.chain(ROOT, token_bytes(prompt)):
            if block := self.cache.block_of(block_hash):
                self.pool.copy_out(block.block_id, data)
                contents.append(bytes(data))
        return contents


def one_round(runner: ModelRunner, folder: str, random: Random) -> Round:
    prompts = [[random.randrange(3, VOCABULARY) for _ in range(PROMPT_BLOCKS * BLOCK_SIZE)] for _ in range(PROMPTS)]
    first = Replica(runner, folder)
    first.restore()
    compute = timed(lambda: [first.compute(prompt) for prompt in prompts])
    keep = timed(first.keep)
    contents = [first.contents(prompt) for prompt in prompts]
    first.keeper.close()
    assert not first.failures, f"the disk failed: {dict(first.failures)}"
    for block in range(first.pool.num_blocks):
        first.pool.copy_in(block, memoryview(bytearray(first.pool.block_bytes)))

    again = Replica(runner, folder)
    restore = timed(again.restore)
    found = sum(map(again.found, prompts))
    assert [again.contents(prompt) for prompt in prompts] == contents, "other bytes came back"
    bypassed = again.file.bypasses_page_cache
    again.keeper.close()
    again.file.path.unlink()
    if not bypassed:
        print("(the page cache is not bypassed here)")
    return Round(compute, keep, restore, found / (PROMPTS * PROMPT_BLOCKS))


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what blocks on disk gain after a restart.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--folder", help="on the disk to measure; default: a temporary one in the current folder")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runner = ModelRunner(ReplicaSettings(device="cpu"), make_model(arguments.model), BLOCK_SIZE)
    runner.allocate_kv(PROMPTS * PROMPT_BLOCKS + 1)
    with TemporaryDirectory(dir=Path(arguments.folder or ".").resolve()) as folder:
        rounds = [one_round(runner, folder, Random(seed)) for seed in range(arguments.rounds)]
        free = shutil.disk_usage(folder).free
    assert runner.pool is not None
    print(
        f"{PROMPTS * PROMPT_BLOCKS} blocks of {runner.pool.block_bytes:,} bytes, medians of {len(rounds)} rounds,",
        end=" ",
    )
    print(f"load {os.getloadavg()[0]:.1f}, {free >> 30} GiB free")
    computing = median(each.compute[0] for each in rounds), median(each.compute[1] for each in rounds)
    print("a block     wall µs   share   CPU µs   share")
    for name in ("compute", "keep", "restore"):
        wall, processor = (median(getattr(each, name)[place] for each in rounds) for place in (0, 1))
        shares = wall / computing[0], processor / computing[1]
        print(f"{name:9} {wall * 1e6:9.0f} {shares[0]:7.3f} {processor * 1e6:8.0f} {shares[1]:7.3f}")
    print(f"hits after the restart: {min(each.hits for each in rounds):.1%} of those before")
    return 0


if __name__ == "__main__":
    sys.exit(main())
