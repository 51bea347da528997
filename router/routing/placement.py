"""What one router knows of its replicas when it places a request: what each holds and will hold, its load, and how
far its events can be trusted. Asks the policy and books its decision.

Pure: hashes and times come in. Knows no flow of requests and no tokens; `homing simulate` runs this code over modelled
replicas.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, MutableSequence, Sequence
from random import Random

from ...events.wire.messages import LoadReport
from ...replica.messages import ReplicaDescription
from ..backend import Explanation, FeedState
from .eviction_order import EvictionOrder
from .policy.base import LIVE, Candidate, Candidates, Decision, Policy, Prompt, SlowerBlocks
from .policy.explain import explanation_of
from .prefix_index import PrefixIndex, ReplicaBlocks
from .replica_load import LoadBook, Pending, ReplicaLoad
from .reservations import CountsByBlock, Reservations, common_prefix

#: An engine that is not ours may announce what it has computed for a request after the request's last token, as events
#: have a way of their own. A lost one is noticed and asked for within a second (events/follow/subscription.py).
ANNOUNCED_WITHIN_S = 1.0


class Placement:
    """Index, reservations, loads and feeds of the joined replicas, kept in step with each other."""

    def __init__(self, policy: Policy, *, loads: LoadBook, reservations: Reservations, rng: Random) -> None:
        self.index = PrefixIndex()
        self.policy = policy
        self.loads = loads
        self.reservations = reservations
        self._rng = rng
        self._orders: dict[str, EvictionOrder] = {}  #: of engines that are not ours
        #: by request that such an engine has computed and not announced: where, the last block, how long that counts
        self._unannounced: dict[int, tuple[str, int, float]] = {}
        self._in_flight: dict[str, dict[int, Sequence[int]]] = {}  #: by replica and request: the prompt's blocks
        self._at_first_block = CountsByBlock[str]()  #: replicas of those
        #: how far the events of each joined replica can be trusted; `trust` changes it
        self.feeds: dict[str, FeedState] = {}
        self._doubted: set[str] = set()  #: those whose feed is not live
        #: of engines with rules of their own (router/replicas/external/hit_rules.py): the leading blocks of a prompt
        #: that are cached, and which of them are in slower memory; None: those of the index, all in GPU memory
        self.hit_rules: dict[str, Callable[[Sequence[int]], tuple[int, SlowerBlocks] | None]] = {}

    def __contains__(self, replica: object) -> bool:
        return replica in self.feeds

    def __len__(self) -> int:
        return len(self.feeds)

    # Replicas

    def join(self, description: ReplicaDescription, now: float) -> None:
        """A replica can be sent requests; its events are not followed yet."""
        # Engines that are not ours do not promise to keep a block's parents.
        self.index.join(description.replica_id, description.num_blocks, closed=not description.foreign)
        self.loads.join(description, now)
        self.policy.join(description)
        if description.foreign:
            self._orders[description.replica_id] = EvictionOrder(description.num_blocks)
        self._in_flight[description.replica_id] = {}
        self.trust(description.replica_id, FeedState.SYNCING)

    def leave(self, replica: str) -> None:
        """A replica is gone, with all that it held and would have held."""
        self._announced(replica, everything=True)
        self.index.leave(replica)
        self.loads.leave(replica)
        self.reservations.leave(replica)
        self.policy.leave(replica)
        self.hit_rules.pop(replica, None)
        self._orders.pop(replica, None)
        for request_id in list(self._in_flight[replica]):
            self._forget(replica, request_id)
        self._doubted.discard(replica)
        del self.feeds[replica], self._in_flight[replica]

    def trust(self, replica: str, feed: FeedState) -> None:
        """How far the events of a joined replica can be trusted."""
        self.feeds[replica] = feed
        (self._doubted.discard if feed is LIVE else self._doubted.add)(replica)

    def report(self, replica: str, report: LoadReport, now: float) -> None:
        self.loads.report(replica, report, now)
        self.policy.report(replica, report)

    def blocks_of(self, replica: str) -> ReplicaBlocks:
        """Where the subscription that follows the replica stores its blocks: the index, and a policy's own books."""
        if type(self.policy).stored is Policy.stored:
            return ReplicaBlocks(self.index, replica)
        return _ObservedBlocks(self.index, replica, self.policy)

    def stored(self, replica: str, blocks: Sequence[int]) -> None:
        self.index.add(replica, blocks)
        if (order := self._orders.get(replica)) is not None:
            order.stored(blocks)
            self._announced(replica)
        self.policy.stored(replica, blocks)

    def removed(self, replica: str, blocks: Sequence[int]) -> None:
        self.index.remove(replica, blocks)
        if (order := self._orders.get(replica)) is not None:
            order.removed(blocks)
        self.policy.removed(replica, blocks)

    def computed(self, replica: str, chain: Sequence[int]) -> None:
        """An engine that announces nothing has computed a prompt, and evicted what it probably has no memory for."""
        order = self._orders[replica]
        self.stored(replica, [block for block in chain if block not in order])
        self.removed(replica, order.surplus())

    def reset(self, replica: str, blocks: Sequence[int]) -> None:
        self.index.reset(replica, blocks)
        if (order := self._orders.get(replica)) is not None:
            order.reset(blocks)
            self._announced(replica, everything=True)
        self.policy.reset(replica, blocks)

    def _announced(self, replica: str, *, everything: bool = False) -> None:
        """The engine has announced more: such blocks are held, or evicted again, and no longer expected."""
        for request_id, (where, block, _) in tuple(self._unannounced.items()):
            if where == replica and (everything or block in self._orders[replica]):
                del self._unannounced[request_id]
                self.reservations.release(request_id)

    def expire(self, now: float) -> None:
        """Drop what is expected for too long."""
        self.reservations.expire(now)
        for request_id, (_, _, until) in tuple(self._unannounced.items()):
            if until <= now:
                del self._unannounced[request_id]
                self.reservations.release(request_id)

    # Requests

    def candidates(
        self, keys: Sequence[int], excluded: Collection[str], now: float, *, usable: int | None = None
    ) -> Candidates:
        """Every joined replica as it stands for a prompt whose full blocks are `keys`.

        `usable`: blocks before the prompt's last token, which is always computed; None: all.
        """
        views = self.loads.views(now)
        used: dict[str, int] | None = None
        if self.loads.crowded:
            near = self._at_first_block.of(keys[0]) if len(keys) else ()
            used = {replica: self._used_blocks(replica, keys) for replica in near}
        one_by_one = self._orders or self.hit_rules or not self.policy.prefers_columns
        if not one_by_one and (columns := self.loads.columns(now)) is not None:
            from .load_columns import CandidateColumns

            held, places = self.index.lengths(keys), self.index.places
            extended = self.reservations.extended(lambda replica: held[places[replica]], keys)
            doubted = {places[replica]: self.feeds[replica] for replica in self._doubted}
            barred = [places[replica] for replica in excluded if replica in places]
            # A copy, as the table of a decision is computed when somebody looks at it, after later changes.
            return CandidateColumns(columns, places, views.copy(), doubted, held, extended, used, barred)
        return self._each_candidate(keys, excluded, views, used, usable)

    def _each_candidate(
        self,
        keys: Sequence[int],
        excluded: Collection[str],
        views: Sequence[ReplicaLoad],
        used: Mapping[str, int] | None,
        usable: int | None,
    ) -> list[Candidate]:
        held, places = self.index.lengths(keys), self.index.places
        slower = self._apply_hit_rules(held, keys[:usable])
        expected = held[:]
        for replica, order in self._orders.items():
            expected[places[replica]] = order.kept(keys, held[places[replica]])
        extended = self.reservations.extended(lambda replica: expected[places[replica]], keys)
        for replica, blocks in extended.items():
            expected[places[replica]] = blocks
        if used is not None:
            # Requests ahead take what is free, and evict what it holds; of a prompt its last blocks first.
            for place, (replica, load) in enumerate(zip(places, views, strict=True)):
                expected[place] = min(expected[place], used.get(replica, 0) + max(0, load.spare_blocks))
        return [
            Candidate(
                replica_id=replica,
                feed=feed,
                load=views[place],
                held_blocks=held[place],
                expected_blocks=expected[place],
                used_blocks=used.get(replica, 0) if used else 0,
                excluded=replica in excluded,
                slower_blocks=slower.get(replica, ()),
            )
            for place, (replica, feed) in enumerate(self.feeds.items())
        ]

    def _apply_hit_rules(self, held: MutableSequence[int], keys: Sequence[int]) -> dict[str, SlowerBlocks]:
        """Put what such engines would find into `held`; returns what of it they have to load."""
        slower: dict[str, SlowerBlocks] = {}
        for replica, hit_of in self.hit_rules.items():
            if (hit := hit_of(keys)) is not None:
                held[self.index.places[replica]], slower[replica] = hit
        return slower

    def _used_blocks(self, replica: str, keys: Sequence[int]) -> int:
        """How many leading blocks of a prompt the requests in flight there use."""
        chains = self._in_flight[replica]
        if not chains or not len(keys):
            return 0
        first, used = keys[0], 0
        for chain in chains.values():
            if len(chain) > used and chain[0] == first and (used == 0 or chain[used] == keys[used]):
                used = common_prefix(chain, keys, used)
                if used == len(keys):
                    break
        return used

    def decide(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Decision:
        return self.policy.decide(prompt, candidates, self._rng)

    def rank(self, prompt: Prompt) -> float:
        """The place of a request that begins to wait, among its tenant's: the lowest goes first."""
        held = self.index.lengths(prompt.hashes)
        self._apply_hit_rules(held, prompt.hashes)
        uncached = max(1, prompt.tokens - max(held, default=0) * prompt.block_size)
        # Any replica's cost will do: it only weighs one prompt against another.
        costs = [self.loads.view(replica, prompt.now).prefill_cost for replica in self.loads.replicas()[:1]]
        return self.policy.rank(
            prompt, uncached, sum([cost.seconds(prompt.tokens - uncached, uncached) for cost in costs])
        )

    def explain(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Explanation:
        """The table of the decision that `decide` would take. Changes nothing."""
        return explanation_of(self.policy.consider(prompt, candidates, Random(0)))

    def book(self, request_id: int, decision: Decision, keys: Sequence[int], now: float) -> None:
        """The request goes to the chosen replica: its blocks are expected there, its uncached tokens are load."""
        chosen = decision.chosen
        assert chosen is not None, "a decision without a replica cannot be booked"
        uncached = decision.uncached_tokens
        prefill_s = chosen.load.prefill_cost.seconds(decision.prompt.tokens - uncached, uncached)
        needed = len(keys) + 1 - self._used_blocks(chosen.replica_id, keys)
        pending = Pending(uncached, needed, prefill_s)
        self.loads.dispatched(chosen.replica_id, request_id, pending, now)
        found = min(chosen.held_blocks, chosen.expected_blocks)
        self.reservations.reserve(request_id, chosen.replica_id, keys, found, now)
        if (order := self._orders.get(chosen.replica_id)) is not None:
            order.sent(request_id, keys, found)
        self._in_flight[chosen.replica_id][request_id] = keys
        if len(keys):
            self._at_first_block.add(keys[0], chosen.replica_id)
        self.policy.booked(chosen.replica_id, request_id, decision.prompt)

    def started(self, replica: str, request_id: int) -> None:
        self.loads.started(replica, request_id)
        self.policy.started(replica, request_id)

    def ended(self, replica: str, request_id: int, computed_at: float | None = None) -> None:
        """The request has left the replica, which has computed all of its prompt, or perhaps not (None)."""
        chain = self._forget(replica, request_id)
        order = self._orders.get(replica)
        if order is not None and computed_at is not None and len(chain) and chain[-1] not in order:
            self._unannounced[request_id] = replica, chain[-1], computed_at + ANNOUNCED_WITHIN_S
        else:
            self.reservations.release(request_id)
        self.loads.ended(replica, request_id)
        if order is not None:
            order.ended(request_id)
        self.policy.ended(replica, request_id)

    def _forget(self, replica: str, request_id: int) -> Sequence[int]:
        """The request is in flight no longer. Returns its blocks; none if it, or the replica, is gone already."""
        keys = self._in_flight.get(replica, {}).pop(request_id, ())
        if len(keys):
            self._at_first_block.remove(keys[0], replica)
        return keys

    def finished(self, tokens: int) -> None:
        """A request ended by itself after generating so many tokens, over all its replicas."""
        self.loads.finished(tokens)

    def check(self) -> None:
        self.index.check()
        self.reservations.check()
        self.loads.check()
        for order in self._orders.values():
            order.check()
        prompts = [(keys, name) for name, chains in self._in_flight.items() for keys in chains.values() if len(keys)]
        self._at_first_block.check([(keys[0], name) for keys, name in prompts])
        doubted = {replica for replica, feed in self.feeds.items() if feed is not LIVE}
        assert self._doubted == doubted, f"{self._doubted} are noted as not live, {doubted} are not"
        assert tuple(self.feeds) == self.loads.replicas() == tuple(self.index.places), "replicas or their order differ"


def regret_tokens(prompt: Prompt, candidates: Candidates, decision: Decision) -> int:
    """Tokens that the chosen replica computes and the best holder would not have."""
    assert decision.chosen is not None, "nothing was chosen"
    if isinstance(candidates, list):
        best = max([each.expected_blocks if each.feed is LIVE else 0 for each in candidates])
    else:
        best = candidates.longest_live()
    cached = min(best * prompt.block_size, prompt.tokens - 1)
    return decision.chosen.uncached_tokens(prompt) - (prompt.tokens - cached)


def known_tokens(prompt: Prompt, candidates: Candidates) -> int:
    """The longest prefix that some replica holds or will hold: all of the prompt, if those are all its full blocks."""
    if isinstance(candidates, list):
        blocks = max([max(each.held_blocks, each.expected_blocks) for each in candidates], default=0)
    else:
        blocks = candidates.longest_known()
    return prompt.tokens if 0 < prompt.blocks <= blocks else blocks * prompt.block_size


class _ObservedBlocks(ReplicaBlocks):
    """One replica's blocks in the index, whose changes the policy sees too."""

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
