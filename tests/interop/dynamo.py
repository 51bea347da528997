"""Dynamo's own indexer on our frames: does it promise what a request would find in the cache?

Two replicas with small caches serve prompts of four tenants, evict, reset and restart; a tenth of the messages is lost
on the way. After each round the indexer is asked for prompts of all tenants. Run by tests.interop.run in Dynamo's
environment. A replica that restarts is registered as a new worker, as Dynamo's discovery does. Hashes are sent as
numbers: Dynamo reads no hashes of 16 bytes.
"""

import argparse
import asyncio
import contextlib
import itertools
import sys
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

import zmq
from dynamo._core import SelectionService

from homing.events.config import EventsSettings
from homing.router.tenants.api_keys import Tenants

from .replica import BLOCK_SIZE, LossyLink, Replica

ROUNDS, ASKED = 120, 6
BLOCKS = 60
#: Time for an indexer to show what was published; it only ends a run that hangs.
PATIENCE_S = 30.0
MODEL = "demo"


def tenants() -> list[str]:
    """The salts of callers without a key, with a `cache_salt`, with a key, and with both."""
    known = Tenants()
    nobody, ann = known.of(None), known.of("Bearer ann")
    return [each.decode() for each in (b"", nobody.cache_salt("mine"), ann.cache_salt(None), ann.cache_salt("mine"))]


@dataclass(slots=True)
class Worker:
    """A replica as the indexer knows it."""

    number: int
    replica: Replica
    link: LossyLink

    def record(self) -> dict[str, Any]:
        return {
            "worker_id": self.number,
            "model_name": MODEL,
            "endpoint": "http://127.0.0.1:1",
            "block_size": BLOCK_SIZE,
            "kv_events_endpoints": {0: self.link.address},
            "replay_endpoint": self.replica.endpoints.fixed_replay,
            "max_num_batched_tokens": 2048,
            "total_kv_blocks": BLOCKS,
        }

    def close(self) -> None:
        self.link.close()
        self.replica.close()


class Fleet:
    """Replicas and the indexer that follows them."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.service = SelectionService(indexer_threads=1)
        self.workers: dict[int, Worker] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._settings = EventsSettings(events_preset="dynamo")
        self._epochs = itertools.count(1)
        self._marks = itertools.count(1_000_000, 1000)
        self.lost = 0

    async def stop(self, number: int) -> None:
        await self.service.delete_worker(number)
        worker = self.workers.pop(number)
        self.lost += worker.link.lost
        worker.close()

    async def start(self) -> None:
        """Start a replica with an empty cache. It has published something before the indexer knows it."""
        number = next(self._epochs)
        replica = Replica(self._settings, epoch=number, blocks=BLOCKS)
        link = LossyLink(self._context, replica.endpoints.fixed_events, Random(self.random.random()), loss=0.1)
        worker = self.workers[number] = Worker(number, replica, link)
        replica.compute([1, 2, 3, 4, 5], "before it is known")
        await self.service.upsert_worker(worker.record())

    async def promised(self, tokens: list[int], salt: str) -> dict[int, int]:
        """By replica, the blocks that the indexer expects to be cached."""
        question = {"model_name": MODEL, "token_ids": tokens} | ({"cache_salt": salt} if salt else {})
        scores = (await self.service.overlap_scores(question))["workers"]
        return {each["worker_id"]: each["device_blocks"] for each in scores}

    async def settle(self) -> None:
        """Wait until the indexer has seen everything: until it shows a prompt that comes last and is not lost."""
        for number, worker in self.workers.items():
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    mark = next(self._marks)
                    tokens = list(range(mark, mark + BLOCK_SIZE + 1))
                    worker.replica.compute(tokens, "")
                    for _ in range(20):
                        if (await self.promised(tokens, "")).get(number):
                            break
                        await asyncio.sleep(0.005)
                    else:
                        continue
                    break

    def close(self) -> None:
        for worker in self.workers.values():
            self.lost += worker.link.lost
            worker.close()
        self.service.shutdown()
        self._context.term()


def prompts(random: Random) -> list[list[int]]:
    """Prompts of up to twelve blocks that share prefixes, each with a token more, which every engine computes."""
    made: list[list[int]] = []
    for _ in range(40):
        kept = random.choice(made)[:-1] if made else []
        kept = kept[: BLOCK_SIZE * random.randrange(9)]
        made.append([*kept, *(random.randrange(50_000) for _ in range(BLOCK_SIZE * random.randrange(1, 5))), 7])
    return made


async def compare(random: Random) -> Counter[str]:
    """Count the indexer's promises by how they compare with the caches."""
    found: Counter[str] = Counter()
    salts, texts = tenants(), prompts(random)
    fleet = Fleet(random)
    with contextlib.closing(fleet):
        for _ in range(2):
            await fleet.start()
        for turn in range(1, ROUNDS + 1):
            worker = random.choice([*fleet.workers.values()])
            for _ in range(random.randrange(1, 5)):
                worker.replica.compute(random.choice(texts), random.choice(salts))
            if turn % 20 == 0:
                worker.replica.reset()
                found["resets"] += 1
            if turn % 30 == 0:
                await fleet.stop(worker.number)
                await fleet.start()
                found["restarts"] += 1
            await fleet.settle()
            for _ in range(ASKED):
                tokens, salt = random.choice(texts), random.choice(salts)
                promise = await fleet.promised(tokens, salt)
                for number, each in fleet.workers.items():
                    cached = each.replica.cached_blocks(tokens, salt)
                    found["hits"] += cached > 0
                    found[_verdict(promise.get(number, 0), cached)] += 1
    found["lost messages"] = fleet.lost
    return found


def _verdict(promised: int, cached: int) -> str:
    if promised == cached:
        return "right"
    return "too high" if promised > cached else "too low"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    found = asyncio.run(compare(Random(parser.parse_args().seed)))
    assert found["hits"] > ROUNDS, "hardly anything was cached"
    wrong = found["too high"] + found["too low"]
    print(f"dynamo: {'failed' if wrong else 'passed'}: {dict(found)}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
