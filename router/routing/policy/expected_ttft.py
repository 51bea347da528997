"""Chooses the replica with the least expected time to first token, counting cached prefixes and the cost to others.

A replica's cost is the sum of

- the expected TTFT there (base.py), with its wait for prefills, a slot and memory;
- the time to compute anew what the best holder has cached, beyond what it loads from slower memory: every second of
  work delays later requests. It counts EVICTING times where no unused memory is left, because the copy evicts blocks
  that may be needed again;
- ANSWER_SHARE of the time that answers lose: those running there stand still during the prefill, and a new one of
  TYPICAL_TOKENS is decoded at that replica's pace instead of the fastest one's.

Costs within the estimate's own error of the least count as equal. Ties go to the fewest uncached tokens, then the
fewest requests, the fewest occupied blocks (there, the least is evicted) and finally a random draw, never to a position
in a list.

Simulated on 22 cells that no constant was chosen on (long sessions on small caches, bursts after pauses, a gateway's
day, two kinds of tenants, batch beside chat, Mooncake's traces), geometric means over the best peer's of mean TTFT, its
p99 and the time to the last token: 0.914, 0.954 and 1.019; without the pace and the occupied blocks 0.936, 1.047 and
1.043. The policy before this one, which held requests back, learned how busy replicas are and weighed answers by
averages, had 0.925, 1.028 and 1.016.
"""

from collections.abc import Sequence
from functools import partial
from random import Random

from ..replica_load import TYPICAL_TOKENS
from .base import Candidate, Decision, Policy, Prompt, Score, expected_ttft_s

#: Costs count as equal within TIE_S plus TIE_RATIO of the least: half a millisecond is below the jitter of any step.
TIE_S = 0.0005
TIE_RATIO = 0.05
#: Limit of the proportional part: an error in the prompt's own cost is the same on all replicas.
TIE_MAX_S = 0.05
#: Seconds that a recomputed second costs where it evicts something.
EVICTING = 1.8
#: Weight of a second that a running answer waits, relative to a second of TTFT.
ANSWER_SHARE = 0.03


class ExpectedTtft(Policy):
    """Least expected time to first token, counting cached prefixes and the cost to other requests."""

    name = "expected-ttft"
    reads_contenders = True
    #: If False, every prompt counts as uncached on every replica.
    sees_cache = True

    def consider(self, prompt: Prompt, candidates: Sequence[Candidate], rng: Random) -> Decision:
        usable = self.usable(prompt, candidates)
        fewest = min([self._uncached(prompt, each) + each.loading_tokens(prompt) for each in usable], default=0)
        pace_s = min([each.load.decode_step_s for each in usable], default=0.0)
        score = partial(self._score, prompt, fewest, pace_s)
        rows = [score(each) for each in usable]
        limit = cost_limit(min([row.cost_s for row in rows], default=0.0))
        ties = [row for row in rows if row.cost_s <= limit]
        chosen = _break_tie(ties, rng)
        reason = partial(_explain_choice, chosen, ties)

        def table() -> list[Score]:
            return rows if len(rows) == len(candidates) else list(map(score, candidates))

        return Decision(self.name, prompt, chosen, table, reason, self.sees_cache)

    def _uncached(self, prompt: Prompt, candidate: Candidate) -> int:
        return candidate.uncached_tokens(prompt) if self.sees_cache else prompt.tokens

    def _score(self, prompt: Prompt, fewest: int, pace_s: float, candidate: Candidate) -> Score:
        """The costs on one candidate. `fewest`: tokens that the best holder computes or loads; `pace_s`: fastest."""
        uncached, load, total = self._uncached(prompt, candidate), candidate.load, prompt.tokens
        ttft_s = expected_ttft_s(prompt, candidate, uncached)
        prefill_s = load.prefill_cost.seconds(total - uncached, uncached)
        # `max` also turns NaN into 0, which only impossible numbers yield.
        slower_s = TYPICAL_TOKENS * max(0.0, load.decode_step_s - pace_s)
        others_s = max(0.0, ANSWER_SHARE * (load.running * prefill_s + slower_s))
        if uncached > fewest:
            anew_s = max(0.0, prefill_s - load.prefill_cost.seconds(total - fewest, fewest))
            evicts = (load.free_blocks - load.cached_free_blocks) * prompt.block_size <= uncached
            others_s += anew_s * EVICTING if evicts else anew_s
        return Score(candidate, uncached, ttft_s, self.obstacle(prompt, candidate), others_s, ttft_s + others_s)


def cost_limit(least: float) -> float:
    """The highest cost that counts as equal to the least; never below it."""
    return least + max(0.0, min(least * TIE_RATIO, TIE_MAX_S)) + TIE_S


def _break_tie(ties: Sequence[Score], rng: Random) -> Score | None:
    if len(ties) < 2:
        return ties[0] if ties else None
    ranks = []
    for row in ties:
        load = row.candidate.load
        ranks.append((row.uncached_tokens, load.requests, load.occupied_blocks))
    best = min(ranks)
    tied = [row for row, rank in zip(ties, ranks, strict=True) if rank == best]
    # Sorted, so that the random draw does not depend on the order of the list.
    return tied[0] if len(tied) == 1 else rng.choice(sorted(tied, key=lambda row: row.candidate.replica_id))


def _explain_choice(chosen: Score | None, ties: Sequence[Score], usable: Sequence[Score]) -> str:
    assert chosen is not None, "nothing was chosen"
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


class LeastLoaded(ExpectedTtft):
    """`ExpectedTtft` without the cache: when prompts share no prefix, both policies decide alike."""

    name = "least-loaded"
    sees_cache = False


POLICIES = (ExpectedTtft, LeastLoaded)
