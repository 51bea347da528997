"""One pass over a log: what is shared, what a cache would save, and how large it should be.

Pure state. Prompts come in as names of their full blocks (equal names: equal prefixes). Memory grows with the distinct
blocks, about 200 bytes for each beside its name, and once more for each set of replicas; not with the log's length
(16 bytes a request).
"""

from array import array
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
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

    seconds: float
    peak_blocks: int
    mean_blocks: float


@dataclass(slots=True, frozen=True)
class BreakRow:
    """Requests that found so many blocks of their prompt known, and then a block that was not."""

    first_blocks: int
    last_blocks: int
    requests: int


@dataclass(slots=True, frozen=True)
class ReplicaRow:
    """Expected reuse when requests are spread over replicas by a rule; an estimate."""

    replicas: int
    rule: str
    curve: HitCurve  #: blocks found by all replicas, by the size of one

    @property
    def useful_blocks(self) -> int:
        """Size of one replica's cache behind which the curve is flat."""
        return self.curve.size_for(USEFUL_SHARE)


@dataclass(slots=True, frozen=True)
class LogReport:
    """What was found. Shares are of all prompt tokens."""

    block_size: int
    requests: int
    prompt_tokens: int
    full_blocks: int
    distinct_blocks: int
    shared_blocks: int  #: distinct ones that two or more requests had
    sharing_requests: int  #: that began with at least one block of an earlier request
    largest_prompt_blocks: int  #: the last, partial block included
    span_s: float | None
    late_requests: int  #: whose time lay before that of the request before them; taken as simultaneous
    windows: tuple[WindowRow, ...]
    breaks: tuple[BreakRow, ...]
    known_entirely: int  #: requests of which every full block was known
    curve: HitCurve
    replicas: tuple[ReplicaRow, ...]

    def saved_tokens(self, size: int | None = None) -> int:
        """Prompt tokens that a cache of `size` blocks saves; None: an endless one."""
        hits = self.curve.endless if size is None else self.curve.hits(size)
        return hits * self.block_size

    def share(self, blocks: int) -> float:
        """`blocks` as a share of all prompt tokens."""
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
        self._block_size = block_size
        self._stack = ReuseStack()
        self._spread = [
            (count, name, ReplicaCaches(count, rule))
            for count in replicas
            if count > 1
            for name, rule in (("affine", Affine()), ("round-robin", RoundRobin()))
        ]
        self._windows = [_Window(seconds) for seconds in WINDOWS_S]
        self._arrivals = array("d")
        self._late = 0
        self._timeless = False
        self._prompt_tokens = 0
        self._full_blocks = 0
        self._largest = 0
        self._sharing = 0
        self._known_entirely = 0
        self._breaks: Counter[int] = Counter()

    def observe(self, prompt: LoggedPrompt) -> int:
        """The next request; returns how many of its leading tokens an endless cache would have had."""
        usable = max(0, prompt.tokens - 1) // self._block_size
        reuse = self._stack.observe(prompt.blocks, usable)
        for _, _, caches in self._spread:
            caches.observe(prompt.blocks, usable)
        self._prompt_tokens += prompt.tokens
        self._full_blocks += len(prompt.blocks)
        self._largest = max(self._largest, -(-prompt.tokens // self._block_size))
        self._sharing += reuse.found > 0
        if reuse.known < len(prompt.blocks):
            self._breaks[reuse.known.bit_length()] += 1
        else:
            self._known_entirely += bool(prompt.blocks)
        self._note_time(prompt.arrival_s)
        return reuse.found * self._block_size

    def _note_time(self, arrival_s: float | None) -> None:
        if arrival_s is None or self._timeless:
            self._timeless = True
            return
        if self._arrivals and arrival_s < self._arrivals[-1]:
            self._late += 1
            arrival_s = self._arrivals[-1]
        self._arrivals.append(arrival_s)
        for window in self._windows:
            window.observe(self._arrivals, self._stack)

    def report(self) -> LogReport:
        """What all requests so far come to."""
        timed = bool(self._arrivals) and not self._timeless
        requests = self._stack.requests
        return LogReport(
            block_size=self._block_size,
            requests=requests,
            prompt_tokens=self._prompt_tokens,
            full_blocks=self._full_blocks,
            distinct_blocks=self._stack.distinct,
            shared_blocks=self._stack.shared,
            sharing_requests=self._sharing,
            largest_prompt_blocks=self._largest,
            span_s=self._arrivals[-1] - self._arrivals[0] if timed else None,
            late_requests=self._late if timed else 0,
            windows=tuple(window.row(requests) for window in self._windows) if timed else (),
            breaks=tuple(
                # Requests with 2^(power - 1) to 2^power - 1 known blocks; power 0: with none.
                BreakRow((1 << power) >> 1, (1 << power) - 1, count)
                for power, count in sorted(self._breaks.items())
            ),
            known_entirely=self._known_entirely,
            curve=self._stack.curve(),
            replicas=tuple(ReplicaRow(count, name, caches.curve()) for count, name, caches in self._spread),
        )
