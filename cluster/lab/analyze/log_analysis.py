"""Computes sharing, possible savings and the recommended cache size in one pass over a log.

Pure state. Prompts are given as names of their full blocks (equal names: equal prefixes). Memory grows with the number
of distinct blocks, about 200 bytes each in addition to their names, and again for each set of replicas; hardly with
the log's length (16 bytes per request).
"""

from array import array
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from math import ceil

from .replica_spread import Affine, ReplicaCaches, RoundRobinRule
from .reuse_stack import HitCurve, ReuseStack

WINDOWS_S = (60.0, 300.0, 900.0)
#: A cache is large enough with this share of an endless one's hits: beyond it the curve is flat.
USEFUL_SHARE = 0.95
#: Factor for blocks in use by running requests, their answers, and growth of the traffic.
HEADROOM = 1.2


@dataclass(slots=True, frozen=True)
class LoggedPrompt:
    """The properties of one request that matter for caching."""

    tokens: int
    blocks: Sequence[Hashable]  #: names of its full blocks, in order
    arrival_s: float | None = None  #: on any clock; None: the log has no times


@dataclass(slots=True, frozen=True)
class WindowRow:
    """Number of distinct blocks used within a sliding window of time, evaluated at each request."""

    window_s: float
    peak_blocks: int
    mean_blocks: float


@dataclass(slots=True, frozen=True)
class BreakRow:
    """Number of requests whose known prefix had `from_blocks` to `to_blocks` blocks and then an unknown block."""

    from_blocks: int
    to_blocks: int
    requests: int


@dataclass(slots=True, frozen=True)
class ReplicaRow:
    """Estimated reuse when a rule spreads requests over replicas."""

    replicas: int
    rule: str
    curve: HitCurve  #: hits of all replicas together, by the cache size of one


@dataclass(slots=True)
class LogReport:
    """The results of an analysis. Shares are of all prompt tokens."""

    block_size: int
    curve: HitCurve
    requests: int = 0
    prompt_tokens: int = 0
    full_blocks: int = 0
    distinct_blocks: int = 0
    shared_blocks: int = 0  #: distinct blocks that two or more requests had
    sharing_requests: int = 0  #: requests that began with at least one block of an earlier request
    largest_prompt_blocks: int = 0  #: including the last, partial block
    span_s: float | None = None
    late_requests: int = 0  #: requests with a time before their predecessor's; treated as simultaneous with it
    windows: tuple[WindowRow, ...] = ()
    breaks: tuple[BreakRow, ...] = ()
    known_entirely: int = 0  #: requests whose full blocks were all known
    replicas: tuple[ReplicaRow, ...] = ()

    def saved_tokens(self) -> int:
        """Number of prompt tokens that an endless cache saves."""
        return self.curve.endless * self.block_size

    def share(self, blocks: int) -> float:
        return blocks * self.block_size / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def mean_shared_tokens(self) -> float:
        """Mean length, over all requests, of the prefix that a request shares with an earlier one."""
        return self.saved_tokens() / self.requests if self.requests else 0.0

    @property
    def useful_blocks(self) -> int:
        """Size of the smallest cache with `USEFUL_SHARE` of an endless one's hits."""
        return self.curve.size_for(USEFUL_SHARE)

    @property
    def recommended_blocks(self) -> int:
        """The useful size or the largest prompt, whichever is larger, with headroom."""
        return ceil(HEADROOM * max(self.useful_blocks, self.largest_prompt_blocks))

    def sizes(self) -> list[int]:
        """Sizes for a report: up to nine powers of two, ending with the first that holds all distinct blocks."""
        largest = max(0, self.distinct_blocks - 1).bit_length()
        return [1 << power for power in range(max(0, largest - 8), largest + 1)]


class _Window:
    """Peak and mean number of distinct blocks used within a sliding window."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._outside = 0  #: number of requests before the window
        self._peak = 0
        self._sum = 0

    def observe(self, arrivals: "array[float]", stack: ReuseStack) -> None:
        """Update after a request was added to the stack."""
        begin = arrivals[-1] - self._seconds
        while arrivals[self._outside] <= begin:
            self._outside += 1
        used = stack.used_since(self._outside - 1)
        self._peak = max(self._peak, used)
        self._sum += used

    def row(self, requests: int) -> WindowRow:
        return WindowRow(self._seconds, self._peak, self._sum / requests)


class LogAnalysis:
    """Analyzes requests in the order of their arrival."""

    def __init__(self, block_size: int, replicas: Sequence[int] = (1, 2, 4, 8)) -> None:
        self._stack = ReuseStack()
        self._sums = LogReport(block_size, self._stack.curve())  #: counts that grow with each request
        self._spread = [
            (count, name, ReplicaCaches(count, rule))
            for count in replicas
            if count > 1
            for name, rule in (("affine", Affine()), ("round-robin", RoundRobinRule()))
        ]
        self._windows = [_Window(seconds) for seconds in WINDOWS_S]
        self._arrivals = array("d")
        self._timeless = False
        self._breaks: Counter[int] = Counter()

    def observe(self, prompt: LoggedPrompt) -> int:
        """Add the next request; returns how many of its leading tokens an endless cache would serve."""
        sums = self._sums
        usable = max(0, prompt.tokens - 1) // sums.block_size
        known = self._stack.observe(prompt.blocks, usable)
        found = min(known, usable)
        for _, _, caches in self._spread:
            caches.observe(prompt.blocks, usable)
        sums.prompt_tokens += prompt.tokens
        sums.full_blocks += len(prompt.blocks)
        sums.largest_prompt_blocks = max(sums.largest_prompt_blocks, -(-prompt.tokens // sums.block_size))
        sums.sharing_requests += found > 0
        if known < len(prompt.blocks):
            self._breaks[known.bit_length()] += 1
        else:
            sums.known_entirely += bool(prompt.blocks)
        self._note_time(prompt.arrival_s)
        return found * sums.block_size

    def _note_time(self, arrival_s: float | None) -> None:
        if arrival_s is None or self._timeless:
            self._timeless = True
            return
        if self._arrivals and arrival_s < self._arrivals[-1]:
            self._sums.late_requests += 1
            arrival_s = self._arrivals[-1]
        self._arrivals.append(arrival_s)
        for window in self._windows:
            window.observe(self._arrivals, self._stack)

    def report(self) -> LogReport:
        timed = bool(self._arrivals) and not self._timeless
        requests = self._stack.requests
        return replace(
            self._sums,
            requests=requests,
            distinct_blocks=self._stack.distinct,
            shared_blocks=self._stack.shared,
            span_s=self._arrivals[-1] - self._arrivals[0] if timed else None,
            late_requests=self._sums.late_requests if timed else 0,
            windows=tuple(window.row(requests) for window in self._windows) if timed else (),
            breaks=tuple(
                # Requests with 2^(power - 1) to 2^power - 1 known blocks; power 0: with no known block.
                BreakRow((1 << power) >> 1, (1 << power) - 1, count)
                for power, count in sorted(self._breaks.items())
            ),
            curve=self._stack.curve(),
            replicas=tuple(ReplicaRow(count, name, caches.curve()) for count, name, caches in self._spread),
        )
