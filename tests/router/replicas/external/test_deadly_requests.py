"""A prompt that ends the engine that runs it, in front of four engines that are processes of their own."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest

from homing.events.wire.messages import EventEndpoints
from homing.router.backend import TokenDelta
from homing.router.errors import ReplicasDied

from ...fakes import LIMITS, SEED, Reading, description_of, request_of
from .fakes import answer
from .test_external_replica import Cluster, cluster, tokens

__all__ = ["cluster"]  # a fixture

MARK = 666
NAMES = ("b0", "b1", "b2", "b3")
PROGRAM = Path(__file__).with_name("engine_program.py")

Engine = subprocess.Popen[str]


@contextmanager
def engines(after: int) -> Iterator[list[Engine]]:
    command = [sys.executable, str(PROGRAM), str(MARK), str(after)]
    with ExitStack() as stack:
        started = []
        for _ in NAMES:
            engine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            started.append(stack.enter_context(engine))
            stack.callback(engine.kill)
        yield started


def join(cluster: Cluster, started: list[Engine]) -> None:
    members = []
    for name, engine in zip(NAMES, started, strict=True):
        assert engine.stdout is not None
        url, events, replay = json.loads(engine.stdout.readline())
        ends = EventEndpoints(events=events, replay=replay, state="", snapshot="")
        about = description_of(name, request_endpoint=url, external=True, parity=cluster._parity, model=LIMITS)
        members.append(msgspec.structs.replace(about, event_endpoints=ends))
    cluster.service.apply_membership(members, SEED)


@pytest.mark.parametrize("after", [0, 7])
async def test_a_deadly_prompt_ends_two_of_four_engines_and_no_other_request(cluster: Cluster, after: int) -> None:
    """One death may be anything; after the second, the prompt is not sent to a third engine."""
    with engines(after) as started:
        join(cluster, started)
        await cluster.live(*NAMES)
        prompts = {seed: [seed, *range(100)] for seed in range(1, 13)}
        others = {seed: asyncio.create_task(collect(cluster, prompt, seed, 150)) for seed, prompt in prompts.items()}

        with pytest.raises(ReplicasDied, match="died while they ran this request"):
            await collect(cluster, [*range(40), MARK], 99, 20)
        answers = {seed: await other for seed, other in others.items()}
        dead = [engine for engine in started if engine.poll() is not None]

    assert len(dead) == 2
    assert answers == {seed: answer(prompt, seed, 150) for seed, prompt in prompts.items()}
    counters = cluster.service.view().counters
    assert (counters.blamed, counters.failed, counters.suspected > 0) == (1, 1, True)


async def collect(cluster: Cluster, prompt: list[int], seed: int, count: int) -> list[int]:
    stream = cluster.service.generate(request_of(prompt, seed=seed, max_tokens=count))
    deltas: list[TokenDelta] = [delta async for delta in Reading(stream)]
    return tokens(deltas)
