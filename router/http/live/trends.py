"""The last fifteen minutes of a router's totals, from which the live page draws its history.

Sampled whether or not anybody watches: a sample costs some microseconds, and a page that is opened after a fault must
show it. Pure: samples in, samples out.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

#: Seconds between two samples, and their number.
EVERY_S = 5.0
KEPT = 181


class Sample(NamedTuple):
    """Totals since the router's start at one time, over all models, and current numbers of requests."""

    at: float  #: seconds since 1970
    requests: int
    failed: int
    refused: int
    prompt_tokens: int
    cached_tokens: int
    running: int
    waiting: int
    ttft: Sequence[int]  #: number of first tokens by bucket (`metrics.TTFT_BUCKETS`)


class Trends:
    """The newest samples."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, Sample]] = deque(maxlen=KEPT)
        self._number = 0

    def add(self, sample: Sample) -> None:
        self._number += 1
        self._samples.append((self._number, sample))

    def items(self) -> Iterator[tuple[int, Sample]]:
        """The samples with their numbers, oldest first."""
        return iter(self._samples)

    def __len__(self) -> int:
        return len(self._samples)
