"""Consistent hashing of the prompt's head, with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018).

Keeps no state and needs no events: routers that share nothing agree. Each prefix orders the replicas in its own way
(rendezvous hashing), so a replica that joins or leaves moves only its share of the prefixes.
"""

from collections.abc import Sequence
from hashlib import blake2b
from math import ceil
from random import Random

from .base import Candidate, Decision, Policy, Prompt

#: Tokens of the head. Prompts that differ only after it share a replica. Not tuned.
HEAD_TOKENS = 1024
#: A replica takes at most this multiple of the mean number of requests; the rest go to the next in order. Not tuned.
BOUND = 1.25


class PrefixHash(Policy):
    """Chooses the first replica below its bound, in the order given by the prompt's first blocks."""

    name = "prefix-hash"

    def consider(self, prompt: Prompt, candidates: Sequence[Candidate], rng: Random) -> Decision:
        usable = self.usable(prompt, candidates)
        if not usable:
            return self.choose(prompt, candidates, None, "")
        bound = ceil(BOUND * (1 + sum(each.load.requests for each in usable)) / len(usable))
        below = [each for each in usable if each.load.requests < bound] or usable
        # A hash identifies all blocks before it. A prompt without a full block has none; only names order its replicas.
        head = prompt.hashes[: max(1, HEAD_TOKENS // prompt.block_size)]
        key = int(head[-1]).to_bytes(8, "big", signed=False) if len(head) else b""

        def weight(candidate: Candidate) -> bytes:
            return blake2b(candidate.replica_id.encode(), key=key, digest_size=8).digest()

        chosen = max(below, key=weight)
        first = len(below) == len(usable) or chosen is max(usable, key=weight)
        return self.choose(prompt, candidates, chosen, "first by hash" if first else "first by hash below its bound")


POLICIES = (PrefixHash,)
