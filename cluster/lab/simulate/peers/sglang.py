"""sglang-router's `cache_aware` (0.3.2): a tree of the prompts that it sent to each replica, and two thresholds."""

from collections import OrderedDict
from collections.abc import Sequence
from random import Random

from .....replica.messages import ReplicaDescription
from .....router.routing.policy.base import Candidate, Decision, Prompt
from .base import Peer, text_hashes

CACHE_THRESHOLD = 0.3
BALANCE_ABS = 64
BALANCE_REL = 1.5
EVICT_EVERY_S = 120.0
#: 2^26 characters per replica, at an assumed 4 characters per token.
TREE_TOKENS = 67_108_864 // 4
#: Not in the original: bounds the tree to about 30 MB per replica if blocks are small. Has no effect with blocks of at
#: least 64 tokens.
TREE_BLOCKS = 262_144


class SglangCacheAware(Peer):
    """If out of balance (max - min > 64 and max > 1.5 min requests in flight), takes the shortest queue.

    Otherwise takes the first holder of the longest match if that covers more than 0.3 of the prompt, else the shortest
    queue. It sees no evictions; its own tree is trimmed every 120 s.
    """

    name = "sglang"

    def __init__(self) -> None:
        super().__init__()
        self._first: dict[int, str] = {}  # the first replica that each block was entered for, until it is trimmed there
        self._held: dict[str, OrderedDict[int, None]] = {}
        self._evicted_s = 0.0

    def join(self, description: ReplicaDescription) -> None:
        super().join(description)
        self._held[description.replica_id] = OrderedDict()

    def leave(self, replica: str) -> None:
        super().leave(replica)
        for block in self._held.pop(replica):
            self._forget(replica, block)

    def decide(self, prompt: Prompt, candidates: Sequence[Candidate], rng: Random) -> Decision:
        if prompt.now - self._evicted_s >= EVICT_EVERY_S:
            self._evicted_s = prompt.now
            for replica in self._held:
                self._cut(replica, TREE_TOKENS // prompt.block_size)
        return self.consider(prompt, candidates, rng)

    def pick(self, prompt: Prompt, usable: Sequence[Candidate], rng: Random) -> tuple[Candidate, str]:
        loads = [self.requests(each) for each in usable]
        shortest = usable[loads.index(min(loads))]  # ties go to the first in the list
        if max(loads) - min(loads) > BALANCE_ABS and max(loads) > BALANCE_REL * min(loads):
            return shortest, "shortest queue: out of balance"
        holder, matched = None, 0
        for block in text_hashes(prompt):
            first = self._first.get(block)
            if first is None:
                break
            holder, matched = first, matched + 1
        if matched * prompt.block_size / (prompt.tokens - prompt.generated) > CACHE_THRESHOLD:
            for candidate in usable:
                if candidate.replica_id == holder:
                    return candidate, "first holder of the longest match"
        return shortest, "shortest queue: no match is long enough"

    def booked(self, replica: str, request_id: int, prompt: Prompt) -> None:
        super().booked(replica, request_id, prompt)
        held = self._held[replica]
        for block in reversed(text_hashes(prompt)):  # the tail becomes the oldest, as leaves are evicted first
            held[block] = None
            held.move_to_end(block)
            self._first.setdefault(block, replica)
        self._cut(replica, TREE_BLOCKS)

    def _cut(self, replica: str, limit: int) -> None:
        held = self._held[replica]
        while len(held) > limit:
            self._forget(replica, held.popitem(last=False)[0])

    def _forget(self, replica: str, block: int) -> None:
        if self._first.get(block) != replica:
            return
        others = (other for other, held in self._held.items() if other != replica and block in held)
        successor = next(others, None)
        if successor is None:
            del self._first[block]
        else:
            self._first[block] = successor


POLICIES = (SglangCacheAware,)
