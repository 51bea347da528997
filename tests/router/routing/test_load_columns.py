"""Decisions from load columns equal decisions from single candidates."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.events.wire.messages import LoadReport, PrefillCost
from homing.router.backend import Explanation, FeedState
from homing.router.routing.placement import Placement, known_tokens
from homing.router.routing.policy.base import Decision, ManyCandidates, Prompt
from homing.router.routing.policy.explain import explanation_of, reason_of, regret_tokens
from homing.router.routing.policy.registry import make_policy
from homing.router.routing.replica_load import LoadBook
from homing.router.routing.reservations import Reservations

from ..fakes import BLOCK, description_of, report_of

NAMES = [f"r{number}" for number in range(9)]
CHAINS = [[group * 100 + place for place in range(40)] for group in range(3)]


class Pair:
    """Two routers with the same inputs: one always uses columns, the other never."""

    def __init__(self, policy: str, seed: int) -> None:
        self.rng = Random(seed)
        self.now, self.last_id = 0.0, 0
        #: In half of the runs no replica is ever full, by blocks or by waiting requests.
        self.free, self.waiting = self.rng.choice([((0, 20, 60, 300, 900, 1000), (0, 0, 2, 5)), ((900, 1000), (0, 2))])
        self.past: list[tuple[list[Decision], Explanation]] = []
        self.routers = [
            Placement(
                make_policy(policy),
                loads=LoadBook("router", 3.0, many),
                reservations=Reservations(5.0),
                rng=Random(seed),
            )
            for many in (1, 1000)
        ]
        self.in_flight: list[tuple[str, int]] = []
        for name in NAMES:
            self.join(name)

    def join(self, name: str) -> None:
        feed = self.rng.choice([FeedState.LIVE] * 4 + [FeedState.SYNCING, FeedState.STALE])
        for router in self.routers:
            router.join(description_of(name), self.now)
            router.set_feed(name, feed)

    def prompt(self) -> Prompt:
        chain = self.rng.choice(CHAINS)
        keys = (chain[: self.rng.randrange(30)] + [self.rng.getrandbits(40)] * self.rng.randrange(2))[:40]
        tokens = len(keys) * BLOCK + self.rng.randrange(BLOCK)
        session = self.rng.choice([None, "a", "b"])
        return Prompt(
            tokens=max(1, tokens), blocks=len(keys), block_size=BLOCK, hashes=keys, now=self.now, session=session
        )

    def place(self) -> None:
        prompt, excluded = self.prompt(), self.rng.sample(NAMES, self.rng.choice([0, 0, 0, 2]))
        columns, each = (router.candidates(prompt.hashes, excluded, self.now) for router in self.routers)
        decisions = [
            router.decide(prompt, candidates) for router, candidates in zip(self.routers, (columns, each), strict=True)
        ]

        assert isinstance(columns, ManyCandidates) == bool(columns)
        assert list(columns) == list(each)
        assert self.routers[0].explain(prompt, columns) == self.routers[1].explain(prompt, each)
        assert decisions[0].row == decisions[1].row
        assert known_tokens(prompt, columns) == known_tokens(prompt, each)
        if (chosen := decisions[0].chosen) is None:
            return
        assert regret_tokens(prompt, columns, decisions[0]) == regret_tokens(prompt, each, decisions[1])
        assert reason_of(decisions[0], columns, 0) == reason_of(decisions[1], each, 0)
        assert decisions[0].table() == decisions[1].table()
        self.past.append((decisions, explanation_of(decisions[0])))
        self.last_id += 1
        for router, decision in zip(self.routers, decisions, strict=True):
            router.book(self.last_id, decision, prompt.hashes, self.now)
        self.in_flight.append((chosen.replica_id, self.last_id))

    def look_back(self) -> None:
        """A decision is explained when requested, from what was known when it was made."""
        for decisions, explanation in self.past:
            assert [explanation_of(each) for each in decisions] == [explanation] * 2

    def report(self) -> None:
        name, report = self.rng.choice(NAMES), self.loaded()
        for router in self.routers:
            if name in router:
                router.report(name, report, self.now)

    def loaded(self) -> LoadReport:
        rng = self.rng
        free = rng.choice(self.free)
        running = rng.choice([0, 0, 3, 8])
        return report_of(
            step=rng.randrange(1000),
            ts=self.now,
            running=running,
            waiting=rng.choice(self.waiting),
            queued_prefill_tokens=rng.choice([0, 0, 700]),
            free_blocks=free,
            cached_free_blocks=rng.randint(0, free),
            decode_step_s=rng.choice([0.002, 0.01]),
            prefill_cost=PrefillCost(0.001, rng.choice([1e-4, 2e-4]), 1e-9, 1e-10),
            accepted={"router": rng.randint(0, self.last_id)},
        )

    def end(self) -> None:
        if self.in_flight:
            name, request_id = self.in_flight.pop(self.rng.randrange(len(self.in_flight)))
            for router in self.routers:
                router.ended(name, request_id)
                router.finished(50)

    def cache(self) -> None:
        name, chain, length = self.rng.choice(NAMES), self.rng.choice(CHAINS), self.rng.randrange(40)
        for router in self.routers:
            if name in router:
                router.stored(name, chain[:length])
                router.removed(name, chain[length:])

    def change(self) -> None:
        name = self.rng.choice(NAMES)
        if name not in self.routers[0]:
            self.join(name)
            return
        for router in self.routers:
            router.leave(name)
        self.in_flight = [each for each in self.in_flight if each[0] != name]

    def step(self) -> None:
        self.now += self.rng.choice([0.0, 0.01, 0.5])
        for router in self.routers:
            router.reservations.expire(self.now)
        self.rng.choices([self.place, self.report, self.end, self.cache, self.change], weights=[10, 6, 3, 3, 1])[0]()


@pytest.mark.parametrize("policy", ["expected-ttft", "least-loaded"])
@given(seed=st.integers(0, 2**32))
def test_columns_lead_to_the_same_decision_as_candidates_one_by_one(policy: str, seed: int) -> None:
    """Equal to the last bit, including what the policy learns from its decisions, and its random draws."""
    pair = Pair(policy, seed)

    for _ in range(40):
        pair.step()

    pair.look_back()
    for router in pair.routers:
        router.check()
