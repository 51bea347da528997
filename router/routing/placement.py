"""One router's state for placing requests: what each replica holds and will hold, its load, and the policy.

Calls the policy and books its decisions. Pure: hashes and times are arguments. Independent of the request flow and of
tokens; `homing simulate` runs this code over modelled replicas.
"""

import logging
from collections.abc import Collection, Iterable, Sequence
from heapq import heapreplace
from math import inf
from random import Random
from typing import NamedTuple

import msgspec

from ...events.follow.block_set import Digest
from ...events.follow.input_log import InputLog, logged
from ...events.follow.residency import ResidentBlocks
from ...events.wire.messages import COMPUTE_MEDIUM, LoadReport
from ...replica.messages import ReplicaDescription
from ..backend import Explanation, FeedState, RouterCounters
from .block_history import BlockHistory
from .fleet import Fleet
from .hits import EngineHits, HitRule, SlowerBlocks
from .joined_replica import NOTHING_FORESEEN, Foreseen, InFlight, JoinedReplica
from .policy.base import STALE, Candidate, Decision, Policy, Prompt, Score, expected_ttft_s
from .policy.explain import explanation_of
from .prefix_index import PrefixIndex
from .tenant_blocks import TenantBlocks
from .tier_index import TierIndex

log = logging.getLogger(__name__)

#: In fleets of more than twice this number, replicas are passed over that as many less loaded ones match in length of
#: the prefix.
CONTENDERS = 16
#: A replica with less than this share of its blocks to spare is crowded; few prompts need as many. Not tuned.
CROWDED = 0.5
#: The reason of a decision that the policy did not take.
FEWEST = "fewest requests"


def _blocks_bytes(args: tuple[object, ...]) -> int:
    blocks = args[1]
    return 40 * len(blocks) if isinstance(blocks, Sequence) else 0


class Held(NamedTuple):
    """The leading blocks of a prompt that each replica has cached, by place."""

    blocks: Sequence[int]  #: in the pool and, after those, in tiers
    pool: Sequence[int]  #: in the pool
    slower: dict[int, SlowerBlocks]  #: those of external engines in slower memory


class Placement:
    """The joined replicas, the index of their blocks, and the policy, kept consistent with each other."""

    def __init__(
        self,
        policy: Policy,
        *,
        router_id: str,
        silence_s: float,
        rng: Random,
        counters: RouterCounters | None = None,
    ) -> None:
        """`silence_s`: a replica from which nothing was heard for so long gets no requests."""
        self.index = PrefixIndex()
        self.tiers = TierIndex()
        self.fleet = Fleet(router_id, silence_s)
        self.policy = policy
        self.past = BlockHistory()
        self.tenant_blocks = TenantBlocks(self.index)
        self.rng = rng
        self._staged: dict[str, list[int]] = {}  #: of policies that keep blocks, by replica
        self.inputs = InputLog()  #: shared with the request flow
        self._counters = counters or RouterCounters()

    def __contains__(self, replica: object) -> bool:
        return replica in self.fleet

    def __len__(self) -> int:
        return len(self.fleet)

    # Replicas

    def join(self, description: ReplicaDescription, now: float) -> None:
        """Add a replica that can take requests but whose events are not followed yet."""
        joined = self.fleet.join(description, now)
        # External engines do not guarantee that a cached block's parents are cached.
        self.index.join(joined.name, description.num_blocks, closed=joined.hits.exact)
        self.policy.join(description)

    def leave(self, replica: str) -> None:
        """Remove a replica with its held and expected blocks."""
        self.past.lost(replica)
        self._staged.pop(replica, None)
        self.index.leave(replica)
        self.tiers.leave(replica)
        self.fleet.leave(replica)
        self.policy.leave(replica)

    @logged()
    def set_feed(self, replica: str, feed: FeedState) -> None:
        """Set how far a joined replica's events can be trusted."""
        self.fleet[replica].feed = feed

    @logged()
    def set_adapters(self, replica: str, adapters: frozenset[str]) -> None:
        """Set the adapters that an external engine offers."""
        self.fleet[replica].adapters = adapters

    @logged()
    def set_hit_rule(self, replica: str, rule: HitRule) -> None:
        """Ask this rule, not the index, what an external engine has cached."""
        self.fleet[replica].hits.rule = rule

    def report(self, replica: str, report: LoadReport, now: float) -> None:
        self.past.now = now
        if self.fleet.report(replica, report, now):
            self.policy.report(replica, report)

    def blocks_of(self, replica: str, medium: str = COMPUTE_MEDIUM) -> ResidentBlocks:
        """The store for the subscription of one of our replicas: the index, the policy and the history."""
        return _ObservedBlocks(self, replica, medium)

    @logged(_blocks_bytes)
    def stored(self, replica: str, blocks: Sequence[int], medium: str = COMPUTE_MEDIUM) -> None:
        """The replica announced these blocks."""
        if medium == COMPUTE_MEDIUM:
            self._stored(replica, blocks)
        else:
            self.tiers.of(replica, medium).add(replica, blocks)

    def _stored(self, replica: str, blocks: Sequence[int]) -> None:
        self.index.add(replica, blocks)
        self.fleet[replica].stored(blocks)
        self.policy.stored(replica, blocks)

    @logged(_blocks_bytes)
    def removed(self, replica: str, blocks: Sequence[int], medium: str = COMPUTE_MEDIUM) -> None:
        """The replica evicted these blocks."""
        if medium == COMPUTE_MEDIUM:
            self._removed(replica, blocks)
            return
        self.tiers.of(replica, medium).remove(replica, blocks)
        gone = [each for each in blocks if not self.index.holds(replica, each) and not self.tiers.holds(replica, each)]
        self.past.removed(replica, gone, self.fleet[replica].blamed)

    def _removed(self, replica: str, blocks: Sequence[int]) -> None:
        joined = self.fleet[replica]
        self.index.remove(replica, blocks)
        joined.hits.removed(blocks)
        self.policy.removed(replica, blocks)
        self.past.removed(replica, blocks, joined.blamed)

    @logged(_blocks_bytes)
    def reset(self, replica: str, blocks: Sequence[int], medium: str = COMPUTE_MEDIUM) -> None:
        """The replica holds exactly these blocks in this medium."""
        if medium != COMPUTE_MEDIUM:
            self.tiers.of(replica, medium).reset(replica, blocks)
            return
        if blocks:
            self.index.reset(replica, blocks)
        else:
            self.past.lost(replica)
            self.index.clear(replica)
        self.fleet[replica].reset(blocks)
        self.policy.reset(replica, blocks)

    @logged(_blocks_bytes)
    def stage(self, replica: str, blocks: Sequence[int], medium: str = COMPUTE_MEDIUM, *, first: bool) -> None:
        """Take a part of the blocks that `install` will put in the place of the replica's. `first`: drop others."""
        if medium != COMPUTE_MEDIUM:
            self.tiers.of(replica, medium).stage(replica, blocks, first=first)
            return
        self.index.stage(replica, blocks, first=first)
        if type(self.policy).reset is not Policy.reset:
            staged = self._staged[replica] = [] if first else self._staged.get(replica, [])
            staged += blocks

    @logged()
    def install(self, replica: str, medium: str = COMPUTE_MEDIUM) -> None:
        """The replica holds exactly the staged blocks in this medium."""
        if medium != COMPUTE_MEDIUM:
            self.tiers.of(replica, medium).install(replica)
            return
        self.index.install(replica)
        self.policy.reset(replica, self._staged.pop(replica, ()))

    @logged(_blocks_bytes)
    def computed(self, replica: str, chain: Sequence[int]) -> None:
        """An engine without events has computed a prompt; drop the blocks for which it probably has no memory left."""
        hits = self.fleet[replica].hits
        assert isinstance(hits, EngineHits), f"{replica} announces its blocks"
        self._stored(replica, [block for block in chain if block not in hits])
        self._removed(replica, hits.surplus())

    def expire(self, now: float) -> None:
        """Drop expected blocks that are overdue, and what is left in the index of replicas that are gone."""
        self.past.now = now
        self.index.sweep()
        self.tiers.sweep()
        for joined in self.fleet:
            joined.expire(now)

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
        self.fleet.refresh(now)
        end = len(keys) if usable is None else min(usable, len(keys))
        held = self._held(keys, end)
        compared: Iterable[JoinedReplica] = self.fleet
        if not every and len(held.blocks) > 2 * CONTENDERS and self.policy.reads_contenders:
            compared = self._contenders(held.blocks, keys, excluded)
        found = []
        for each in compared:
            self.fleet.refresh_one(each, now)
            found.append(self._candidate(each, keys, end, held, each.name in excluded))
        return found

    def _held(self, keys: Sequence[int], end: int) -> Held:
        """What the replicas have cached; `end`: blocks beyond it are not loaded."""
        held, slower = self.index.lengths(keys), dict[int, SlowerBlocks]()
        for joined in self.fleet:
            if (rule := joined.hits.rule) is not None and (hit := rule(keys[:end])) is not None:
                held[joined.place], slower[joined.place] = hit
        if not self.tiers:
            return Held(held, held, slower)
        pool = held[:]
        for joined in self.fleet:
            held[joined.place] += _number(self._loads(joined, keys, held[joined.place], end))
        return Held(held, pool, slower)

    def _loads(self, joined: JoinedReplica, keys: Sequence[int], start: int, end: int) -> SlowerBlocks:
        """The blocks that the replica loads from its tiers after `start` blocks; nothing that costs more than computing
        it.
        """
        media = self.tiers.media(joined.name)
        if not media or start >= end:
            return ()
        return self.tiers.run(joined.name, keys, start, end, joined.worth_loading(media))

    def _candidate(self, joined: JoinedReplica, keys: Sequence[int], end: int, held: Held, excluded: bool) -> Candidate:
        load, hits, used = joined.load, joined.hits, 0
        blocks, pool, slower = held.blocks[joined.place], held.pool[joined.place], held.slower.get(joined.place, ())
        expected = joined.expected.extended(keys, hits.remaining_hit(keys, pool))
        if blocks > pool or (expected > pool and self.tiers.media(joined.name)):
            expected, slower = self._with_loads(joined, keys, expected, end)
        if load.spare_blocks < CROWDED * load.total_blocks:
            used = joined.used_blocks(keys)
            expected = hits.when_crowded(expected, used, load.spare_blocks)
        return Candidate(
            replica_id=joined.name,
            feed=joined.feed,
            load=load,
            held_blocks=blocks,
            expected_blocks=expected,
            pool_blocks=pool,
            used_blocks=used,
            excluded=excluded,
            slower_blocks=slower,
        )

    def _with_loads(self, joined: JoinedReplica, keys: Sequence[int], start: int, end: int) -> tuple[int, SlowerBlocks]:
        """The length of a prefix whose first `start` blocks will be in the pool, with what the replica loads and what
        requests in flight leave after that; and the part to load.
        """
        found: dict[str, int] = {}
        while loads := self._loads(joined, keys, start, end):
            for medium, blocks in loads:
                found[medium] = found.get(medium, 0) + blocks
            start += _number(loads)
            further = joined.expected.extended(keys, start)
            if further == start:
                break
            start = further
        return start, tuple(found.items())

    def _contenders(
        self, held: Sequence[int], keys: Sequence[int], excluded: Collection[str]
    ) -> Iterable[JoinedReplica]:
        """The replicas for which fewer than CONTENDERS less loaded ones hold as long a prefix.

        Nearly always, the replica of least cost is among them: any other would compute more and wait longer.
        """
        best = [-1] * CONTENDERS  # a heap of the longest prefixes so far
        for each in self.fleet.by_pressure():
            length = held[each.place]
            if each.expected.owners:
                length = each.expected.extended(keys, length)
            if length > best[0] and each.name not in excluded:
                heapreplace(best, length)
                yield each

    def decide(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Decision:
        """The policy's decision, or the replica with the fewest requests if the policy errs.

        While a replica has no obstacle, a request must not wait: nothing else would place it later.
        """
        try:
            decision = self.policy.decide(prompt, candidates, self.rng)
            checked = self._checked(decision, candidates)
        except Exception as error:  # from now on, no request would be placed
            self._overrule(error)
            return self.fewest(prompt, candidates)
        if checked is not decision:
            self._overrule(decision.chosen)
        return checked

    def _overrule(self, what: object) -> None:
        if not self._counters.overruled:
            trace = what if isinstance(what, Exception) else None
            log.error("policy_overruled policy=%s chosen=%r", self.policy.name, what, exc_info=trace)
        self._counters.overruled += 1

    def fewest(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Decision:
        """The decision for the available replica with the fewest requests, whatever the policy says."""
        return _decided_by_load(self.policy, prompt, candidates)

    def _checked(self, decision: Decision, candidates: Sequence[Candidate]) -> Decision:
        policy, prompt, chosen = self.policy, decision.prompt, decision.chosen
        if chosen is not None and policy.obstacle(prompt, chosen) is None:
            return decision
        usable = policy.usable(prompt, candidates)
        if chosen is None and not usable:
            return decision
        return policy.choose(
            prompt, candidates, _fewest(usable), f"{FEWEST}, because the policy chose no usable replica"
        )

    def rank(self, prompt: Prompt) -> float:
        """Sort key of a request that starts waiting, among its tenant's requests: the lowest goes first."""
        held = self._held(prompt.hashes, len(prompt.hashes)).blocks
        uncached = max(1, prompt.tokens - max(held, default=0) * prompt.block_size)
        self.fleet.refresh(prompt.now)
        # Any replica's cost will do: the key only compares prompts with each other.
        some = next(iter(self.fleet), None)
        prefill_s = 0.0 if some is None else some.load.prefill_cost.seconds(prompt.tokens - uncached, uncached)
        try:
            return self.policy.rank(prompt, uncached, prefill_s)
        except Exception as error:
            self._overrule(error)
            return Policy.rank(self.policy, prompt, uncached, prefill_s)

    def explain(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Explanation:
        """The table of the decision that `decide` would take among these candidates. Changes no state."""
        try:
            return explanation_of(self._checked(self.policy.consider(prompt, candidates, Random(0)), candidates))
        except Exception:  # `decide` counts them
            log.debug("policy_failed policy=%s", self.policy.name, exc_info=True)
            return explanation_of(self.fewest(prompt, candidates))

    def foresee(self, decision: Decision) -> Foreseen:
        """The cached blocks that this request will find if it is booked now, and those that others will find then."""
        assert decision.row is not None, "nothing was chosen"
        chosen, prompt = decision.row.candidate, decision.prompt
        if chosen.feed is STALE:
            return NOTHING_FORESEEN
        joined = self.fleet[chosen.replica_id]
        foreseen = joined.foresee(prompt, chosen.held_blocks, chosen.expected_blocks, chosen.tokens_on_arrival(prompt))
        if not chosen.slower_blocks or not joined.hits.exact:
            return foreseen
        loads = chosen.slower_blocks
        if foreseen.passed:  # then it loads itself what they would have brought up
            loads = self._loads(joined, prompt.hashes, chosen.pool_blocks, foreseen.blocks)
        return msgspec.structs.replace(foreseen, loads=loads)

    def book(
        self, request_id: int, decision: Decision, keys: Sequence[int], now: float, name: str = "", tenant: bytes = b""
    ) -> None:
        """Book a request on the chosen replica: its blocks become expected, its uncached tokens count as load.

        `name` of the request and `tenant` are for people.
        """
        row, prompt = decision.row, decision.prompt
        assert row is not None, "a decision without a replica cannot be booked"
        chosen, uncached = row.candidate, row.uncached_tokens
        joined, load = self.fleet[chosen.replica_id], chosen.load
        # With nothing queued, it starts in the next step. A decode step may be in progress.
        starts_by = inf if load.queued_prefill_tokens else now + load.decode_step_s * (load.running > 0)
        request = InFlight(
            request_id=request_id,
            chain=keys,
            start=min(chosen.pool_blocks, chosen.expected_blocks),
            uncached_tokens=uncached,
            blocks=len(keys) + 1 - joined.used_blocks(keys),
            prefill_s=load.prefill_cost.seconds(prompt.tokens - uncached, uncached),
            prompt_tokens=prompt.tokens,
            computed_tokens=chosen.tokens_on_arrival(prompt),
            prefilled_tokens=joined.prefilled_tokens,
            starts_by=starts_by,
            name=name,
        )
        self.past.now = now
        cached = min(chosen.held_blocks, chosen.expected_blocks)
        self.past.sent(joined.name, keys[cached:], name)
        self.tenant_blocks.needed(keys, tenant, cached)
        self.fleet.send(joined.name, request, now)
        self.policy.booked(joined.name, request_id, prompt)

    def started(self, replica: str, request_id: int) -> None:
        self.fleet.started(replica, request_id)
        self.policy.started(replica, request_id)

    def ended(self, replica: str, request_id: int, computed_at: float | None = None) -> None:
        """The request has left the replica. `computed_at`: when all of its prompt was computed; None: perhaps never."""
        self.fleet.ended(replica, request_id, computed_at)
        self.policy.ended(replica, request_id)

    def check(self) -> None:
        self.index.check()
        self.tiers.check()
        self.fleet.check()
        names = tuple(joined.name for joined in self.fleet)
        assert names == tuple(self.index.places), "replicas or their order differ"


def _decided_by_load(policy: Policy, prompt: Prompt, candidates: Sequence[Candidate]) -> Decision:
    """The decision for the available replica with the fewest requests, without the policy's own code."""
    chosen = _fewest([each for each in candidates if each.available])

    def score(candidate: Candidate) -> Score:
        uncached = candidate.uncached_tokens(prompt)
        seconds = expected_ttft_s(prompt, candidate, uncached)
        obstacle = None if candidate.available else Policy.obstacle(policy, prompt, candidate)
        return Score(candidate, uncached, seconds, obstacle, 0.0, seconds)

    return Decision(
        policy=policy.name,
        prompt=prompt,
        row=None if chosen is None else score(chosen),
        table=lambda: [score(each) for each in candidates],
        reason=lambda _: FEWEST,
    )


def _number(blocks: SlowerBlocks) -> int:
    return sum([count for _, count in blocks])


def _fewest(usable: Sequence[Candidate]) -> Candidate | None:
    return min(usable, key=lambda each: (each.load.requests, each.replica_id), default=None)


def known_tokens(prompt: Prompt, candidates: Sequence[Candidate]) -> int:
    """Tokens of the longest prefix that any replica holds or will hold; all tokens if that covers every full block."""
    blocks = max([max(each.held_blocks, each.expected_blocks) for each in candidates], default=0)
    return prompt.tokens if 0 < prompt.blocks <= blocks else blocks * prompt.block_size


class _ObservedBlocks:
    """The `ResidentBlocks` (events/follow/residency.py) of one of our replicas, which its subscription changes."""

    def __init__(self, placement: Placement, replica: str, medium: str) -> None:
        self._placement, self._replica, self._medium = placement, replica, medium

    @property
    def digest(self) -> Digest:
        placement = self._placement
        pool = self._medium == COMPUTE_MEDIUM
        index = placement.index if pool else placement.tiers.of(self._replica, self._medium)
        return index.digest(self._replica)

    def store(self, parent: int | None, hashes: Sequence[int]) -> None:  # noqa: ARG002 - a hash names its whole prefix
        self._placement.stored(self._replica, hashes, self._medium)

    def remove(self, hashes: Sequence[int]) -> None:
        self._placement.removed(self._replica, hashes, self._medium)

    def clear(self) -> None:
        self._placement.reset(self._replica, (), self._medium)

    def replace(self, blocks: Iterable[tuple[int, int | None]]) -> None:
        self.stage(blocks, first=True)
        self.install()

    def stage(self, blocks: Iterable[tuple[int, int | None]], *, first: bool) -> None:
        self._placement.stage(self._replica, [block for block, _ in blocks], self._medium, first=first)

    def install(self) -> None:
        self._placement.install(self._replica, self._medium)
