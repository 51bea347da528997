"""Candidates for policies, and a router that consults a policy through the production placement."""

from collections.abc import Sequence
from random import Random

from homing.cluster.lab.simulate.policies import POLICIES
from homing.router.backend import Explanation, FeedState
from homing.router.routing.placement import Placement
from homing.router.routing.policy.base import Candidate, Decision, Policy, Prompt

from ...fakes import BLOCK, description_of, load_of

PROMPT = Prompt(tokens=1000, blocks=62, block_size=BLOCK, hashes=range(62))


def candidate(
    name: str,
    held: int = 0,
    *,
    expected: int = 0,
    feed: FeedState = FeedState.LIVE,
    excluded: bool = False,
    **load: object,
) -> Candidate:
    return Candidate(
        replica_id=name,
        feed=feed,
        load=load_of(**load),
        held_blocks=held,
        expected_blocks=max(held, expected),
        excluded=excluded,
    )


def chosen(policy: Policy, candidates: list[Candidate], prompt: Prompt = PROMPT, seed: int = 0) -> str | None:
    taken = policy.decide(prompt, candidates, Random(seed)).chosen
    return taken.replica_id if taken else None


SILENCE_S = 3.0
NAMES = ["r0", "r1", "r2"]
SLOTS = 100


class Router:
    """A placement that places one request after the other, by default on three replicas."""

    def __init__(self, policy: str, *, replicas: Sequence[str] = NAMES, seed: int = 0, block_size: int = BLOCK) -> None:
        self.block_size = block_size
        self.last_id = 0
        self.placement = Placement(POLICIES[policy](), router_id="router", silence_s=SILENCE_S, rng=Random(seed))
        for name in replicas:
            self.join(name)

    def join(self, name: str) -> None:
        self.placement.join(
            description_of(name, max_running_requests=SLOTS, num_blocks=5000, max_batched_tokens=8192), 0.0
        )
        self.placement.set_feed(name, FeedState.LIVE)

    def prompt(self, hashes: Sequence[int], now: float = 0.0, tail: int = 7) -> Prompt:
        tokens = len(hashes) * self.block_size + tail
        return Prompt(tokens=tokens, blocks=len(hashes), block_size=self.block_size, hashes=hashes, now=now)

    def decide(
        self, hashes: Sequence[int], *, now: float = 0.0, tail: int = 7, excluded: tuple[str, ...] = ()
    ) -> Decision:
        prompt = self.prompt(hashes, now, tail)
        return self.placement.decide(prompt, self.placement.candidates(hashes, excluded, now))

    def explain(self, hashes: Sequence[int], *, tail: int = 7) -> Explanation:
        return self.placement.explain(self.prompt(hashes, 0.0, tail), self.placement.candidates(hashes, (), 0.0))

    def send(
        self, hashes: Sequence[int], *, now: float = 0.0, tail: int = 7, excluded: tuple[str, ...] = ()
    ) -> tuple[str, int]:
        """Place a request; return its replica and its id."""
        decision = self.decide(hashes, now=now, tail=tail, excluded=excluded)
        assert decision.chosen is not None, "the request is held"
        self.last_id += 1
        self.placement.book(self.last_id, decision, hashes, now)
        return decision.chosen.replica_id, self.last_id


def chain(group: int, length: int) -> list[int]:
    return [group * 1000 + place for place in range(length)]
