"""Which replica gets a request: protocols, policies, and the table that explains a decision.

Pure: candidates in, decision out; randomness comes in. No sockets, no clock, no hashes: overlaps arrive as numbers.

`ExpectedTtft`, in seconds per replica:

    time until what is queued there is prefilled, as the replica reported it, less the time since, and with what was
      sent there since
    + time to prefill this prompt's uncached tokens, by the replica's measured cost of a prompt, of a token, of a
      pair of tokens and of a token's cached context
    + decode interference: one decode step for each step that the prefill takes, when anything decodes there
    + wait for a slot and for free blocks, by the pace at which its running requests end

To that comes what the choice costs others: computing again what another replica holds takes time from all who come
after. A queue that is busy a share b of the time passes a second of extra work on to 1 / (1 - b) seconds in all, and
who comes while a replica is idle goes there and loses nothing. If a is the share of the time in which none is,

    + (time to prefill this prompt here - time it would take with the longest prefix any replica holds) * a / (1 - b)

Without it a loaded cluster tips over: queues make holders look bad, so prefixes are computed anew, which makes queues.
With b for a, as if every replica were alone with its own arrivals, prompts queue at holders beside idle replicas.

Replicas whose cost lies within the estimate's own error of the least count as equal. Among those the one that has to
compute least wins, then the session's, then the one with the fewest requests, then with the fewest occupied blocks,
then one at random: never one by its place in a list. `LeastLoaded` is the same rule with every overlap taken as none,
so that without overlap both take the same decision.

A fleet has hundreds of replicas, and most of them have no chance: a decision makes the full `Score` of those alone that
count as equal to the best. The table of all is made when somebody asks for it.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, inf
from random import Random
from typing import Protocol

import msgspec

from ...backend import Explanation, FeedState, ReplicaScore
from ..replica_load import ReplicaLoad

#: Estimates closer than this are equal: half a millisecond is below the jitter of any step. Not tuned by measurement.
TIE_S = 0.0005
TIE_RATIO = 0.05
#: And not more than this, however long the prompt: what it takes by itself is misjudged alike on all of them. Simulated
#: in seven cells of docs/simulate.md: 0.7 % less mean TTFT than without, the same p99.
TIE_MOST_S = 0.05
#: Tokens that a request is taken to generate when the wait for a slot is estimated. Not measured.
TYPICAL_OUTPUT_TOKENS = 128
#: Requests that an engine may have waiting before it counts as saturated: enough to fill the next step.
QUEUE_AHEAD = 4
SESSIONS_KEPT = 65_536
#: Decisions over which the busy shares are averaged (an older one has lost 63 % of its weight). Not tuned.
BUSY_MEMORY = 100
#: A share of 1 would make needless work cost without end; an average over so many decisions cannot tell more from it.
#: Simulated in three cells of docs/simulate.md at 95 % of capacity: 0.95 gave 18, 1 and -3 % more mean TTFT.
BUSY_LIMIT = 1 - 1 / BUSY_MEMORY


class Prompt(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A request as far as the choice of a replica depends on it."""

    tokens: int
    blocks: int  #: full ones
    block_size: int
    now: float = 0.0  #: when it is decided, by the router's clock
    session: str | None = None
    preferred: str | None = None  #: replica to take among equals


class Candidate(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One replica at the time of the decision."""

    replica_id: str
    feed: FeedState
    load: ReplicaLoad
    held_blocks: int
    expected_blocks: int  #: at least `held_blocks`
    excluded: bool = False  #: has refused this very request

    def uncached_tokens(self, prompt: Prompt) -> int:
        """Prompt tokens to compute here; all of them where nobody knows whether the replica is what it was (stale)."""
        # While a hole is being closed (syncing), what was applied before it was so a moment ago: a good guess. Taken
        # for nothing, it sends whole prefixes elsewhere with every lost message (docs/simulate.md).
        if self.feed == "stale":
            return prompt.tokens
        cached = self.expected_blocks * prompt.block_size
        # The last token is always computed: its logits are wanted.
        return prompt.tokens - cached if cached < prompt.tokens else 1


class Score(msgspec.Struct, frozen=True, gc=False):
    """One candidate as a policy sees it."""

    candidate: Candidate
    uncached_tokens: int
    ttft_s: float
    obstacle: str | None
    others_s: float  #: what others lose by the choice
    cost_s: float  #: both together: what is made least


@dataclass(slots=True, frozen=True)
class Decision:
    """Where a request goes (None: nowhere now); what was weighed for it is worked out again when it is asked for."""

    policy: str
    prompt: Prompt
    row: Score | None
    weighed: Callable[[], Sequence[Score]]  #: all candidates
    reason: Callable[[Sequence[Score]], str]  #: why `row`, of all that could take the request

    @property
    def chosen(self) -> Candidate | None:
        """The replica."""
        return self.row.candidate if self.row else None

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens to compute there, as the policy counts them."""
        return self.row.uncached_tokens if self.row else self.prompt.tokens

    @property
    def expected_ttft_s(self) -> float | None:
        """Seconds until the first token, if the replica is chosen."""
        return self.row.ttft_s if self.row else None

    @property
    def explanation(self) -> Explanation:
        """The table of the decision."""
        rows, chosen = self.weighed(), self.row.candidate.replica_id if self.row else None
        why = _why_none(rows) if chosen is None else self.reason([row for row in rows if row.obstacle is None])
        return Explanation(
            policy=self.policy,
            chosen=chosen,
            why=why,
            prompt_tokens=self.prompt.tokens,
            prompt_blocks=self.prompt.blocks,
            replicas=[_explained(row, self.row, why) for row in rows],
        )


class Policy(Protocol):
    """Chooses among candidates. May keep state of its own, such as whose turn it is."""

    @property
    def name(self) -> str:
        """As in the settings."""

    def decide(self, prompt: Prompt, candidates: Sequence[Candidate], rng: Random) -> Decision:
        """Take one of the candidates that can take it; never one that cannot."""

    def explain(self, prompt: Prompt, candidates: Sequence[Candidate], rng: Random) -> Explanation:
        """What `decide` would say, without any change of state."""


def obstacle(prompt: Prompt, candidate: Candidate) -> str | None:
    """Why this replica cannot take the request now; None when it can."""
    load = candidate.load
    if candidate.excluded:
        return "refused this request"
    if load.draining:
        return "draining"
    if load.warming:
        return "warming up"
    if load.silent:
        return "silent"
    return "saturated" if is_saturated(prompt, candidate) else None


def is_saturated(prompt: Prompt, candidate: Candidate) -> bool:
    """Whether another request would only lengthen the engine's own queue, which nobody can reorder any more."""
    load = candidate.load
    if load.waiting < QUEUE_AHEAD:
        return False
    return load.requests >= load.max_running_requests or load.free_blocks < _new_blocks(prompt, candidate)


def expected_ttft_s(load: ReplicaLoad, cached_tokens: int, uncached_tokens: int, new_blocks: int, now: float) -> float:
    """Seconds until the first token, if the request went there now."""
    queued = load.queued_prefill_tokens
    prefill = load.prefill_cost.seconds(cached_tokens, uncached_tokens)
    if queued and load.busy_until > now:
        prefill += load.busy_until - now
    if not load.running:
        return prefill
    seconds = prefill + ceil((queued + uncached_tokens) / load.max_batched_tokens) * load.decode_step_s
    if new_blocks <= load.free_blocks and load.running + load.waiting < load.max_running_requests:
        return seconds
    return seconds + _admission_wait_s(load, new_blocks)


class BusyShare:
    """How often a replica has prefills queued when a request comes, and how often all have: over the last decisions."""

    __slots__ = ("_all", "_each")

    def __init__(self) -> None:
        self._each = 0.0  #: the utilisation
        self._all = 0.0

    def observe(self, prompt: Prompt, candidates: Sequence[Candidate]) -> None:
        """Learn from what one decision saw."""
        free = [candidate for candidate in candidates if not candidate.load.queued_prefill_tokens]
        self._each += (1 - len(free) / len(candidates) - self._each) / BUSY_MEMORY
        none_idle = all(obstacle(prompt, candidate) is not None for candidate in free)
        self._all += (none_idle - self._all) / BUSY_MEMORY

    @property
    def passed_on(self) -> float:
        """Seconds that others lose by a second of extra work."""
        return min(self._all, BUSY_LIMIT) / (1 - min(self._each, BUSY_LIMIT))


class Scored:
    """What the policies that estimate share. `sees_cache` False takes every overlap as none."""

    def __init__(self, name: str, *, sees_cache: bool) -> None:
        self._name = name
        self._sees_cache = sees_cache
        self._busy = BusyShare()

    @property
    def name(self) -> str:
        """As in the settings."""
        return self._name

    def decide(self, prompt: Prompt, candidates: Sequence[Candidate], rng: Random) -> Decision:
        """The candidate with the least cost."""
        decision = self._look(prompt, candidates, rng)
        if candidates:
            self._busy.observe(prompt, candidates)
        return decision

    def explain(self, prompt: Prompt, candidates: Sequence[Candidate], rng: Random) -> Explanation:
        """The same, and nothing is learned from it."""
        return self._look(prompt, candidates, rng).explanation

    def _look(self, prompt: Prompt, candidates: Sequence[Candidate], rng: Random) -> Decision:
        total = prompt.tokens
        counted = [each.uncached_tokens(prompt) if self._sees_cache else total for each in candidates]
        scale = _Scale(prompt, min(counted, default=0), self._busy.passed_on)
        equals = _equals(scale, candidates, counted)
        chosen = _first(equals, prompt.preferred, rng) if equals else None
        weighed = partial(_weighed, scale, candidates, counted)
        return Decision(self._name, prompt, chosen, weighed, partial(_why_least, chosen, equals))


@dataclass(slots=True, frozen=True)
class _Scale:
    """By what all candidates of one decision are weighed."""

    prompt: Prompt
    least: int  #: tokens that the best holder would have to compute
    passed_on: float  #: seconds that others lose by a second of needless work

    def ttft_s(self, load: ReplicaLoad, uncached: int) -> float:
        """Seconds until the first token there."""
        prompt = self.prompt
        cached = prompt.tokens - uncached
        return expected_ttft_s(load, cached, uncached, prompt.blocks + 1 - cached // prompt.block_size, prompt.now)

    def others_s(self, load: ReplicaLoad, uncached: int) -> float:
        """Seconds that others lose: for computing there what the best holder would not have to."""
        if uncached == self.least:
            return 0.0
        cost, tokens = load.prefill_cost, self.prompt.tokens
        needless = cost.seconds(tokens - uncached, uncached) - cost.seconds(tokens - self.least, self.least)
        return self.passed_on * needless


def _weighed(scale: _Scale, candidates: Sequence[Candidate], counted: Sequence[int]) -> list[Score]:
    """All of them, also those that cannot take the request."""
    rows = []
    for candidate, uncached in zip(candidates, counted, strict=True):
        ttft_s, others_s = scale.ttft_s(candidate.load, uncached), scale.others_s(candidate.load, uncached)
        hindered = obstacle(scale.prompt, candidate)
        rows.append(Score(candidate, uncached, ttft_s, hindered, others_s, ttft_s + others_s))
    return rows


def _equals(scale: _Scale, candidates: Sequence[Candidate], counted: Sequence[int]) -> list[Score]:
    """Those that can take the request and cost no more than the best, but for the estimate's error.

    Whose queue alone takes longer than all of the best so far, or whose TTFT does, cannot be among them.
    """
    found: list[Score] = []
    prompt, now = scale.prompt, scale.prompt.now
    least = limit = inf
    for candidate, uncached in zip(candidates, counted, strict=True):
        load = candidate.load
        if (load.queued_prefill_tokens and load.busy_until - now > limit) or obstacle(prompt, candidate) is not None:
            continue
        ttft_s = scale.ttft_s(load, uncached)
        if ttft_s > limit:
            continue
        others_s = scale.others_s(load, uncached)
        cost_s = ttft_s + others_s
        if cost_s < least:
            least = cost_s
            limit = least + min(least * TIE_RATIO, TIE_MOST_S) + TIE_S
        if cost_s <= limit:
            found.append(Score(candidate, uncached, ttft_s, None, others_s, cost_s))
    return [row for row in found if row.cost_s <= limit]


class ExpectedTtft(Scored):
    """Least expected time to first token, cached prefixes and what others lose counted."""

    def __init__(self) -> None:
        super().__init__("expected-ttft", sees_cache=True)


class LeastLoaded(Scored):
    """Least expected time to first token as if nothing were cached."""

    def __init__(self) -> None:
        super().__init__("least-loaded", sees_cache=False)


class RoundRobin:
    """Each in turn, by name; load and cache do not matter."""

    name = "round-robin"

    def __init__(self) -> None:
        self._last = ""

    def decide(self, prompt: Prompt, candidates: Sequence[Candidate], rng: Random) -> Decision:  # noqa: ARG002
        """The next one behind the last, in the order of names."""
        decision = self._look(prompt, candidates)
        if decision.chosen is not None:
            self._last = decision.chosen.replica_id
        return decision

    def explain(self, prompt: Prompt, candidates: Sequence[Candidate], rng: Random) -> Explanation:  # noqa: ARG002
        """Whose turn it is."""
        return self._look(prompt, candidates).explanation

    def _look(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Decision:
        rows = [_plain_row(prompt, candidate) for candidate in candidates]
        usable = sorted((row for row in rows if row.obstacle is None), key=lambda row: row.candidate.replica_id)
        later = (row for row in usable if row.candidate.replica_id > self._last)
        chosen = next(later, usable[0]) if usable else None
        return Decision(self.name, prompt, chosen, lambda: rows, lambda _: "its turn")


class PowerOfTwo:
    """The one with fewer requests of two drawn at random."""

    name = "power-of-two"

    def decide(self, prompt: Prompt, candidates: Sequence[Candidate], rng: Random) -> Decision:
        """Draw two, take the one with fewer requests."""
        rows = [_plain_row(prompt, candidate) for candidate in candidates]
        usable = [row for row in rows if row.obstacle is None]
        drawn = rng.sample(usable, min(2, len(usable)))
        chosen = min(drawn, key=lambda row: row.candidate.load.requests, default=None)
        return Decision(self.name, prompt, chosen, lambda: rows, lambda _: "fewer requests of two drawn")

    def explain(self, prompt: Prompt, candidates: Sequence[Candidate], rng: Random) -> Explanation:
        """One possible draw."""
        return self.decide(prompt, candidates, rng).explanation


class SessionAffinity:
    """Wraps a policy: among equals, a session stays where it was. A hint; it never costs more than a tie."""

    def __init__(self, inner: Policy, *, sessions: int = SESSIONS_KEPT) -> None:
        self._inner = inner
        self._limit = sessions
        self._homes: OrderedDict[str, str] = OrderedDict()

    @property
    def name(self) -> str:
        """The wrapped policy's."""
        return self._inner.name

    def decide(self, prompt: Prompt, candidates: Sequence[Candidate], rng: Random) -> Decision:
        """The wrapped policy's decision, which is remembered."""
        decision = self._inner.decide(self._prefer(prompt), candidates, rng)
        if prompt.session is not None and decision.chosen is not None:
            self._remember(prompt.session, decision.chosen.replica_id)
        return decision

    def explain(self, prompt: Prompt, candidates: Sequence[Candidate], rng: Random) -> Explanation:
        """The wrapped policy's explanation."""
        return self._inner.explain(self._prefer(prompt), candidates, rng)

    def _prefer(self, prompt: Prompt) -> Prompt:
        home = self._homes.get(prompt.session) if prompt.session is not None else None
        if home is None:
            return prompt
        return Prompt(
            tokens=prompt.tokens,
            blocks=prompt.blocks,
            block_size=prompt.block_size,
            now=prompt.now,
            session=prompt.session,
            preferred=home,
        )

    def _remember(self, session: str, replica: str) -> None:
        self._homes[session] = replica
        self._homes.move_to_end(session)
        if len(self._homes) > self._limit:
            self._homes.popitem(last=False)


def make_policy(name: str) -> Policy:
    """The policy of that name in the settings, with session affinity around it."""
    policies: dict[str, type[Policy]] = {
        "expected-ttft": ExpectedTtft,
        "least-loaded": LeastLoaded,
        "round-robin": RoundRobin,
        "power-of-two": PowerOfTwo,
    }
    return SessionAffinity(policies[name]())


def _plain_row(prompt: Prompt, candidate: Candidate) -> Score:
    uncached = candidate.uncached_tokens(prompt)
    cached = prompt.tokens - uncached
    seconds = expected_ttft_s(candidate.load, cached, uncached, _new_blocks(prompt, candidate), prompt.now)
    return Score(candidate, uncached, seconds, obstacle(prompt, candidate), 0.0, seconds)


def _new_blocks(prompt: Prompt, candidate: Candidate) -> int:
    """Blocks to allocate: those that are not cached, and the one that is being written."""
    cached = candidate.expected_blocks if candidate.feed != "stale" else 0
    return prompt.blocks + 1 - cached


def _admission_wait_s(load: ReplicaLoad, new_blocks: int) -> float:
    """Until a slot and enough blocks are free, where there are not both: running requests end one by one."""
    turn_s = TYPICAL_OUTPUT_TOKENS * load.decode_step_s / load.running  # between two requests that end
    slots = load.requests + 1 - load.max_running_requests
    used = max(1, load.total_blocks - load.free_blocks)
    missing = new_blocks - load.free_blocks
    turns = max(0.0, slots, missing / used * load.running)
    return turns * turn_s


def _first(equals: Sequence[Score], preferred: str | None, rng: Random) -> Score:
    tied = _least(equals, [row.uncached_tokens for row in equals])
    if preferred is not None:
        tied = [row for row in tied if row.candidate.replica_id == preferred] or tied
    tied = _least(tied, [row.candidate.load.requests for row in tied])
    tied = _least(tied, [row.candidate.load.occupied_blocks for row in tied])
    if len(tied) == 1:
        return tied[0]
    # Sorted, so that a draw does not depend on the order of the list either.
    return rng.choice(sorted(tied, key=lambda row: row.candidate.replica_id))


def _least(rows: Sequence[Score], ranks: Sequence[int]) -> Sequence[Score]:
    """The rows of the lowest rank."""
    best = min(ranks)
    return rows if max(ranks) == best else [row for row, rank in zip(rows, ranks, strict=True) if rank == best]


def _why_least(chosen: Score | None, equals: Sequence[Score], usable: Sequence[Score]) -> str:
    assert chosen is not None, "nothing was chosen"
    if len(usable) == 1:
        return "the only replica that can take it"
    if len(equals) == 1:
        soonest = min([row.ttft_s for row in usable])
        return "least expected time to first token" if chosen.ttft_s <= soonest else "least time lost in all"
    if any(row.uncached_tokens > chosen.uncached_tokens for row in equals):
        return "as soon as others, with the least to compute"
    return "equal expected time; fewest requests, then fewest occupied blocks, then at random"


def _why_none(rows: Sequence[Score]) -> str:
    if not rows:
        return "no replica has joined"
    return "held: " + ", ".join(f"{row.candidate.replica_id} {row.obstacle}" for row in rows)


def _explained(row: Score, chosen: Score | None, why: str) -> ReplicaScore:
    candidate, load = row.candidate, row.candidate.load
    return ReplicaScore(
        replica_id=candidate.replica_id,
        feed=candidate.feed,
        eligible=row.obstacle is None,
        held_blocks=candidate.held_blocks,
        expected_blocks=candidate.expected_blocks,
        uncached_tokens=row.uncached_tokens,
        queued_prefill_tokens=load.queued_prefill_tokens,
        running=load.running,
        waiting=load.waiting,
        expected_ttft_s=row.ttft_s,
        others_s=row.others_s,
        chosen=chosen is not None and row.candidate is chosen.candidate,
        why=why if chosen is not None and row.candidate is chosen.candidate else row.obstacle or _behind(row, chosen),
    )


def _behind(row: Score, chosen: Score | None) -> str:
    if chosen is None or row.cost_s <= chosen.cost_s:
        return "as good, not taken"
    if row.ttft_s <= chosen.ttft_s:
        return f"sooner, but others lose {(row.others_s - chosen.others_s) * 1000:.1f} ms"
    return f"{(row.ttft_s - chosen.ttft_s) * 1000:.1f} ms later"
