"""llm-d's weighted scorers: prefix 3, queue 2, KV utilisation 2. Deployments may choose other weights."""

from collections import deque
from collections.abc import Sequence
from random import Random

from .....events.wire.messages import LoadReport
from .....replica.messages import ReplicaDescription
from .....router.routing.expected_blocks import Expectation, ExpectedBlocks
from .....router.routing.policy.base import Candidate, Decision, Prompt
from .base import Peer, least

PREFIX_WEIGHT = 3.0
QUEUE_WEIGHT = 2.0
KV_WEIGHT = 2.0
SPECULATIVE_S = 2.0


class LlmD(Peer):
    """Chooses the highest sum of scores; ties are broken at random.

    Prefix: the share of the prompt's blocks held, by events and, for two seconds, by requests just sent there. Queue:
    from 0 for the longest waiting queue to 1 for the shortest. KV utilisation: the free share. Both as last reported.
    """

    name = "llm-d"
    notices_restarts = True  # an assumption

    def __init__(self) -> None:
        super().__init__()
        self._speculative: dict[str, ExpectedBlocks] = {}
        self._until: deque[tuple[float, ExpectedBlocks, Expectation]] = deque()  #: when each expectation ends, in order
        self._queue: dict[str, int] = {}
        self._used: dict[str, float] = {}

    def join(self, description: ReplicaDescription) -> None:
        super().join(description)
        self._speculative[description.replica_id] = ExpectedBlocks()
        self._queue[description.replica_id], self._used[description.replica_id] = 0, 0.0

    def leave(self, replica: str) -> None:
        super().leave(replica)
        del self._queue[replica], self._used[replica], self._speculative[replica]

    def decide(self, prompt: Prompt, candidates: Sequence[Candidate], rng: Random) -> Decision:
        while self._until and self._until[0][0] <= prompt.now:
            _, expected, gone = self._until.popleft()
            expected.withdraw(gone)
        return self.consider(prompt, candidates, rng)

    def pick(self, prompt: Prompt, usable: Sequence[Candidate], rng: Random) -> tuple[Candidate, str]:
        held = {
            each.replica_id: self._speculative[each.replica_id].extended(prompt.hashes, each.held_blocks)
            for each in usable
        }
        queues = [self._queue[each.replica_id] for each in usable]
        longest, spread = max(queues), max(queues) - min(queues)
        costs = []
        for candidate, waiting in zip(usable, queues, strict=True):
            prefix = held[candidate.replica_id] / len(prompt.hashes) if prompt.hashes else 0.0
            queue = (longest - waiting) / spread if spread else 1.0
            free = 1.0 - self._used[candidate.replica_id]
            costs.append(-(PREFIX_WEIGHT * prefix + QUEUE_WEIGHT * queue + KV_WEIGHT * free))
        return least(usable, costs, rng), f"highest score, {-min(costs):.2f}"

    def booked(self, replica: str, request_id: int, prompt: Prompt) -> None:
        super().booked(replica, request_id, prompt)
        sent = Expectation(chain=prompt.hashes, start=0)
        self._speculative[replica].expect(sent)
        self._until.append((prompt.now + SPECULATIVE_S, self._speculative[replica], sent))

    def report(self, replica: str, report: LoadReport) -> None:
        self._queue[replica] = report.waiting
        self._used[replica] = 1.0 - report.free_blocks / max(1, report.total_blocks)


POLICIES = (LlmD,)
