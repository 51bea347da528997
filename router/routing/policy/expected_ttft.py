"""Chooses the replica with the least expected time to first token, counting cached prefixes and the cost to others.

A replica's cost is the expected TTFT there (base.py) plus the time that the choice costs later requests: recomputing
blocks that another replica holds delays all later requests. If a queue is busy for a share b of the time, one second of
extra work delays requests by 1 / (1 - b) seconds in total; a request that arrives while some replica is idle goes there
and loses nothing. With b of the replica in question, and a the share of the time in which no replica is idle, the
second term is

    (time to prefill this prompt here - time with the longest prefix that any replica holds) * a / (1 - b)

Without this term a loaded cluster becomes unstable: queues make holders unattractive, so prefixes are recomputed, which
makes more queues. With b in place of a, prompts queue at holders while other replicas are idle. With the mean b of all
replicas, a replica that happens to hold many popular prefixes keeps them: copies seem as expensive on idler replicas.

If a replica has no unused memory, recomputing a prefix there evicts as many blocks that may be needed again.
RECOMPUTED_SHARE is then added to the factor; without it, copies of shared prefixes fill the memory until nothing else
stays cached.

Answers count too: every running answer on a replica waits while a prefill is computed there, and the new answer will
run at that replica's pace instead of the fastest one's. Both are weighted by the mean time to first token over the mean
time to last token, so a choice that shifts both by the same share has no net cost. The weight is at most
MAX_ANSWER_WEIGHT, which matters when answers are short. Of the part of a prefill that no replica can avoid, at most
LONG_PREFILL_TOKENS count: otherwise the longest prompts, which determine the p99, queue behind each other on the
replicas with the fewest answers while other replicas are idle. What would be recomputed counts in full.

Replicas whose cost exceeds the least by no more than the estimate's own error count as equal. Ties go to the fewest
uncached tokens, then the session's replica, the fewest requests, the fewest occupied blocks and finally a random draw,
never to a position in a list. For hundreds of replicas, column_scores.py takes the same decision with array operations.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from random import Random
from typing import TYPE_CHECKING

import msgspec

from ..replica_load import ReplicaLoad
from .base import Candidate, Decision, ManyCandidates, Policy, Prompt, Score, expected_ttft_s

if TYPE_CHECKING:
    from ..column_scores import ColumnScores
    from ..load_columns import Numbers

#: Costs count as equal within TIE_S plus TIE_RATIO of the least: half a millisecond is below the jitter of any step.
#: Not tuned by measurement.
TIE_S = 0.0005
TIE_RATIO = 0.05
#: Limit of the proportional part: an error in the prompt's own cost is the same on all replicas. Simulated in seven
#: cells of docs/simulate.md: 0.7 % less mean TTFT than without the limit, the same p99.
TIE_MAX_S = 0.05
#: Decisions over which the busy shares are averaged (an older one has lost 63 % of its weight). Not tuned.
BUSY_MEMORY = 100
#: Limit of busy shares: 1 would make extra work infinitely expensive, and the average resolves no more than this.
#: Simulated in three cells of docs/simulate.md at 95 % of capacity: 0.95 gave 18, 1 and -3 % more mean TTFT.
BUSY_LIMIT = 1 - 1 / BUSY_MEMORY
#: Share of evicted tokens that are needed again and recomputed. Simulated on the cells `tune` of
#: tests/bench/routing_grid.py and on 13 of agents at 85 and 95 % of capacity: geometric means of mean TTFT there were
#: 1.19, 0.65, 0.84, 0.59 and 0.63 s with 0, 0.3, 0.5, 0.8 and 1.5.
RECOMPUTED_SHARE = 0.8
#: Highest weight of a second of an answer relative to a second of TTFT. Simulated on 16 cells of
#: tests/bench/routing_grid.py, 600 requests each, as a constant of 0, 0.03 and 0.1: geometric means over the best
#: peer's were 0.957, 0.946 and 0.967 for mean TTFT, 0.971, 0.956 and 1.038 for its p99, 1.059, 1.005 and 0.967 for the
#: time to the last token.
MAX_ANSWER_WEIGHT = 0.03
#: Simulated on 142 cells of tests/bench/routing_grid.py, half of them of Mooncake's traces (docs/simulate.md): best or
#: within 2 % of the best peer in 131 of them in mean TTFT, 95 in p99 and 100 in the time to the last token; with 16,384
#: in 129, 88 and 110, without the limit in 124, 67 and 120.
LONG_PREFILL_TOKENS = 8192
#: A decision's weight in the averages is limited to this many mean gaps: after a pause it says little. Not tuned.
MAX_GAPS = 5.0
MAX_SESSIONS = 65_536


class Weights(msgspec.Struct, frozen=True):
    """Weights of the costs besides TTFT, learned from recent decisions."""

    #: by candidate: how often it has prefills queued, or no room, when a request arrives (b)
    busy: "Sequence[float] | Numbers"
    all_busy: float  #: how often no usable candidate is idle when a request arrives (a)
    answers: float  #: of a second of an answer, relative to a second of TTFT


class ExpectedTtft(Policy):
    """Least expected time to first token, counting cached prefixes and the cost to other requests."""

    name = "expected-ttft"
    prefers_columns = True
    #: If False, every prompt counts as uncached on every replica.
    sees_cache = True

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        #: See `Weights`; averages over recent decisions.
        self._busy: Sequence[float] | Numbers = ()
        self._all_busy = 0.0
        self._ttft_s = self._answer_s = 0.0  #: mean expected times to first and last token over recent decisions
        self._max_sessions = max_sessions
        self._decided_at = self._gap_s = 0.0  #: time of the last decision, and the mean time between decisions
        #: The last replica of each of the most recent sessions; it may have left.
        self._sessions: OrderedDict[str | None, str] = OrderedDict()

    def consider(self, prompt: Prompt, candidates: Sequence[Candidate], rng: Random) -> Decision:
        return self._consider(prompt, candidates, rng)[0]

    def _consider(
        self, prompt: Prompt, candidates: Sequence[Candidate], rng: Random
    ) -> "tuple[Decision, CandidateScores | ColumnScores]":
        weights, preferred = self._weights(len(candidates)), self._sessions.get(prompt.session)
        if not isinstance(candidates, list) and isinstance(candidates, ManyCandidates):
            from ..column_scores import ColumnScores  # not at the top: numpy takes 15 MB, and few replicas need none

            columns = ColumnScores(
                prompt, candidates, weights, holds_requests=self.holds_requests, sees_cache=self.sees_cache
            )
            chosen = columns.choose(preferred, rng)
            score_all = partial(CandidateScores, prompt, candidates, weights, self.obstacle, self.sees_cache)
            reason = partial(_explain_choice, chosen, lambda: score_all().ties())
            return Decision(self.name, prompt, chosen, lambda: score_all().table(), reason, self.sees_cache), columns
        scores = CandidateScores(prompt, candidates, weights, self.obstacle, self.sees_cache)
        chosen = scores.choose(preferred, rng)
        reason = partial(_explain_choice, chosen, scores.ties)
        return Decision(self.name, prompt, chosen, scores.table, reason, self.sees_cache), scores

    def leave(self, replica: str) -> None:
        """Reset all busy shares to their mean, as `_weights` does: they are stored by place, and places change."""
        del replica
        self._busy = [_mean(self._busy)]

    def _weights(self, candidates: int) -> Weights:
        busy = self._busy
        if len(busy) != candidates:  # some joined or left
            busy = [_mean(busy)] * candidates
        answers = min(MAX_ANSWER_WEIGHT, self._ttft_s / self._answer_s) if self._answer_s else MAX_ANSWER_WEIGHT
        return Weights(busy, min(self._all_busy, BUSY_LIMIT), answers)

    def decide(self, prompt: Prompt, candidates: Sequence[Candidate], rng: Random) -> Decision:
        decision, scores = self._consider(prompt, candidates, rng)
        if candidates:
            weight = self._weight(prompt.now)
            self._busy, all_busy = scores.busy(weight)
            self._all_busy += (all_busy - self._all_busy) * weight
        if decision.row is None:
            return decision
        ttft_s, load = decision.row.ttft_s, decision.row.candidate.load
        self._ttft_s += (ttft_s - self._ttft_s) / BUSY_MEMORY
        self._answer_s += (ttft_s + load.answer_tokens * load.decode_step_s - self._answer_s) / BUSY_MEMORY
        if prompt.session is not None:
            self._sessions[prompt.session] = decision.row.candidate.replica_id
            self._sessions.move_to_end(prompt.session)
            if len(self._sessions) > self._max_sessions:
                self._sessions.popitem(last=False)
        return decision

    def _weight(self, now: float) -> float:
        """Weight of a decision in the averages, by the time since the last: a burst of requests sees only itself."""
        gap_s = max(0.0, now - self._decided_at)
        self._decided_at = now
        self._gap_s += (gap_s - self._gap_s) / BUSY_MEMORY
        return min(gap_s / self._gap_s, MAX_GAPS) / BUSY_MEMORY if self._gap_s else 0.0


class CandidateScores:
    """Costs of a prompt on each candidate. `obstacle` says why a candidate cannot be chosen."""

    __slots__ = ("_busy", "_candidates", "_least", "_obstacle", "_pace_s", "_prompt", "_uncached", "_weights")

    def __init__(
        self,
        prompt: Prompt,
        candidates: Sequence[Candidate],
        weights: Weights,
        obstacle: Callable[[Prompt, Candidate], str | None],
        sees_cache: bool,
    ) -> None:
        self._prompt = prompt
        self._candidates = candidates
        self._weights = weights
        self._obstacle = obstacle
        self._busy = busy if type(busy := weights.busy) is list else list(map(float, busy))
        self._uncached = [each.uncached_tokens(prompt) if sees_cache else prompt.tokens for each in candidates]
        self._least = min(self._uncached, default=0)  #: tokens that the best holder would have to compute
        self._pace_s = min([each.load.decode_step_s for each in candidates], default=0.0)

    def _others_s(self, load: ReplicaLoad, uncached: int, busy: float) -> float:
        """Seconds that others lose if `uncached` tokens are computed there; `busy`: the replica's busy share."""
        total, least, weights, cost = self._prompt.tokens, self._least, self._weights, load.prefill_cost
        least_s = cost.seconds(total - least, least)
        extra_s = max(0.0, cost.seconds(total - uncached, uncached) - least_s)
        stalled_s = extra_s + least_s * (LONG_PREFILL_TOKENS / max(LONG_PREFILL_TOKENS, least))
        slower_s = load.answer_tokens * (load.decode_step_s - self._pace_s)
        answers_s = max(0.0, weights.answers * (load.running * stalled_s + slower_s))
        if not extra_s:
            return answers_s
        factor = weights.all_busy / (1 - min(busy, BUSY_LIMIT))  # seconds lost per second of extra work
        if (load.free_blocks - load.cached_free_blocks) * self._prompt.block_size <= uncached:
            factor += RECOMPUTED_SHARE
        return answers_s + max(0.0, factor * extra_s)

    def choose(self, preferred: str | None, rng: Random) -> Score | None:
        ties = self.ties()
        return _break_tie(ties, preferred, rng) if len(ties) > 1 else ties[0] if ties else None

    def busy(self, weight: float) -> tuple[list[float], bool]:
        """The busy shares including this decision, and whether no idle candidate can be chosen."""
        # A replica without room for the prompt counts as busy: extra work delays all requests that occupy its memory.
        shares, none_idle, blocks = [], True, self._prompt.blocks
        for share, each in zip(self._busy, self._candidates, strict=True):
            load = each.load
            busy = bool(load.queued_prefill_tokens) or load.spare_blocks + each.used_blocks <= blocks
            shares.append(share + (busy - share) * weight)
            none_idle = none_idle and (busy or self._obstacle(self._prompt, each) is not None)
        return shares, none_idle

    def table(self) -> list[Score]:
        rows = []
        for candidate, uncached, busy in zip(self._candidates, self._uncached, self._busy, strict=True):
            ttft_s = expected_ttft_s(self._prompt, candidate, uncached)
            lost_s = self._others_s(candidate.load, uncached, busy)
            obstacle = self._obstacle(self._prompt, candidate)
            rows.append(Score(candidate, uncached, ttft_s, obstacle, lost_s, ttft_s + lost_s))
        return rows

    def ties(self) -> list[Score]:
        """The candidates without an obstacle whose cost equals the least within the estimate's error.

        A candidate is skipped early if its queue alone, or its TTFT, exceeds the limit found so far.
        """
        found: list[Score] = []
        prompt, now = self._prompt, self._prompt.now
        least = limit = inf
        for candidate, uncached, busy in zip(self._candidates, self._uncached, self._busy, strict=True):
            load = candidate.load
            if load.queued_prefill_tokens and load.busy_until - now > limit:
                continue
            if self._obstacle(prompt, candidate) is not None:
                continue
            ttft_s = expected_ttft_s(prompt, candidate, uncached)
            if ttft_s > limit:
                continue
            lost_s = self._others_s(load, uncached, busy)
            cost_s = ttft_s + lost_s
            if cost_s < least:
                least, limit = cost_s, cost_limit(cost_s)
            if cost_s <= limit:
                found.append(Score(candidate, uncached, ttft_s, None, lost_s, cost_s))
        return [row for row in found if row.cost_s <= limit]


def cost_limit(least: float) -> float:
    """The highest cost that counts as equal to the least; never below it."""
    return least + max(0.0, min(least * TIE_RATIO, TIE_MAX_S)) + TIE_S


def _break_tie(ties: Sequence[Score], preferred: str | None, rng: Random) -> Score:
    ranks = []
    for row in ties:
        load, other = row.candidate.load, row.candidate.replica_id != preferred
        ranks.append((row.uncached_tokens, other, load.requests, load.occupied_blocks))
    best = min(ranks)
    tied = [row for row, rank in zip(ties, ranks, strict=True) if rank == best]
    if len(tied) == 1:
        return tied[0]
    # Sorted, so that the random draw does not depend on the order of the list.
    return rng.choice(sorted(tied, key=lambda row: row.candidate.replica_id))


def _explain_choice(chosen: Score | None, find_ties: Callable[[], list[Score]], usable: Sequence[Score]) -> str:
    assert chosen is not None, "nothing was chosen"
    ties = find_ties()
    if len(usable) == 1:
        return "the only replica that can take it"
    if len(ties) == 1:
        soonest = min([row.ttft_s for row in usable])
        return (
            "least expected time to first token"
            if chosen.ttft_s <= soonest
            else "least delay in all, that of other requests included"
        )
    if any(row.uncached_tokens > chosen.uncached_tokens for row in ties):
        return "equal expected cost, fewest uncached tokens"
    return "equal expected cost; fewest requests, then fewest occupied blocks, then at random"


def _mean(shares: "Sequence[float] | Numbers") -> float:
    return sum(map(float, shares)) / max(1, len(shares))


class LeastLoaded(ExpectedTtft):
    """`ExpectedTtft` without the cache: when prompts share no prefix, both policies decide alike."""

    name = "least-loaded"
    sees_cache = False


POLICIES = (ExpectedTtft, LeastLoaded)
