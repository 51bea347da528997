"""The base class of other routers' policies: none holds requests back, and each counts its own requests.

Their engines start requests in the order of arrival.
"""

from abc import abstractmethod
from collections.abc import Sequence
from random import Random

from .....replica.messages import ReplicaDescription
from .....router.routing.policy.base import SATURATED, Candidate, Decision, Policy, Prompt


class Peer(Policy):
    """Counts this router's requests in flight at each replica."""

    #: Whether it notices that an engine restarted at the same address.
    notices_restarts = False

    def __init__(self) -> None:
        self._in_flight: dict[str, set[int]] = {}

    def join(self, description: ReplicaDescription) -> None:
        self._in_flight[description.replica_id] = set()

    def leave(self, replica: str) -> None:
        del self._in_flight[replica]

    def restarted(self, replica: str) -> None:
        """The engine restarted and numbers its events from 0; called unless `notices_restarts`."""

    def booked(self, replica: str, request_id: int, prompt: Prompt) -> None:
        self._in_flight[replica].add(request_id)

    def ended(self, replica: str, request_id: int) -> None:
        if replica in self._in_flight:
            self._in_flight[replica].discard(request_id)

    def requests(self, candidate: Candidate) -> int:
        """Number of this router's requests in flight at the candidate."""
        return len(self._in_flight[candidate.replica_id])

    def obstacle(self, prompt: Prompt, candidate: Candidate) -> str | None:
        """As ours, but a full engine gets every request at once."""
        found = super().obstacle(prompt, candidate)
        return None if found == SATURATED else found

    def consider(self, prompt: Prompt, candidates: Sequence[Candidate], rng: Random) -> Decision:
        usable = self.usable(prompt, candidates)
        if not usable:
            return self.choose(prompt, candidates, None, "")
        chosen, reason = self.pick(prompt, usable, rng)
        return self.choose(prompt, candidates, chosen, reason)

    @abstractmethod
    def pick(self, prompt: Prompt, usable: Sequence[Candidate], rng: Random) -> tuple[Candidate, str]:
        """Choose one of the `usable` candidates, and say why. There is at least one; they are in order of joining."""


def least(usable: Sequence[Candidate], costs: Sequence[float], rng: Random) -> Candidate:
    """The candidate with the lowest cost; ties are broken at random."""
    lowest = min(costs)
    tied = [candidate for candidate, cost in zip(usable, costs, strict=True) if cost == lowest]
    return tied[0] if len(tied) == 1 else rng.choice(tied)


def text_hashes(prompt: Prompt) -> Sequence[int]:
    """The prompt's block hashes for a router that sees only text, without tenants and adapters."""
    return prompt.hashes if prompt.text_hashes is None else prompt.text_hashes
