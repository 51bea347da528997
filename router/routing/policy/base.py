"""What a routing policy sees and returns, and the base class of all policies.

Pure values: candidates in, decision out. Block hashes, time and randomness come in by parameter.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, exp
from random import Random
from typing import ClassVar

import msgspec

from ....events.wire.messages import LoadReport
from ....replica.messages import ReplicaDescription
from ...backend import FeedState
from ..replica_load import ReplicaLoad

#: `FeedState.LIVE` takes a tenth of a microsecond in Python 3.11, and a decision asks for it once per replica.
LIVE, STALE = FeedState.LIVE, FeedState.STALE

#: Requests that an engine may have waiting before it counts as saturated: enough to fill the next step.
QUEUE_AHEAD = 4
#: Error of the free blocks when a request's turn comes, as a share of those in use. Simulated on 16 cells of agent
#: traffic (docs/simulate.md): geometric means of mean TTFT and p99 were 0.208 and 2.48 s with 0, 0.179 and 1.96 s with
#: 0.05, 0.171 and 1.55 s with 0.1.
UNCERTAIN = 0.1
#: With so many times that error to spare the wait for blocks is left out; it is below a hundredth of it.
NEGLIGIBLE = 5


#: What loading a cached token from slower memory takes, as a share of computing it; of other media than these the last
#: one's. 1 minus the credits that llm-d (0.8) and vllm-router (0.8, 0.3) give; not measured here.
LOADING = {"CPU": 0.2, "DISK": 0.7, "STORAGE": 0.7}
OTHER_LOADING = 0.7

#: Blocks in slower memory than the GPU's: medium and number.
SlowerBlocks = tuple[tuple[str, int], ...]


class Prompt(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A request as far as the choice of a replica depends on it."""

    tokens: int
    blocks: int  #: full ones
    block_size: int
    #: Wire hashes of the full blocks that a cache may serve. Empty when the prompt's own tokens are scored: then all of
    #: them are computed.
    hashes: Sequence[int] = ()
    #: The same hashes without tenant and adapter, for policies that know texts only; None: no difference is known.
    text_hashes: Sequence[int] | None = None
    generated: int = 0  #: of `tokens`: what another replica generated before the request was moved
    now: float = 0.0  #: time of the decision, by the router's clock
    session: str | None = None


class Candidate(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One replica at the time of the decision."""

    replica_id: str
    feed: FeedState
    load: ReplicaLoad
    held_blocks: int
    expected_blocks: int  #: cached when its turn comes: more than `held_blocks`, or less if there is no room for them
    used_blocks: int = 0  #: of the prompt's first blocks, those that requests in flight there use, where room is short
    excluded: bool = False  #: has refused this very request
    slower_blocks: SlowerBlocks = ()  #: of `held_blocks`, those that must be loaded first

    def uncached_tokens(self, prompt: Prompt) -> int:
        """Prompt tokens to compute here; all of them when the replica's events are stale."""
        # While a gap is being repaired (syncing), what was applied before it is a good guess. Taken for nothing, it
        # would send whole prefixes elsewhere with every lost message (docs/simulate.md).
        if self.feed is STALE:
            return prompt.tokens
        cached = self.expected_blocks * prompt.block_size
        # The last token is always computed: its logits are needed.
        return prompt.tokens - cached if cached < prompt.tokens else 1

    def loading_s(self, prompt: Prompt) -> float:
        """Seconds to load what is cached in slower memory."""
        if not self.slower_blocks or self.feed is STALE:
            return 0.0
        blocks = sum([count * LOADING.get(medium, OTHER_LOADING) for medium, count in self.slower_blocks])
        return blocks * prompt.block_size * self.load.prefill_cost.token_s


class ManyCandidates(Sequence[Candidate]):
    """Candidates of a large fleet, each made when somebody asks for it: most have no chance."""

    @abstractmethod
    def longest_live(self) -> int:
        """The longest expected prefix of those with live events."""

    @abstractmethod
    def longest_known(self) -> int:
        """The longest prefix that one holds or is expected to hold."""


#: Told apart by `isinstance(…, list)`: asking for an abstract class takes ten times as long.
Candidates = list[Candidate] | ManyCandidates


class Score(msgspec.Struct, frozen=True, gc=False):
    """One candidate as a policy rates it."""

    candidate: Candidate
    uncached_tokens: int
    ttft_s: float
    obstacle: str | None
    others_s: float  #: time that other requests lose by the choice, and this one's answer
    cost_s: float  #: the sum of both, which the policy minimises


@dataclass(slots=True, frozen=True)
class Decision:
    """Where a request goes (`row` None: it is held). The table of all candidates is computed only on demand."""

    policy: str
    prompt: Prompt
    row: Score | None
    table: Callable[[], Sequence[Score]]  #: all candidates
    reason: Callable[[Sequence[Score]], str]  #: why `row`, given all rows without an obstacle

    @property
    def chosen(self) -> Candidate | None:
        return self.row.candidate if self.row else None

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens to compute there, as the policy counts them."""
        return self.row.uncached_tokens if self.row else self.prompt.tokens

    @property
    def expected_ttft_s(self) -> float | None:
        """Seconds until the first token, if the replica is chosen."""
        return self.row.ttft_s if self.row else None


class Policy(ABC):
    """Chooses a replica for each request.

    A policy implements `consider`, and `decide` if it learns from its decisions. Policies with books of their own
    override the other methods, which report everything that `Placement` learns, in order; by default they do nothing.
    State must be bounded by the replicas, their caches and the requests in flight, or by a constant.
    """

    #: As in the settings.
    name: ClassVar[str]
    #: Whether a replica with a full queue gets no requests, so that they wait in the router, where they can still go
    #: anywhere. Policies of other routers send every request at once.
    holds_requests: ClassVar[bool] = True
    #: Whether it predicts how much of a prompt is cached at the chosen replica.
    predicts_hits: ClassVar[bool] = True
    #: Whether it notices that an engine restarted behind its address. `homing simulate` models routers that do not.
    notices_restarts: ClassVar[bool] = True
    #: Whether it looks at few candidates, so that `ManyCandidates` are cheaper for it than a list of all.
    prefers_columns: ClassVar[bool] = False

    @abstractmethod
    def consider(self, prompt: Prompt, candidates: Sequence[Candidate], rng: Random) -> Decision:
        """The decision for this prompt, without any change of state. Never a candidate with an obstacle."""

    def decide(self, prompt: Prompt, candidates: Sequence[Candidate], rng: Random) -> Decision:
        """The same for a request that will be sent; the policy may learn from it."""
        return self.consider(prompt, candidates, rng)

    def rank(self, prompt: Prompt, uncached: int, prefill_s: float) -> float:
        """The place of a request that begins to wait in the router, among its tenant's: the lowest goes first.

        `uncached`: the tokens that the best holder would have to compute, in `prefill_s`. As in our engine
        (replica/engine/order.py) a request is passed by shorter ones that come in so many seconds, and by none later.
        """
        del uncached
        return prompt.now + prefill_s

    def join(self, description: ReplicaDescription) -> None:
        """A replica joined, with an empty cache as far as is known."""

    def leave(self, replica: str) -> None:
        """A replica is gone, with all its requests."""

    def restarted(self, replica: str) -> None:
        """Simulator only, for policies that do not notice: the engine is a new one and numbers its events from 0."""

    def stored(self, replica: str, blocks: Sequence[int]) -> None:
        """The replica announced these blocks."""

    def removed(self, replica: str, blocks: Sequence[int]) -> None:
        """The replica evicted these blocks."""

    def reset(self, replica: str, blocks: Sequence[int]) -> None:
        """The replica holds exactly these blocks."""

    def report(self, replica: str, report: LoadReport) -> None:
        """The replica reported its load."""

    def booked(self, replica: str, request_id: int, prompt: Prompt) -> None:
        """The request of the last decision is sent to the replica. Ids are unique within the router."""

    def started(self, replica: str, request_id: int) -> None:
        """The request's first token arrived."""

    def ended(self, replica: str, request_id: int) -> None:
        """The request has left the replica, which may be gone already."""

    # For policies

    def obstacle(self, prompt: Prompt, candidate: Candidate) -> str | None:
        """Why this policy cannot send the request to this replica now; None when it can."""
        load = candidate.load
        if candidate.excluded:
            return "refused this request"
        if load.draining:
            return "draining"
        if load.warming:
            return "warming up"
        if load.silent:
            return "silent"
        if load.waiting >= QUEUE_AHEAD and self.holds_requests and is_full(prompt, candidate):
            return "saturated"
        return None

    def usable(self, prompt: Prompt, candidates: Sequence[Candidate]) -> list[Candidate]:
        return [candidate for candidate in candidates if self.obstacle(prompt, candidate) is None]

    def choose(
        self, prompt: Prompt, candidates: Sequence[Candidate], chosen: Candidate | None, reason: str
    ) -> Decision:
        """A decision of a policy that compares no expected times."""

        def score(candidate: Candidate) -> Score:
            uncached = candidate.uncached_tokens(prompt)
            seconds = expected_ttft_s(prompt, candidate, uncached)
            return Score(candidate, uncached, seconds, self.obstacle(prompt, candidate), 0.0, seconds)

        row = None if chosen is None else score(chosen)
        return Decision(self.name, prompt, row, lambda: [score(each) for each in candidates], lambda _: reason)


def is_full(prompt: Prompt, candidate: Candidate) -> bool:
    """Whether a slot or blocks are missing, so that the request would wait in the engine's queue, for good."""
    load = candidate.load
    cached = candidate.expected_blocks if candidate.feed is not STALE else 0
    return load.requests >= load.max_running_requests or load.free_blocks < prompt.blocks + 1 - cached


def expected_ttft_s(prompt: Prompt, candidate: Candidate, uncached: int) -> float:
    """Seconds until the first token, if the request is sent there now and `uncached` of its tokens are computed.

    The sum of: the rest of the queued prefill work; the prefill of this prompt's uncached tokens, by the replica's
    measured cost; the loading of what is cached in slower memory; if anything decodes there, one decode step for each
    prefill step, one more where part of the prefix is still being computed, as the prompt starts after that step, and
    half of the one in progress; the wait for a slot and for free blocks, by the rate at which running requests end. A
    replica whose memory is nearly full counts as one where some blocks may be missing: what running requests still need
    and what others send there is not known exactly.
    """
    load = candidate.load
    queued, cached = load.queued_prefill_tokens, prompt.tokens - uncached
    prefill = load.prefill_cost.seconds(cached, uncached)
    if candidate.slower_blocks:
        prefill += candidate.loading_s(prompt)
    if queued and load.busy_until > prompt.now:
        prefill += load.busy_until - prompt.now
    if not load.running and load.spare_blocks > prompt.blocks:  # one more block is being written
        return prefill
    steps = 0.5 + ceil((queued + uncached) / load.max_batched_tokens)
    if queued and candidate.expected_blocks > candidate.held_blocks:
        steps += 1
    seconds = prefill + steps * load.decode_step_s
    slots = load.running + load.waiting + 1 - load.max_running_requests
    used = max(1, load.total_blocks - load.free_blocks)
    spread, room = UNCERTAIN * used, load.spare_blocks - prompt.blocks
    if room > NEGLIGIBLE * spread and slots <= 0:
        return seconds
    # Blocks that requests there must release first. An idle cached block is needed like any other free one.
    missing = 1 - room - candidate.used_blocks
    likely = missing + spread if missing > 0 else spread * exp(missing / spread)
    ends = max(slots, likely / used * (load.running or load.waiting))
    return seconds + ends / load.ends_per_step * load.decode_step_s
