"""The better of two random choices (Mitzenmacher 2001)."""

from collections.abc import Sequence
from random import Random

from .base import Candidate, Decision, Policy, Prompt


class PowerOfTwo(Policy):
    """Draws two replicas at random and takes the one with fewer requests."""

    name = "power-of-two"

    def consider(self, prompt: Prompt, candidates: Sequence[Candidate], rng: Random) -> Decision:
        usable = self.usable(prompt, candidates)
        drawn = rng.sample(usable, min(2, len(usable)))
        chosen = min(drawn, key=lambda candidate: candidate.load.requests, default=None)
        return self.choose(prompt, candidates, chosen, "fewer requests of two drawn")


POLICIES = (PowerOfTwo,)
