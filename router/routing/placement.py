"""One router's state for placing requests: each replica's held and expected blocks, its load and its feed's state.

Calls the policy and books its decisions. Pure: hashes and times are arguments. Independent of the request flow and of
tokens; `homing simulate` runs this code over modelled replicas.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, MutableSequence, Sequence
from heapq import heapreplace
from math import inf
from random import Random

import msgspec

from ...events.wire.messages import LoadReport
from ...replica.messages import ReplicaDescription
from ..backend import Explanation, FeedState, RouterCounters
from .eviction_order import EvictionOrder
from .policy.base import STALE, Candidate, Decision, Policy, Prompt, SlowerBlocks
from .policy.explain import explanation_of
from .prefix_index import PrefixIndex, ReplicaBlocks
from .replica_load import LoadBook, Pending
from .reservations import Reservations, common_prefix

log = logging.getLogger(__name__)

#: An external engine may announce a request's blocks after its last token, as events travel separately. A lost event is
#: detected and requested again within a second (events/follow/subscription.py).
ANNOUNCED_WITHIN_S = 1.0


#: In fleets of more than twice this number, replicas are passed over that as many less loaded ones match in length of
#: the prefix.
CONTENDERS = 16
#: A replica with less than this share of its blocks to spare is crowded; few prompts need as many. Not tuned.
CROWDED = 0.5


class Placement:
    """Index, reservations, loads and feeds of the joined replicas, kept consistent with each other."""

    def __init__(
        self,
        policy: Policy,
        *,
        loads: LoadBook,
        reservations: Reservations,
        rng: Random,
        counters: RouterCounters | None = None,
    ) -> None:
        self.index = PrefixIndex()
        self._counters = counters or RouterCounters()
        self.policy = policy
        self.loads = loads
        self.reservations = reservations
        self._rng = rng
        self._eviction_orders: dict[str, EvictionOrder] = {}  #: for external engines only
        #: requests whose blocks an external engine has computed but not announced: replica, last block, expiry time
        self._unannounced: dict[int, tuple[str, int, float]] = {}
        self._in_flight: dict[str, dict[int, Sequence[int]]] = {}  #: by replica and request: the prompt's blocks
        #: the same prompts by their first block, then by replica and request
        self._by_first_block: dict[int, dict[str, dict[int, Sequence[int]]]] = {}
        #: how far each joined replica's events can be trusted; changed by `set_feed`
        self.feeds: dict[str, FeedState] = {}
        #: for engines with rules of their own (router/replicas/external/hit_rules.py): the number of a prompt's leading
        #: blocks that are cached, and those of them in slower memory. None: the index applies, all in GPU memory
        self.hit_rules: dict[str, Callable[[Sequence[int]], tuple[int, SlowerBlocks] | None]] = {}

    def __contains__(self, replica: object) -> bool:
        return replica in self.feeds

    def __len__(self) -> int:
        return len(self.feeds)

    # Replicas

    def join(self, description: ReplicaDescription, now: float) -> None:
        """Add a replica that can take requests but whose events are not followed yet."""
        # External engines do not guarantee that a cached block's parents are cached.
        self.index.join(description.replica_id, description.num_blocks, closed=not description.external)
        self.loads.join(description, now)
        self.policy.join(description)
        if description.external:
            self._eviction_orders[description.replica_id] = EvictionOrder(description.num_blocks)
        self._in_flight[description.replica_id] = {}
        self.set_feed(description.replica_id, FeedState.SYNCING)

    def leave(self, replica: str) -> None:
        """Remove a replica with its held and expected blocks."""
        self._release_announced(replica, everything=True)
        self.index.leave(replica)
        self.loads.leave(replica)
        self.reservations.leave(replica)
        self.policy.leave(replica)
        self.hit_rules.pop(replica, None)
        self._eviction_orders.pop(replica, None)
        for request_id in list(self._in_flight[replica]):
            self._forget(replica, request_id)
        del self.feeds[replica], self._in_flight[replica]

    def set_feed(self, replica: str, feed: FeedState) -> None:
        """Set how far a joined replica's events can be trusted."""
        self.feeds[replica] = feed

    def report(self, replica: str, report: LoadReport, now: float) -> None:
        if self.loads.report(replica, report, now):
            self.policy.report(replica, report)

    def blocks_of(self, replica: str) -> ReplicaBlocks:
        """The store for the replica's subscription: the index, and the policy if it tracks blocks itself."""
        if type(self.policy).stored is Policy.stored:
            return ReplicaBlocks(self.index, replica)
        return _ObservedBlocks(self.index, replica, self.policy)

    def stored(self, replica: str, blocks: Sequence[int]) -> None:
        self.index.add(replica, blocks)
        if (order := self._eviction_orders.get(replica)) is not None:
            order.stored(blocks)
            self._release_announced(replica)
        self.policy.stored(replica, blocks)

    def removed(self, replica: str, blocks: Sequence[int]) -> None:
        self.index.remove(replica, blocks)
        if (order := self._eviction_orders.get(replica)) is not None:
            order.removed(blocks)
        self.policy.removed(replica, blocks)

    def computed(self, replica: str, chain: Sequence[int]) -> None:
        """An engine without events has computed a prompt; drop the blocks for which it probably has no memory left."""
        order = self._eviction_orders[replica]
        self.stored(replica, [block for block in chain if block not in order])
        self.removed(replica, order.surplus())

    def reset(self, replica: str, blocks: Sequence[int]) -> None:
        self.index.reset(replica, blocks)
        if (order := self._eviction_orders.get(replica)) is not None:
            order.reset(blocks)
            self._release_announced(replica, everything=True)
        self.policy.reset(replica, blocks)

    def _release_announced(self, replica: str, *, everything: bool = False) -> None:
        """Release requests whose last block the engine has announced: their blocks are no longer just expected."""
        for request_id, (where, block, _) in tuple(self._unannounced.items()):
            if where == replica and (everything or block in self._eviction_orders[replica]):
                del self._unannounced[request_id]
                self.reservations.release(request_id)

    def expire(self, now: float) -> None:
        """Drop expected blocks that are overdue, and what is left in the index of replicas that are gone."""
        self.index.sweep()
        self.reservations.expire(now)
        for request_id, (_, _, until) in tuple(self._unannounced.items()):
            if until <= now:
                del self._unannounced[request_id]
                self.reservations.release(request_id)

    # Requests

    def candidates(
        self,
        keys: Sequence[int],
        excluded: Collection[str],
        now: float,
        *,
        usable: int | None = None,
        every: bool = False,
    ) -> list[Candidate]:
        """The replicas to choose from for the prompt whose full blocks are `keys`: all, or in a large fleet contenders.

        `every`: all in any case.

        `usable`: number of blocks before the prompt's last token, which is always computed; None: all.
        """
        held = self.index.lengths(keys)
        slower = self._apply_hit_rules(held, keys[:usable]) if self.hit_rules else {}
        places: Sequence[int] = range(len(held))
        if not every and len(held) > 2 * CONTENDERS and self.policy.reads_contenders:
            places = self._contenders(held, keys, excluded, now)
        return self._candidates(places, keys, excluded, now, held, slower)

    def _contenders(
        self, held: Sequence[int], keys: Sequence[int], excluded: Collection[str], now: float
    ) -> Sequence[int]:
        """The places of replicas for which fewer than CONTENDERS less loaded ones hold as long a prefix.

        Nearly always, the replica of least cost is among them: any other would compute more and wait longer.
        """
        places = self.index.places
        longest, order = list(held), self.loads.by_pressure(now)
        for replica, blocks in self.reservations.extensions(lambda replica: held[places[replica]], keys).items():
            longest[places[replica]] = blocks
        skipped = {places[replica] for replica in excluded if replica in places}
        found, best = [], [-1] * CONTENDERS  # a heap of the longest prefixes so far
        for place in order:
            if (length := longest[place]) > best[0] and place not in skipped:
                heapreplace(best, length)
                found.append(place)
        return found

    def _candidates(
        self,
        places: Sequence[int],
        keys: Sequence[int],
        excluded: Collection[str],
        now: float,
        held: Sequence[int],
        slower: Mapping[str, SlowerBlocks],
    ) -> list[Candidate]:
        index_places, names, views = self.index.places, self.loads.replicas(), self.loads.views(now)
        expected = {place: held[place] for place in places}
        for place in places if self._eviction_orders else ():
            if (order := self._eviction_orders.get(names[place])) is not None:
                expected[place] = order.remaining_hit(keys, held[place])
        extensions = self.reservations.extensions(lambda replica: expected.get(index_places[replica]), keys)
        for replica, blocks in extensions.items():
            expected[index_places[replica]] = blocks
        found = []
        for place in places:
            replica, load = names[place], views[place]
            used = 0
            if load.spare_blocks < CROWDED * load.total_blocks:
                used = self._used_blocks(replica, keys)
                if replica in self._eviction_orders:
                    # Requests ahead take the free blocks and evict what is cached in them, a prompt's last blocks
                    # first. Our replicas evict other blocks first (`PrefixCache.hold`).
                    expected[place] = min(expected[place], used + max(0, load.spare_blocks))
            candidate = Candidate(
                replica_id=replica,
                feed=self.feeds[replica],
                load=load,
                held_blocks=held[place],
                expected_blocks=expected[place],
                used_blocks=used,
                excluded=replica in excluded,
                slower_blocks=slower.get(replica, ()),
            )
            found.append(candidate)
        return found

    def _apply_hit_rules(self, held: MutableSequence[int], keys: Sequence[int]) -> dict[str, SlowerBlocks]:
        """Write the hits of engines in `hit_rules` to `held`; returns the blocks that each must load."""
        slower: dict[str, SlowerBlocks] = {}
        for replica, hit_of in self.hit_rules.items():
            if (hit := hit_of(keys)) is not None:
                held[self.index.places[replica]], slower[replica] = hit
        return slower

    def _used_blocks(self, replica: str, keys: Sequence[int]) -> int:
        """Number of the prompt's leading blocks that requests in flight there use."""
        chains = self._by_first_block.get(keys[0], {}).get(replica) if len(keys) else None
        if not chains:
            return 0
        used = 0
        for chain in chains.values():
            if len(chain) > used and chain[used] == keys[used]:
                used = common_prefix(chain, keys, used)
                if used == len(keys):
                    break
        return used

    def decide(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Decision:
        """The policy's decision, or the replica with the fewest requests if the policy errs.

        While a replica has no obstacle, a request must not wait: nothing else would place it later.
        """
        decision = self.policy.decide(prompt, candidates, self._rng)
        checked = self._checked(decision, candidates)
        if checked is not decision:
            if not self._counters.overruled:
                log.error("policy_overruled policy=%s chosen=%s", decision.policy, decision.chosen)
            self._counters.overruled += 1
        return checked

    def _checked(self, decision: Decision, candidates: Sequence[Candidate]) -> Decision:
        policy, prompt, chosen = self.policy, decision.prompt, decision.chosen
        if chosen is not None and policy.obstacle(prompt, chosen) is None:
            return decision
        usable = policy.usable(prompt, candidates)
        if chosen is None and not usable:
            return decision
        fewest = min(usable, key=lambda each: (each.load.requests, each.replica_id), default=None)
        return policy.choose(prompt, candidates, fewest, "fewest requests, because the policy chose no usable replica")

    def rank(self, prompt: Prompt) -> float:
        """Sort key of a request that starts waiting, among its tenant's requests: the lowest goes first."""
        held = self.index.lengths(prompt.hashes)
        self._apply_hit_rules(held, prompt.hashes)
        uncached = max(1, prompt.tokens - max(held, default=0) * prompt.block_size)
        # Any replica's cost will do: the key only compares prompts with each other.
        costs = [self.loads.view(replica, prompt.now).prefill_cost for replica in self.loads.replicas()[:1]]
        return self.policy.rank(
            prompt, uncached, sum([cost.seconds(prompt.tokens - uncached, uncached) for cost in costs])
        )

    def explain(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Explanation:
        """The table of the decision that `decide` would take among these candidates. Changes no state."""
        decision = self.policy.consider(prompt, candidates, Random(0))
        return explanation_of(self._checked(decision, candidates))

    def foresee(self, decision: Decision) -> "Foreseen":
        """The cached blocks that this request will find if it is booked now, and those that others will find then.

        Blocks that are expected, but not held yet, are computed by the one of the requests in flight that starts first.
        Our engines start shorter prompts first (replica/engine/queue_order.py), so this request computes them if it
        passes the others. Priorities are not considered, and evictions that are not announced yet are unknown.
        """
        assert decision.row is not None, "nothing was chosen"
        chosen, prompt = decision.row.candidate, decision.prompt
        if chosen.feed is STALE:
            return NOTHING_FORESEEN
        held, expected = chosen.held_blocks, chosen.expected_blocks
        if expected <= held or chosen.replica_id in self._eviction_orders:
            return Foreseen(expected) if expected else NOTHING_FORESEEN
        found, passed = held, dict[int, int]()
        computed, pending = chosen.tokens_on_arrival(prompt), self.loads.pending(chosen.replica_id)
        prefilled, size = self.loads.prefilled_tokens(chosen.replica_id), prompt.block_size
        chains = self._by_first_block.get(prompt.hashes[0], {}).get(chosen.replica_id, {})
        for other, sent in pending.items():
            chain = chains.get(other)
            if chain is None or (found >= expected and not sent.is_passed_by(computed, prefilled, 0, prompt.now)):
                continue  # if it is not passed with no cached token, it is not passed with more
            common = common_prefix(chain, prompt.hashes, 0)
            if sent.is_passed_by(computed, prefilled, min(held, common) * size, prompt.now):
                passed[other] = common
            else:
                found = max(found, common)
        for other, chain in reversed(chains.items()):
            if found >= expected:
                break
            if other not in pending:
                found = max(found, common_prefix(chain, prompt.hashes, 0))
        return Foreseen(min(found, expected), passed)

    def book(self, request_id: int, decision: Decision, keys: Sequence[int], now: float) -> None:
        """Book a request on the chosen replica: its blocks become expected, its uncached tokens count as load."""
        row, prompt = decision.row, decision.prompt
        assert row is not None, "a decision without a replica cannot be booked"
        chosen, uncached = row.candidate, row.uncached_tokens
        replica, load = chosen.replica_id, chosen.load
        prefill_s = load.prefill_cost.seconds(prompt.tokens - uncached, uncached)
        needed = len(keys) + 1 - self._used_blocks(replica, keys)
        # With nothing queued, it starts in the next step. A decode step may be in progress.
        starts_by = inf if load.queued_prefill_tokens else now + load.decode_step_s * (load.running > 0)
        pending = Pending(
            uncached_tokens=uncached,
            blocks=needed,
            prefill_s=prefill_s,
            prompt_tokens=prompt.tokens,
            computed_tokens=chosen.tokens_on_arrival(prompt),
            prefilled_tokens=self.loads.prefilled_tokens(replica),
            starts_by=starts_by,
        )
        self.loads.dispatched(replica, request_id, pending, now)
        found = min(chosen.held_blocks, chosen.expected_blocks)
        self.reservations.reserve(request_id, replica, keys, found, now)
        if (order := self._eviction_orders.get(replica)) is not None:
            order.sent(request_id, keys, found)
        self._in_flight[replica][request_id] = keys
        if len(keys):
            self._by_first_block.setdefault(keys[0], {}).setdefault(replica, {})[request_id] = keys
        self.policy.booked(replica, request_id, prompt)

    def started(self, replica: str, request_id: int) -> None:
        self.loads.started(replica, request_id)
        self.policy.started(replica, request_id)

    def ended(self, replica: str, request_id: int, computed_at: float | None = None) -> None:
        """The request has left the replica. `computed_at`: when all of its prompt was computed; None: perhaps never."""
        chain = self._forget(replica, request_id)
        order = self._eviction_orders.get(replica)
        if order is not None and computed_at is not None and len(chain) and chain[-1] not in order:
            self._unannounced[request_id] = replica, chain[-1], computed_at + ANNOUNCED_WITHIN_S
        else:
            self.reservations.release(request_id)
        self.loads.ended(replica, request_id)
        if order is not None:
            order.ended(request_id)
        self.policy.ended(replica, request_id)

    def _forget(self, replica: str, request_id: int) -> Sequence[int]:
        """Drop a request in flight and return its blocks; none if it or the replica is already gone."""
        keys = self._in_flight.get(replica, {}).pop(request_id, ())
        if len(keys):
            near = self._by_first_block[keys[0]]
            del near[replica][request_id]
            if not near[replica]:
                del near[replica]
                if not near:
                    del self._by_first_block[keys[0]]
        return keys

    def finished(self, tokens: int) -> None:
        """A request ended by itself after generating this many tokens on all its replicas together."""
        self.loads.finished(tokens)

    def check(self) -> None:
        self.index.check()
        self.reservations.check()
        self.loads.check()
        for order in self._eviction_orders.values():
            order.check()
        found = [
            (name, request_id, keys)
            for near in self._by_first_block.values()
            for name, chains in near.items()
            for request_id, keys in chains.items()
        ]
        in_flight = [
            (name, request_id, keys)
            for name, chains in self._in_flight.items()
            for request_id, keys in chains.items()
            if len(keys)
        ]
        assert sorted(found) == sorted(in_flight), f"{found} by first block, {in_flight} in flight"
        assert all(near and all(near.values()) for near in self._by_first_block.values()), "an empty table is kept"
        assert tuple(self.feeds) == self.loads.replicas() == tuple(self.index.places), "replicas or their order differ"


class Foreseen(msgspec.Struct, frozen=True):
    """The cached blocks that requests will find on a replica."""

    blocks: int  #: by the request of the decision
    #: by each request in flight that starts after it now and shares expected blocks with it
    passed: dict[int, int] = {}

    @staticmethod
    def tokens(blocks: int, prompt_tokens: int, block_size: int) -> int:
        """Cached tokens of a prompt with so many cached blocks, in whole blocks: its last token is always computed."""
        return min(blocks, (prompt_tokens - 1) // block_size) * block_size


NOTHING_FORESEEN = Foreseen(0)


def known_tokens(prompt: Prompt, candidates: Sequence[Candidate]) -> int:
    """Tokens of the longest prefix that any replica holds or will hold; all tokens if that covers every full block."""
    blocks = max([max(each.held_blocks, each.expected_blocks) for each in candidates], default=0)
    return prompt.tokens if 0 < prompt.blocks <= blocks else blocks * prompt.block_size


class _ObservedBlocks(ReplicaBlocks):
    """One replica's blocks in the index; also passes their changes to the policy."""

    def __init__(self, index: PrefixIndex, replica: str, policy: Policy) -> None:
        super().__init__(index, replica)
        self._policy = policy

    def store(self, parent: int | None, hashes: Sequence[int]) -> None:
        super().store(parent, hashes)
        self._policy.stored(self._replica, hashes)

    def remove(self, hashes: Sequence[int]) -> None:
        super().remove(hashes)
        self._policy.removed(self._replica, hashes)

    def clear(self) -> None:
        super().clear()
        self._policy.reset(self._replica, ())

    def replace(self, blocks: Iterable[tuple[int, int | None]]) -> None:
        pairs = list(blocks)
        super().replace(pairs)
        self._policy.reset(self._replica, [block for block, _ in pairs])
