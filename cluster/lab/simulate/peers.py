"""How other routers choose, from their documentation and sources of November 2026: for comparison, not for serving.

Each is a `Steering` with its own books, as its original keeps them: what was sent where, what it was told by events,
its own tree of texts. None of them holds a request back. Facts behind each: docs/simulate.md.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from random import Random

from ....events.wire.messages import LoadReport
from ....replica.messages import ReplicaDescription
from ....router.routing.prefix_index import PrefixIndex
from ....router.routing.reservations import Reservations
from .replica import ReplicaLimits
from .steering import Placed, Steering
from .workload import Arrival


class Peer:
    """Books that all of them keep: who is there, and how many requests were sent and are not over."""

    name = ""

    def __init__(self, limits: ReplicaLimits, rng: Random) -> None:
        self._block_tokens = limits.block_tokens
        self._rng = rng
        self._in_flight: dict[str, set[int]] = {}

    def join(self, description: ReplicaDescription, now: float) -> None:  # noqa: ARG002
        self._in_flight[description.replica_id] = set()

    def leave(self, replica: str) -> None:
        del self._in_flight[replica]

    def restarted(self, replica: str) -> bool:  # noqa: ARG002
        return False

    def place(self, request_id: int, arrival: Arrival, generated: int, now: float) -> Placed | None:
        if not self._in_flight:
            return None
        replica = self.choose(arrival, now)
        self._in_flight[replica].add(request_id)
        self.booked(replica, request_id, arrival, generated, now)
        return Placed(replica)

    def choose(self, arrival: Arrival, now: float) -> str:
        """The replica that gets this request."""
        raise NotImplementedError

    def booked(self, replica: str, request_id: int, arrival: Arrival, generated: int, now: float) -> None:
        """The request goes there."""

    def started(self, replica: str, request_id: int) -> None:
        """First token."""

    def ended(self, replica: str, request_id: int) -> None:
        if replica in self._in_flight:
            self._in_flight[replica].discard(request_id)

    def stored(self, replica: str, blocks: Sequence[int]) -> None:
        """Announced."""

    def removed(self, replica: str, blocks: Sequence[int]) -> None:
        """Given up."""

    def reset(self, replica: str, blocks: Sequence[int]) -> None:
        """Holds exactly these."""

    def live(self, replica: str, live: bool) -> None:
        """Events are exact, or not."""

    def report(self, replica: str, report: LoadReport, now: float) -> None:
        """Load as the replica tells it."""

    def _shortest(self) -> str:
        """Fewest requests in flight; ties go to the first in the list, as with sglang's."""
        return min(self._in_flight, key=lambda replica: len(self._in_flight[replica]))

    def _least(self, costs: dict[str, float]) -> str:
        """Lowest cost, ties at random."""
        least = min(costs.values())
        tied = [replica for replica, cost in costs.items() if cost == least]
        return tied[0] if len(tied) == 1 else self._rng.choice(tied)


class InTurn(Peer):
    """Round robin."""

    name = "rr"

    def __init__(self, limits: ReplicaLimits, rng: Random) -> None:
        super().__init__(limits, rng)
        self._turn = -1

    def choose(self, arrival: Arrival, now: float) -> str:  # noqa: ARG002
        self._turn += 1
        names = list(self._in_flight)
        return names[self._turn % len(names)]


class AtRandom(Peer):
    """Uniformly at random."""

    name = "random"

    def choose(self, arrival: Arrival, now: float) -> str:  # noqa: ARG002
        return self._rng.choice(list(self._in_flight))


class LeastRequests(Peer):
    """Fewest requests in flight, ties at random: what most proxies call least-loaded."""

    name = "least-requests"

    def choose(self, arrival: Arrival, now: float) -> str:  # noqa: ARG002
        return self._least({replica: float(len(sent)) for replica, sent in self._in_flight.items()})


class ConsistentHash(Peer):
    """By the prompt's head: rendezvous hashing of its first two blocks (1,024 tokens of a Mooncake trace)."""

    name = "hash"
    head_blocks = 2

    def choose(self, arrival: Arrival, now: float) -> str:  # noqa: ARG002
        head = repr(arrival.text_blocks[: self.head_blocks])
        return max(self._in_flight, key=lambda replica: blake2b(f"{replica} {head}".encode(), digest_size=8).digest())


class SglangCacheAware(Peer):
    """sglang-router's `cache_aware` (0.3.2): its own tree of what it sent where, and two thresholds.

    Out of balance (max - min > 64 and max > 1.5 min requests in flight): shortest queue. Else the first holder of the
    longest match, if the match is more than 0.3 of the prompt; else the shortest queue. Knows no evictions of replicas;
    its own tree is cut every 120 s to 2^26 characters per replica, taken here as 4 characters a token.
    """

    name = "sglang"
    cache_threshold = 0.3
    balance_abs = 64
    balance_rel = 1.5
    evict_every_s = 120.0
    tree_tokens = 67_108_864 // 4

    def __init__(self, limits: ReplicaLimits, rng: Random) -> None:
        super().__init__(limits, rng)
        self._first: dict[int, str] = {}  # who a node was created for: never updated while that one stays
        self._held: dict[str, OrderedDict[int, None]] = {}
        self._evicted_s = 0.0

    def join(self, description: ReplicaDescription, now: float) -> None:
        super().join(description, now)
        self._held[description.replica_id] = OrderedDict()

    def leave(self, replica: str) -> None:
        super().leave(replica)
        for block in self._held.pop(replica):
            self._forget(replica, block)

    def choose(self, arrival: Arrival, now: float) -> str:
        if now - self._evicted_s >= self.evict_every_s:
            self._evict(now)
        loads = [len(sent) for sent in self._in_flight.values()]
        blocks = arrival.text_blocks
        chosen = self._shortest()
        unbalanced = max(loads) - min(loads) > self.balance_abs and max(loads) > self.balance_rel * min(loads)
        if not unbalanced:
            holder, matched = self._match(blocks)
            if holder is not None and matched * self._block_tokens / arrival.tokens > self.cache_threshold:
                chosen = holder
        self._insert(chosen, blocks)
        return chosen

    def _match(self, blocks: Sequence[int]) -> tuple[str | None, int]:
        holder, matched = None, 0
        for block in blocks:
            first = self._first.get(block)
            if first is None:
                break
            holder, matched = first, matched + 1
        return holder, matched

    def _insert(self, replica: str, blocks: Sequence[int]) -> None:
        held = self._held[replica]
        for block in reversed(blocks):  # the tail is the oldest of them: leaves are evicted first
            held[block] = None
            held.move_to_end(block)
            self._first.setdefault(block, replica)

    def _evict(self, now: float) -> None:
        self._evicted_s = now
        limit = self.tree_tokens // self._block_tokens
        for replica, held in self._held.items():
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


class Dynamo(Peer):
    """Dynamo's KV router (1.6): lowest cost in blocks, from events and its own books of prefill and active blocks.

    cost = scale * max(0, (active prefill tokens + prompt) / block - credit * overlap) + decode blocks if it went there.
    Prefill is booked less the overlap until the first token; active blocks are counted once per hash.
    """

    name = "dynamo"
    prefill_load_scale = 1.0
    overlap_credit = 1.0

    def __init__(self, limits: ReplicaLimits, rng: Random) -> None:
        super().__init__(limits, rng)
        self._capacity = limits.blocks
        self._index = PrefixIndex()
        self._prefill: dict[str, dict[int, int]] = {}
        self._prefill_tokens: dict[str, int] = {}
        self._active: dict[str, dict[int, int]] = {}
        self._partial: dict[str, int] = {}  # requests whose last, partial block is active
        self._blocks: dict[int, tuple[int, ...]] = {}
        self._overlaps: dict[str, int] = {}
        self._heard: dict[str, int] = {}  # number of the next change, as the stream counts
        self._watermark: dict[str, int] = {}  # changes numbered below this were had before

    def join(self, description: ReplicaDescription, now: float) -> None:
        super().join(description, now)
        replica = description.replica_id
        self._index.join(replica, description.num_blocks, closed=True)
        self._prefill[replica], self._prefill_tokens[replica] = {}, 0
        self._active[replica], self._partial[replica] = {}, 0
        self._heard[replica] = self._watermark[replica] = 0

    def restarted(self, replica: str) -> bool:
        """Measured on 1.6.1: what was indexed stays, and events count only when their numbers pass the old ones."""
        self._watermark[replica] = max(self._heard[replica], self._watermark[replica])
        self._heard[replica] = 0
        return False

    def leave(self, replica: str) -> None:
        super().leave(replica)
        self._index.leave(replica)
        for books in (self._prefill, self._prefill_tokens, self._active, self._partial, self._heard, self._watermark):
            del books[replica]

    def choose(self, arrival: Arrival, now: float) -> str:  # noqa: ARG002
        self._overlaps = self._index.match(arrival.blocks)
        return self._least({replica: self._cost(replica, arrival) for replica in self._in_flight})

    def _cost(self, replica: str, arrival: Arrival) -> float:
        raw = (self._prefill_tokens[replica] + arrival.tokens) / self._block_tokens
        credit = self.overlap_credit * self._overlaps[replica]
        active = self._active[replica]
        fresh = sum([block not in active for block in arrival.blocks]) if active else len(arrival.blocks)
        decode = len(active) + self._partial[replica] + fresh + 1
        return self.prefill_load_scale * max(0.0, raw - credit) + decode

    def booked(self, replica: str, request_id: int, arrival: Arrival, generated: int, now: float) -> None:  # noqa: ARG002
        cached = min(self._overlaps[replica] * self._block_tokens, arrival.tokens)
        self._prefill[replica][request_id] = arrival.tokens + generated - cached
        self._prefill_tokens[replica] += arrival.tokens + generated - cached
        active = self._active[replica]
        for block in arrival.blocks:
            active[block] = active.get(block, 0) + 1
        self._partial[replica] += 1
        self._blocks[request_id] = arrival.blocks

    def started(self, replica: str, request_id: int) -> None:
        if replica in self._prefill:
            self._prefill_tokens[replica] -= self._prefill[replica].pop(request_id, 0)

    def ended(self, replica: str, request_id: int) -> None:
        blocks = self._blocks.pop(request_id, None)
        if replica not in self._in_flight or blocks is None or request_id not in self._in_flight[replica]:
            return
        self.started(replica, request_id)
        super().ended(replica, request_id)
        active = self._active[replica]
        for block in blocks:
            left = active[block] - 1
            if left:
                active[block] = left
            else:
                del active[block]
        self._partial[replica] -= 1

    def stored(self, replica: str, blocks: Sequence[int]) -> None:
        if self._is_new(replica):
            self._index.add(replica, blocks)

    def removed(self, replica: str, blocks: Sequence[int]) -> None:
        if self._is_new(replica):
            self._index.remove(replica, blocks)

    def _is_new(self, replica: str) -> bool:
        self._heard[replica] += 1
        return self._heard[replica] > self._watermark[replica]

    def reset(self, replica: str, blocks: Sequence[int]) -> None:
        self._index.reset(replica, blocks)


class DynamoScale8(Dynamo):
    """The same with `prefill_load_scale` 8: prefill weighs more than resident blocks."""

    name = "dynamo-scale8"
    prefill_load_scale = 8.0


class DynamoCredit4(Dynamo):
    """The same with an overlap credit of 4: a hit makes up for a queue."""

    name = "dynamo-credit4"
    overlap_credit = 4.0


class Llmd(Peer):
    """llm-d's weighted scorers: prefix 3, queue 2, KV utilisation 2; highest sum wins, ties at random.

    Prefix: share of the prompt's blocks held, by events and, for two seconds, by what was just sent there. Queue: from
    0 at the longest waiting queue to 1 at the shortest. KV utilisation: the free share. Both as last reported.
    """

    name = "llm-d"
    prefix_weight = 3.0
    queue_weight = 2.0
    kv_weight = 2.0
    speculative_s = 2.0

    def __init__(self, limits: ReplicaLimits, rng: Random) -> None:
        super().__init__(limits, rng)
        self._index = PrefixIndex()
        self._speculative = Reservations(self.speculative_s)
        self._queue: dict[str, int] = {}
        self._used: dict[str, float] = {}

    def join(self, description: ReplicaDescription, now: float) -> None:
        super().join(description, now)
        self._index.join(description.replica_id, description.num_blocks, closed=True)
        self._queue[description.replica_id], self._used[description.replica_id] = 0, 0.0

    def leave(self, replica: str) -> None:
        super().leave(replica)
        self._index.leave(replica)
        self._speculative.leave(replica)
        del self._queue[replica], self._used[replica]

    def restarted(self, replica: str) -> bool:  # noqa: ARG002
        return True  # not known; taken kindly

    def choose(self, arrival: Arrival, now: float) -> str:
        self._speculative.expire(now)
        held = self._speculative.extend(self._index.match(arrival.blocks), arrival.blocks)
        shortest, longest = min(self._queue.values()), max(self._queue.values())
        spread = longest - shortest
        scores = {}
        for replica in self._in_flight:
            prefix = held[replica] / len(arrival.blocks) if arrival.blocks else 0.0
            queue = (longest - self._queue[replica]) / spread if spread else 1.0
            free = 1.0 - self._used[replica]
            scores[replica] = -(self.prefix_weight * prefix + self.queue_weight * queue + self.kv_weight * free)
        return self._least(scores)

    def booked(self, replica: str, request_id: int, arrival: Arrival, generated: int, now: float) -> None:  # noqa: ARG002
        self._speculative.reserve(request_id, replica, arrival.blocks, 0, now)

    def stored(self, replica: str, blocks: Sequence[int]) -> None:
        self._index.add(replica, blocks)

    def removed(self, replica: str, blocks: Sequence[int]) -> None:
        self._index.remove(replica, blocks)

    def reset(self, replica: str, blocks: Sequence[int]) -> None:
        self._index.reset(replica, blocks)

    def report(self, replica: str, report: LoadReport, now: float) -> None:  # noqa: ARG002
        self._queue[replica] = report.waiting
        self._used[replica] = 1.0 - report.free_blocks / report.total_blocks


#: By the name under which `homing simulate` knows them.
PEERS: dict[str, Callable[[ReplicaLimits, Random], Steering]] = {
    peer.name: peer
    for peer in (
        InTurn,
        AtRandom,
        LeastRequests,
        ConsistentHash,
        SglangCacheAware,
        Dynamo,
        DynamoScale8,
        DynamoCredit4,
        Llmd,
    )
}
