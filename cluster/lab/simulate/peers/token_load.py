"""Policies based on queued prompt tokens: vllm-router's `kv_aware`, llm-d's token load, and the simplest such rule."""

from abc import abstractmethod
from collections.abc import Sequence
from random import Random

from .....replica.messages import ReplicaDescription
from .....router.routing.policy.base import Candidate, Prompt
from .base import Peer, least


class TokenLoad(Peer):
    """Counts the uncached prompt tokens of this router's requests at each replica that wait for their first token."""

    notices_restarts = True  # an assumption

    def __init__(self) -> None:
        super().__init__()
        self._queued: dict[str, dict[int, int]] = {}
        self._tokens: dict[str, int] = {}
        self._uncached: dict[str, int] = {}  # of the last prompt considered; `booked` follows `decide` directly

    def join(self, description: ReplicaDescription) -> None:
        super().join(description)
        self._queued[description.replica_id], self._tokens[description.replica_id] = {}, 0

    def leave(self, replica: str) -> None:
        super().leave(replica)
        del self._queued[replica], self._tokens[replica]

    def pick(self, prompt: Prompt, usable: Sequence[Candidate], rng: Random) -> tuple[Candidate, str]:
        size = prompt.block_size
        self._uncached = {each.replica_id: max(1, prompt.tokens - each.held_blocks * size) for each in usable}
        costs = [self.cost(each, self._tokens[each.replica_id], self._uncached[each.replica_id]) for each in usable]
        return least(usable, costs, rng), f"lowest cost, {min(costs):g}"

    @abstractmethod
    def cost(self, candidate: Candidate, queued: int, uncached: int) -> float:
        """The cost of a prompt whose `uncached` tokens would be computed after `queued` ones."""

    def booked(self, replica: str, request_id: int, prompt: Prompt) -> None:
        super().booked(replica, request_id, prompt)
        tokens = self._queued[replica][request_id] = self._uncached[replica]
        self._tokens[replica] += tokens

    def started(self, replica: str, request_id: int) -> None:
        if replica in self._queued:
            self._tokens[replica] -= self._queued[replica].pop(request_id, 0)

    def ended(self, replica: str, request_id: int) -> None:
        super().ended(replica, request_id)
        self.started(replica, request_id)


class KvAware(TokenLoad):
    """vllm-router 0.1.17: (new + queued prompt tokens) * (requests in flight + 1)."""

    name = "vllm-kv-aware"

    def cost(self, candidate: Candidate, queued: int, uncached: int) -> float:
        return (uncached + queued) * (self.requests(candidate) + 1)


class QueueAndMisses(TokenLoad):
    """Queued prompt tokens plus twice the prompt's own uncached tokens."""

    name = "queue-2-misses"

    def cost(self, candidate: Candidate, queued: int, uncached: int) -> float:
        return queued + 2 * uncached


class LlmDTokenLoad(TokenLoad):
    """llm-d 0.10's baseline: the fewest queued tokens among replicas that hold 80 % of the prompt, else among all.

    All replicas also count if the best holder's first token would come more than 18 s later than the best overall. This
    time is estimated as queued plus own tokens over the peak prefill rate, here the rate of the replica's warm-up.
    """

    name = "llm-d-token-load"
    affinity = 0.8
    most_penalty_s = 18.0

    def __init__(self) -> None:
        super().__init__()
        self._peak: dict[str, float] = {}

    def join(self, description: ReplicaDescription) -> None:
        super().join(description)
        self._peak[description.replica_id] = description.prefill_tokens_per_s

    def leave(self, replica: str) -> None:
        super().leave(replica)
        del self._peak[replica]

    def pick(self, prompt: Prompt, usable: Sequence[Candidate], rng: Random) -> tuple[Candidate, str]:
        chosen = super().pick(prompt, usable, rng)
        holders = [each for each in usable if prompt.hashes and each.held_blocks >= self.affinity * len(prompt.hashes)]
        if not holders or min(map(self._ttft_s, holders)) - min(map(self._ttft_s, usable)) > self.most_penalty_s:
            return chosen
        return least(holders, [self._tokens[each.replica_id] for each in holders], rng), "holds the prefix"

    def cost(self, candidate: Candidate, queued: int, uncached: int) -> float:
        return queued

    def _ttft_s(self, candidate: Candidate) -> float:
        replica = candidate.replica_id
        return (self._tokens[replica] + self._uncached[replica]) / self._peak[replica]


class LlmDSticky(LlmDTokenLoad):
    """`LlmDTokenLoad` with a penalty of one second."""

    name = "llm-d-sticky"
    most_penalty_s = 1.0


POLICIES = (KvAware, QueueAndMisses, LlmDTokenLoad, LlmDSticky)
