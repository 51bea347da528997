"""The policies that most proxies offer: round robin, random, fewest requests, consistent hashing."""

from collections.abc import Sequence
from hashlib import blake2b
from random import Random

from .....router.routing.policy.base import Candidate, Decision, Prompt
from .base import Peer, least, text_hashes


class PlainRoundRobin(Peer):
    """Round robin over the list of replicas."""

    name = "rr"

    def __init__(self) -> None:
        super().__init__()
        self._turn = 0

    def pick(self, prompt: Prompt, usable: Sequence[Candidate], rng: Random) -> tuple[Candidate, str]:
        return usable[self._turn % len(usable)], "its turn"

    def decide(self, prompt: Prompt, candidates: Sequence[Candidate], rng: Random) -> Decision:
        decision = self.consider(prompt, candidates, rng)
        self._turn += decision.row is not None
        return decision


class RandomReplica(Peer):
    """Uniformly at random."""

    name = "random"

    def pick(self, prompt: Prompt, usable: Sequence[Candidate], rng: Random) -> tuple[Candidate, str]:
        return rng.choice(usable), "drawn at random"


class LeastRequests(Peer):
    """Fewest requests in flight, ties broken at random; most proxies call it least-loaded."""

    name = "least-requests"

    def pick(self, prompt: Prompt, usable: Sequence[Candidate], rng: Random) -> tuple[Candidate, str]:
        return least(usable, [self.requests(each) for each in usable], rng), "fewest requests of this router"


class ConsistentHash(Peer):
    """Rendezvous hashing of the prompt's first two blocks (1,024 tokens of a Mooncake trace)."""

    name = "hash"
    head_blocks = 2

    def pick(self, prompt: Prompt, usable: Sequence[Candidate], rng: Random) -> tuple[Candidate, str]:
        head = repr(tuple(text_hashes(prompt)[: self.head_blocks]))

        def weight(candidate: Candidate) -> bytes:
            return blake2b(f"{candidate.replica_id} {head}".encode(), digest_size=8).digest()

        return max(usable, key=weight), "highest hash of the first blocks"


POLICIES = (PlainRoundRobin, RandomReplica, LeastRequests, ConsistentHash)
