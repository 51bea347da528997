"""Dynamo's KV router (1.6): lowest cost in blocks, from events and its own counts of prefill and active blocks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from .....replica.messages import ReplicaDescription
from .....router.routing.policy.base import Candidate, Prompt
from .....router.routing.prefix_index import PrefixIndex
from .base import Peer, least


@dataclass(slots=True)
class _Books:
    """The state that Dynamo keeps for one replica."""

    requests: dict[int, Sequence[int]] = field(default_factory=dict)  #: blocks of each request in flight
    prefill: dict[int, int] = field(default_factory=dict)  #: uncached tokens of each request before its first token
    prefill_tokens: int = 0  #: the sum of `prefill`
    active: Counter[int] = field(default_factory=Counter)  #: number of requests that use each block
    last_event: int = 0  #: number of the last change in the event stream
    watermark: int = 0  #: changes with numbers up to this one are taken for old and ignored


class Dynamo(Peer):
    """cost = scale * max(0, (active prefill tokens + prompt) / block - credit * overlap) + decode blocks if sent there.

    Prefill counts without the overlap and until the first token; active blocks count once per hash. Dynamo's expiry of
    requests after 300 s is left out. When an engine restarts, its indexed blocks stay and its events are ignored until
    their numbers exceed the old ones, as measured on 1.6.1.
    """

    name = "dynamo"
    prefill_load_scale = 1.0
    overlap_credit = 1.0

    def __init__(self) -> None:
        super().__init__()
        self._index = PrefixIndex()
        self._books: dict[str, _Books] = {}
        self._overlaps: dict[str, int] = {}  # of the last prompt considered; `booked` follows `decide` directly

    def join(self, description: ReplicaDescription) -> None:
        super().join(description)
        self._index.join(description.replica_id, description.num_blocks, closed=not description.external)
        self._books[description.replica_id] = _Books()

    def leave(self, replica: str) -> None:
        super().leave(replica)
        self._index.leave(replica)
        del self._books[replica]

    def restarted(self, replica: str) -> None:
        books = self._books[replica]
        books.watermark, books.last_event = max(books.last_event, books.watermark), 0

    def pick(self, prompt: Prompt, usable: Sequence[Candidate], rng: Random) -> tuple[Candidate, str]:
        self._overlaps = self._index.match(prompt.hashes)
        costs = [self._cost(prompt, each.replica_id) for each in usable]
        return least(usable, costs, rng), f"lowest cost, {min(costs):g} blocks"

    def _cost(self, prompt: Prompt, replica: str) -> float:
        books, credit = self._books[replica], self.overlap_credit * self._overlaps[replica]
        raw = (books.prefill_tokens + prompt.tokens - prompt.generated) / prompt.block_size
        active = books.active
        fresh = sum([block not in active for block in prompt.hashes]) if active else len(prompt.hashes)
        # Each request has one more block, which is partial.
        decode = len(active) + len(books.requests) + fresh + 1
        return self.prefill_load_scale * max(0.0, raw - credit) + decode

    def booked(self, replica: str, request_id: int, prompt: Prompt) -> None:
        super().booked(replica, request_id, prompt)
        books = self._books[replica]
        cached = min(self._overlaps[replica] * prompt.block_size, prompt.tokens - prompt.generated)
        books.prefill[request_id] = prompt.tokens - cached
        books.prefill_tokens += prompt.tokens - cached
        books.requests[request_id] = prompt.hashes
        books.active.update(prompt.hashes)

    def started(self, replica: str, request_id: int) -> None:
        if replica in self._books:
            self._books[replica].prefill_tokens -= self._books[replica].prefill.pop(request_id, 0)

    def ended(self, replica: str, request_id: int) -> None:
        super().ended(replica, request_id)
        self.started(replica, request_id)
        if replica not in self._books:
            return
        active = self._books[replica].active
        for block in self._books[replica].requests.pop(request_id, ()):
            active[block] -= 1
            if not active[block]:
                del active[block]

    def stored(self, replica: str, blocks: Sequence[int]) -> None:
        if self._is_above_watermark(replica):
            self._index.add(replica, blocks)

    def removed(self, replica: str, blocks: Sequence[int]) -> None:
        if self._is_above_watermark(replica):
            self._index.remove(replica, blocks)

    def _is_above_watermark(self, replica: str) -> bool:
        self._books[replica].last_event += 1
        return self._books[replica].last_event > self._books[replica].watermark

    def reset(self, replica: str, blocks: Sequence[int]) -> None:
        self._index.reset(replica, blocks)


class DynamoScale8(Dynamo):
    """Dynamo with `prefill_load_scale` 8: prefill outweighs resident blocks."""

    name = "dynamo-scale8"
    prefill_load_scale = 8.0


class DynamoScale16(Dynamo):
    """Dynamo with `prefill_load_scale` 16."""

    name = "dynamo-scale16"
    prefill_load_scale = 16.0


class DynamoScale64(Dynamo):
    """Dynamo with `prefill_load_scale` 64: resident blocks only break ties."""

    name = "dynamo-scale64"
    prefill_load_scale = 64.0


class DynamoWspt(DynamoScale8):
    """`DynamoScale8` with a queue in the router, as with `--router-queue-threshold 4 --router-queue-policy wspt`.

    While every replica has more prompt tokens booked than four of its steps can take, requests wait in the router. The
    one with the fewest uncached tokens goes first, which is Smith's rule for requests of equal weight.
    """

    name = "dynamo-wspt"
    queue_threshold = 4.0

    def obstacle(self, prompt: Prompt, candidate: Candidate) -> str | None:
        booked = self._books[candidate.replica_id].prefill_tokens
        if booked > self.queue_threshold * candidate.load.max_batched_tokens:
            return "queue over the threshold"
        return super().obstacle(prompt, candidate)

    def rank(self, prompt: Prompt, uncached: int, prefill_s: float) -> float:
        return uncached


class DynamoCredit4(Dynamo):
    """Dynamo with an overlap credit of 4: a hit compensates for a queue."""

    name = "dynamo-credit4"
    overlap_credit = 4.0


POLICIES = (Dynamo, DynamoScale8, DynamoScale16, DynamoScale64, DynamoWspt, DynamoCredit4)
