"""Fresh starts with small pools: no request may take long, and equal prompts get equal answers. `make fresh-starts`.

Each start has two new replicas of the demo model, with 64 to 256 blocks and rates measured anew, and a new router; all
talk over sockets, in this process and without Ray or HTTP, which would take most of the time. Eight clients ask at the
same time. A cluster once stood still for good in one of fifteen such starts, with every replica idle.
"""

import argparse
import asyncio
import contextlib
import logging
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from homing.kvcache.config import KvCacheSettings
from homing.kvcache.hashing import token_bytes
from homing.replica.demo import demo_model_path
from homing.replica.messages import SamplingParams
from homing.router.backend import GenerationRequest
from homing.router.config import RouterSettings
from homing.router.replicas.service import RouterService

from ..replica.clients import SEED, served
from ..router.fakes import Reading

BLOCK = 16
CLIENTS = 8
#: A request that takes longer is reported, with the state of the router.
LIMIT_S = 3.0
#: Ends a request that stands still.
GIVEN_UP_S = 20.0
PHRASE = (11, 12, 13, 14, 15)

Prompt = tuple[int, ...]


@dataclass
class Outcome:
    """What one start showed."""

    requests: int = 0
    slowest_s: float = 0.0
    faults: list[str] = field(default_factory=list)


class Asker:
    """The clients of one router."""

    def __init__(self, service: RouterService, seed: int) -> None:
        self.outcome = Outcome()
        self._service = service
        self._seed = seed
        self._answers: dict[Prompt, list[int]] = {}

    async def ask_until(self, end: float, client: int) -> None:
        rng = Random(1000 * self._seed + client)
        while time.monotonic() < end and not self.outcome.faults:
            prompt = (100 + rng.randrange(60), *PHRASE * rng.randrange(5, 60))
            await self._ask(prompt, rng.randrange(5, 60))

    async def _ask(self, prompt: Prompt, tokens: int) -> None:
        request = GenerationRequest(
            trace_id="fresh",
            token_ids=token_bytes(prompt),
            sampling=SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True),
        )
        began, answer, slow = time.monotonic(), list[int](), ""
        reading = Reading(self._service.generate(request))
        reported = asyncio.get_running_loop().call_later(LIMIT_S, lambda: self._report(request))
        try:
            async with asyncio.timeout(GIVEN_UP_S):
                async for delta in reading:
                    answer += delta.token_ids
        except TimeoutError:
            slow = "given up"
            reading.stream.cancel()
        reported.cancel()
        took_s = time.monotonic() - began
        self.outcome.requests += 1
        self.outcome.slowest_s = max(self.outcome.slowest_s, took_s)
        if slow or took_s > LIMIT_S:
            self.outcome.faults.append(f"a request of {len(prompt)} tokens took {took_s:.1f} s {slow}")
        known = self._answers.setdefault(prompt, answer)
        if known[: len(answer)] != answer[: len(known)]:
            self.outcome.faults.append(f"two answers to {prompt[:1]}: {known} and {answer}")
        self._answers[prompt] = max(known, answer, key=len)

    def _report(self, request: GenerationRequest) -> None:
        view = self._service.view()
        self.outcome.faults.append(f"waiting {view.waiting}, in flight {view.in_flight}, {view.counters}")
        self.outcome.faults += [str(replica) for replica in view.replicas]
        self.outcome.faults.append(str(self._service.explain(request)))


async def try_start(seed: int, seconds: float) -> Outcome:
    """Start, ask for so many seconds, and stop."""
    rng = Random(seed)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        descriptions = []
        for number in range(2):
            ipc_dir = folder / str(number)
            ipc_dir.mkdir()
            pool = {"num_kv_blocks": rng.choice((64, 96, 128, 256)), "block_size": BLOCK}
            running = await asyncio.to_thread(
                stack.enter_context, served(demo_model_path(), ipc_dir, kvcache=pool, replica_id=f"r{number}")
            )
            descriptions.append(running.description)
        service = RouterService(RouterSettings(), KvCacheSettings(block_size=BLOCK), router_id="fresh", rng=rng)
        asker = Asker(service, seed)
        service.apply_membership(descriptions, SEED)
        await service.until_exact()
        end = time.monotonic() + seconds
        await asyncio.gather(*(asker.ask_until(end, client) for client in range(CLIENTS)))
        service.check()
        if service.counters.stalls_queue + service.counters.stalls_idle_replica + service.counters.stalls_lost:
            asker.outcome.faults.append(f"stood still: {service.counters}")
        service.close()
    return asker.outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=5.0, help="of requests per start")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    outcomes: list[Outcome] = []
    for seed in range(options.seed, options.seed + options.starts):
        began = time.monotonic()
        outcome = asyncio.run(try_start(seed, options.seconds))
        outcomes.append(outcome)
        print(f"start {seed}: {outcome.requests} requests, slowest {outcome.slowest_s:.2f} s", end="")
        print(f", {time.monotonic() - began:.1f} s in all", flush=True)
        print("".join(f"  {fault}\n" for fault in outcome.faults), end="")
    requests, slowest_s = sum(each.requests for each in outcomes), max(each.slowest_s for each in outcomes)
    faulty = sum(bool(each.faults) for each in outcomes)
    print(f"{len(outcomes)} starts, {requests} requests, slowest {slowest_s:.2f} s, {faulty} starts with faults")
    return int(faulty > 0)


if __name__ == "__main__":
    sys.exit(main())
