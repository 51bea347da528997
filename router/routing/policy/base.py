"""The base class of routing policies, and the values that they take and return.

Pure values: candidates in, decision out. Block hashes, time and randomness are parameters.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import inf
from random import Random
from typing import ClassVar

import msgspec

from ....events.wire.messages import LoadReport
from ....replica.messages import ReplicaDescription
from ...backend import FeedState
from ..hits import SlowerBlocks
from ..replica_load import ReplicaLoad

#: Reading `FeedState.LIVE` takes 0.1 µs in Python 3.11, and a decision reads it once per replica.
LIVE, STALE = FeedState.LIVE, FeedState.STALE

#: A full external engine counts as saturated once this many requests wait there: its queue knows no tenants and no
#: priorities, so the rest is kept in the router. Ours knows both. Simulated on ten kinds of traffic with short memory,
#: two seeds each, geometric means of mean TTFT and p99 over those with 4: 0.85 and 0.80 with 16, 0.84 and 0.75 with 32,
#: 0.84 and 0.74 if nothing is kept.
QUEUE_AHEAD = 32
#: The obstacle of a replica without room, the only one that ends as requests there end.
SATURATED = "saturated"

#: Time to load a cached token from an external engine's slower memory, as a share of the time to compute it, by medium:
#: 1 minus the credits that llm-d (0.8) and vllm-router (0.8, 0.3) give. Not measured here; our own replicas report what
#: they measured. All other media count as `OTHER_LOADING`.
LOADING = {"CPU": 0.2, "CPU_PINNED": 0.2, "CPU_TIER1": 0.2, "LMCACHE-L1": 0.2, "DISK": 0.7, "STORAGE": 0.7}
OTHER_LOADING = 0.7


class Prompt(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The parts of a request on which the choice of a replica depends."""

    tokens: int
    blocks: int  #: number of full blocks
    block_size: int
    #: Wire hashes of the full blocks that a cache may serve. Empty when the prompt's own tokens are scored, because
    #: then all of them are computed.
    hashes: Sequence[int] = ()
    #: The same hashes without tenant and adapter, for policies that see only text; None: equal to `hashes`.
    text_hashes: Sequence[int] | None = None
    generated: int = 0  #: the part of `tokens` that another replica generated before the request was moved
    now: float = 0.0  #: time of the decision on the router's clock


class Candidate(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One replica at the time of a decision."""

    replica_id: str
    feed: FeedState
    load: ReplicaLoad
    held_blocks: int
    #: cached blocks when the request starts: above `held_blocks`, or below it at an external engine without free memory
    expected_blocks: int
    pool_blocks: int = 0  #: the part of `held_blocks` in the memory in which it computes
    used_blocks: int = 0  #: leading blocks that requests in flight there use; counted only where memory may be short
    excluded: bool = False  #: the replica refused this request, or is kept for another one
    slower_blocks: SlowerBlocks = ()  #: the part of `expected_blocks` that must first be loaded

    def uncached_tokens(self, prompt: Prompt) -> int:
        """Prompt tokens to compute here; all of them when the replica's feed is stale."""
        # While a gap is being repaired (syncing), the state from before it is a good guess. Ignoring that state would
        # send whole prefixes to other replicas with every lost message.
        if self.feed is STALE:
            return prompt.tokens
        cached = self.expected_blocks * prompt.block_size
        # The last token is always computed: its logits are needed.
        return prompt.tokens - cached if cached < prompt.tokens else 1

    @property
    def available(self) -> bool:
        """Whether the replica takes new requests, and this one."""
        return self.load.available and not self.excluded

    def tokens_on_arrival(self, prompt: Prompt) -> int:
        """Tokens to compute, as the replica counts them when the request arrives: only held blocks are cached then."""
        return max(1, prompt.tokens - min(self.held_blocks, self.expected_blocks) * prompt.block_size)

    def loading_tokens(self, prompt: Prompt) -> int:
        """Tokens that could be computed in the time that loading the blocks cached in slower memory takes."""
        seconds, token_s = self.loading_s(prompt), self.load.prefill_cost.token_s
        return round(seconds / token_s) if 0.0 < seconds < inf and token_s else 0

    def loading_s(self, prompt: Prompt) -> float:
        """Seconds to load the blocks cached in slower memory: as measured, or a share of computing them."""
        if not self.slower_blocks or self.feed is STALE:
            return 0.0
        measured, compute_s = dict(self.load.load_block_s), prompt.block_size * self.load.prefill_cost.token_s
        return sum(
            [
                count * (measured[medium] if medium in measured else LOADING.get(medium, OTHER_LOADING) * compute_s)
                for medium, count in self.slower_blocks
            ]
        )


class Score(msgspec.Struct, frozen=True, gc=False):
    """A policy's rating of one candidate."""

    candidate: Candidate
    uncached_tokens: int
    ttft_s: float
    obstacle: str | None
    others_s: float  #: seconds that the choice costs other requests and this request's own answer
    cost_s: float  #: `ttft_s + others_s`, which the policy minimises


class Decision(msgspec.Struct, frozen=True):
    """The replica chosen for a request. The table of all candidates is computed only on demand."""

    policy: str
    prompt: Prompt
    row: Score | None  #: the chosen candidate; None: the request is held
    table: Callable[[], Sequence[Score]]  #: scores of all candidates
    reason: Callable[[Sequence[Score]], str]  #: why `row` was chosen, given all rows without an obstacle
    weighs_cache: bool = False  #: whether the policy weighs what is cached against load

    @property
    def chosen(self) -> Candidate | None:
        return self.row.candidate if self.row else None

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens to compute on the chosen replica, as the policy counts them; all if the request is held."""
        return self.row.uncached_tokens if self.row else self.prompt.tokens

    @property
    def expected_ttft_s(self) -> float | None:
        """Expected seconds until the first token; None if the request is held."""
        return self.row.ttft_s if self.row else None


class Policy(ABC):
    """Chooses a replica for each request.

    A policy implements `consider`, and `decide` if it learns from its decisions. A policy that keeps its own state may
    override the other methods: `Placement` calls them, in order, with everything that it learns. By default they do
    nothing. State must be bounded by the replicas, their caches and the requests in flight, or by a constant.
    """

    #: The name in the settings.
    name: ClassVar[str]
    #: Whether it compares only costs, so that in a large fleet the contenders (`Placement.candidates`) suffice.
    reads_contenders: ClassVar[bool] = False

    @abstractmethod
    def consider(self, prompt: Prompt, candidates: Sequence[Candidate], rng: Random) -> Decision:
        """The decision for this prompt. Changes no state, and never chooses a candidate with an obstacle."""

    def decide(self, prompt: Prompt, candidates: Sequence[Candidate], rng: Random) -> Decision:
        """Like `consider`, for a request that will be sent; the policy may learn from it."""
        return self.consider(prompt, candidates, rng)

    def rank(self, prompt: Prompt, uncached: int, prefill_s: float) -> float:
        """Sort key of a request that starts waiting in the router, among its tenant's requests: the lowest goes first.

        The best holder would have to compute `uncached` tokens, in `prefill_s` seconds. As in our engine
        (replica/engine/queue_order.py), only shorter requests that arrive within that time can pass this one.
        """
        del uncached
        return prompt.now + prefill_s

    def join(self, description: ReplicaDescription) -> None:
        """A replica joined. Its cache counts as empty."""

    def leave(self, replica: str) -> None:
        """A replica left, and its requests are gone."""

    def stored(self, replica: str, blocks: Sequence[int]) -> None:
        """The replica announced these blocks."""

    def removed(self, replica: str, blocks: Sequence[int]) -> None:
        """The replica evicted these blocks."""

    def reset(self, replica: str, blocks: Sequence[int]) -> None:
        """The replica holds exactly these blocks."""

    def report(self, replica: str, report: LoadReport) -> None:
        """The replica reported its load."""

    def booked(self, replica: str, request_id: int, prompt: Prompt) -> None:
        """The request of the last decision is being sent to the replica. Ids are unique within the router."""

    def started(self, replica: str, request_id: int) -> None:
        """The request's first token arrived."""

    def ended(self, replica: str, request_id: int) -> None:
        """The request has left the replica, which may itself have left already."""

    # For policies

    def obstacle(self, prompt: Prompt, candidate: Candidate) -> str | None:
        """Why this policy cannot send the request to this replica now; None if it can."""
        load = candidate.load
        if candidate.excluded:
            return "refused this request, or is kept for another one"
        if load.draining:
            return "draining"
        if load.warming:
            return "warming up"
        if load.silent:
            return "silent"
        if load.external and load.waiting >= QUEUE_AHEAD and is_full(prompt, candidate):
            return SATURATED
        return None

    def usable(self, prompt: Prompt, candidates: Sequence[Candidate]) -> list[Candidate]:
        return [candidate for candidate in candidates if self.obstacle(prompt, candidate) is None]

    def choose(
        self, prompt: Prompt, candidates: Sequence[Candidate], chosen: Candidate | None, reason: str
    ) -> Decision:
        """The decision of a policy that does not compare expected times."""

        def score(candidate: Candidate) -> Score:
            uncached = candidate.uncached_tokens(prompt)
            seconds = expected_ttft_s(prompt, candidate, uncached)
            return Score(candidate, uncached, seconds, self.obstacle(prompt, candidate), 0.0, seconds)

        row = None if chosen is None else score(chosen)
        return Decision(self.name, prompt, row, lambda: [score(each) for each in candidates], lambda _: reason)


def is_full(prompt: Prompt, candidate: Candidate) -> bool:
    """Whether the replica lacks a slot or blocks, so that the request would be stuck in the engine's queue."""
    load = candidate.load
    cached = candidate.expected_blocks if candidate.feed is not STALE else 0
    return load.requests >= load.max_running_requests or load.free_blocks < prompt.blocks + 1 - cached


def expected_ttft_s(prompt: Prompt, candidate: Candidate, uncached: int) -> float:
    """Expected seconds until the first token if the request is sent now and `uncached` of its tokens are computed.

    The sum of: the remaining queued prefill work; the prefill of this prompt's uncached tokens, by the replica's
    measured cost; the time to load blocks from slower memory; if anything decodes there, one decode step for each
    prefill step, half of the step in progress, and one more step if part of the prefix is still being computed, because
    the prompt starts after that step; and the wait for a slot and for free blocks (`ReplicaLoad.wait_s`). At least 0;
    infinity where the replica's numbers allow no estimate.
    """
    load = candidate.load
    queued = load.queued_prefill_tokens
    seconds = load.prefill_cost.seconds(prompt.tokens - uncached, uncached)
    seconds += candidate.loading_s(prompt)
    if queued and load.busy_until > prompt.now:
        seconds += load.busy_until - prompt.now
    if load.running or load.spare_blocks <= prompt.blocks:  # plus one partial block
        steps = 0.5 - (-(queued + uncached) // max(1, load.max_batched_tokens))  # rounded up
        if queued and candidate.expected_blocks > candidate.held_blocks:
            steps += 1
        seconds += steps * load.decode_step_s
    seconds += load.wait_s(prompt.blocks + 1 - candidate.used_blocks)
    return seconds if seconds >= 0.0 else inf
