"""Round robin."""

from collections.abc import Sequence
from random import Random

from .base import Candidate, Decision, Policy, Prompt


class RoundRobin(Policy):
    """Each replica in turn, in order of names, regardless of load and cache."""

    name = "round-robin"

    def __init__(self) -> None:
        self._last = ""

    def consider(self, prompt: Prompt, candidates: Sequence[Candidate], rng: Random) -> Decision:
        usable = sorted(self.usable(prompt, candidates), key=lambda candidate: candidate.replica_id)
        later = (candidate for candidate in usable if candidate.replica_id > self._last)
        chosen = next(later, usable[0]) if usable else None
        return self.choose(prompt, candidates, chosen, "its turn")

    def decide(self, prompt: Prompt, candidates: Sequence[Candidate], rng: Random) -> Decision:
        decision = self.consider(prompt, candidates, rng)
        if decision.chosen is not None:
            self._last = decision.chosen.replica_id
        return decision


POLICIES = (RoundRobin,)
