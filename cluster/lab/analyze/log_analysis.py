"""One pass over a log: what is shared, what a cache would save, and how large it should be.

Pure state. Prompts come in as names of their full blocks (equal names: equal prefixes). Memory grows with the distinct
blocks, about 200 bytes for each beside its name, and once more for each set of replicas; not with the log's length
(16 bytes a request).
"""

from array import array
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from math import ceil

from .replica_spread import Affine, ReplicaCaches, RoundRobin
from .reuse_stack import HitCurve, ReuseStack

WINDOWS_S = (60.0, 300.0, 900.0)
#: A cache is large enough when it finds this share of what an endless one finds: the curve is flat behind it.
USEFUL_SHARE = 0.95
#: For blocks in use by running requests, their answers, and growth of the traffic.
HEADROOM = 1.2


@dataclass(slots=True, frozen=True)
class LoggedPrompt:
    """One request, as far as caching is concerned."""

    tokens: int
    blocks: Sequence[Hashable]  #: names of its full blocks, in order
    arrival_s: float | None = None  #: on any clock; None where the log has no times


@dataclass(slots=True, frozen=True)
class WindowRow:
    """Distinct blocks that were used within a sliding window of time, looked at with each request."""

    window_s: float
    peak_blocks: int
    mean_blocks: float


@dataclass(slots=True, frozen=True)
class BreakRow:
    """Requests that found so many blocks of their prompt known, and then a block that was not."""

    from_blocks: int
    to_blocks: int
    requests: int


@dataclass(slots=True, frozen=True)
class ReplicaRow:
    """Expected reuse when requests are spread over replicas by a rule; an estimate."""

    replicas: int
    rule: str
    curve: HitCurve  #: blocks found by all replicas, by the size of one


@dataclass(slots=True)
class LogReport:
    """What was found. Shares are of all prompt tokens."""

    block_size: int
    curve: HitCurve
    requests: int = 0
    prompt_tokens: int = 0
    full_blocks: int = 0
    distinct_blocks: int = 0
    shared_blocks: int = 0  #: distinct ones that two or more requests had
    sharing_requests: int = 0  #: that began with at least one block of an earlier request
    largest_prompt_blocks: int = 0  #: the last, partial block included
    span_s: float | None = None
    late_requests: int = 0  #: whose time lay before that of the request before them; taken as simultaneous
    windows: tuple[WindowRow, ...] = ()
    breaks: tuple[BreakRow, ...] = ()
    known_entirely: int = 0  #: requests of which every full block was known
    replicas: tuple[ReplicaRow, ...] = ()

    def saved_tokens(self) -> int:
        """Prompt tokens that an endless cache saves."""
        return self.curve.endless * self.block_size

    def share(self, blocks: int) -> float:
        return blocks * self.block_size / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def mean_shared_tokens(self) -> float:
        """Length of the prefix that a request had in common with an earlier one, over all requests."""
        return self.saved_tokens() / self.requests if self.requests else 0.0

    @property
    def useful_blocks(self) -> int:
        """The smallest cache that finds `USEFUL_SHARE` of what an endless one finds."""
        return self.curve.size_for(USEFUL_SHARE)

    @property
    def recommended_blocks(self) -> int:
        """The useful size, at least the largest prompt, with headroom."""
        return ceil(HEADROOM * max(self.useful_blocks, self.largest_prompt_blocks))

    def sizes(self) -> list[int]:
        """Sizes worth looking at: powers of two up to the first that holds every distinct block."""
        largest = max(0, self.distinct_blocks - 1).bit_length()
        return [1 << power for power in range(max(0, largest - 8), largest + 1)]


class _Window:
    """Peak and mean of the distinct blocks in use within the last seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._outside = 0  #: requests that lie before the window
        self._peak = 0
        self._sum = 0

    def observe(self, arrivals: "array[float]", stack: ReuseStack) -> None:
        """After a request was added to the stack."""
        begin = arrivals[-1] - self._seconds
        while arrivals[self._outside] <= begin:
            self._outside += 1
        used = stack.used_since(self._outside - 1)
        self._peak = max(self._peak, used)
        self._sum += used

    def row(self, requests: int) -> WindowRow:
        return WindowRow(self._seconds, self._peak, self._sum / requests)


class LogAnalysis:
    """Takes requests in the order in which they came."""

    def __init__(self, block_size: int, replicas: Sequence[int] = (1, 2, 4, 8)) -> None:
        self._stack = ReuseStack()
        self._sums = LogReport(block_size, self._stack.curve())  #: what grows request by request; the rest is to come
        self._spread = [
            (count, name, ReplicaCaches(count, rule))
            for count in replicas
            if count > 1
            for name, rule in (("affine", Affine()), ("round-robin", RoundRobin()))
        ]
        self._windows = [_Window(seconds) for seconds in WINDOWS_S]
        self._arrivals = array("d")
        self._timeless = False
        self._breaks: Counter[int] = Counter()

    def observe(self, prompt: LoggedPrompt) -> int:
        """The next request; returns how many of its leading tokens an endless cache would have had."""
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
                # Requests with 2^(power - 1) to 2^power - 1 known blocks; power 0: with none.
                BreakRow((1 << power) >> 1, (1 << power) - 1, count)
                for power, count in sorted(self._breaks.items())
            ),
            curve=self._stack.curve(),
            replicas=tuple(ReplicaRow(count, name, caches.curve()) for count, name, caches in self._spread),
        )
