"""How many tokens requests generate, learned from those that finished.

Pure: lengths come in, expectations go out. Knows no replicas and no prompts.

Lengths are counted in buckets of powers of two, each count fading with every later request, so the distribution follows
the traffic. What a request still generates depends on what it has generated: answers differ so much in length that one
which is long already will most likely go on for long.
"""

from collections.abc import Sequence

#: What a request is assumed to generate before any has finished; later it counts like this many finished requests.
#: Not measured.
TYPICAL_TOKENS = 128
PRIOR_REQUESTS = 4.0
#: Share of its weight that a finished request keeps with every later one: the last 500 count. Not tuned.
FADING = 0.998
#: Answers of 2^30 tokens and more count as that long.
_BUCKETS = 31


def bucket_of(tokens: int) -> int:
    """0 for no token, then one bucket for each power of two: 1, 2 to 3, 4 to 7, ..."""
    return min(tokens.bit_length(), _BUCKETS - 1)


class OutputLengths:
    """The lengths of recent answers."""

    def __init__(self) -> None:
        self._counts = [0.0] * _BUCKETS
        self._sums = [0.0] * _BUCKETS  #: tokens of the requests in each bucket
        self._weight = 1.0  #: of the next request: it grows, instead of all others fading
        self._longest = 0  #: the last bucket that has had a request
        self._remaining: list[float] | None = None

    def finished(self, tokens: int) -> None:
        """A request ended by itself after so many tokens."""
        bucket = bucket_of(tokens)
        self._longest = max(self._longest, bucket)
        self._counts[bucket] += self._weight
        self._sums[bucket] += self._weight * tokens
        self._weight /= FADING
        self._remaining = None
        if self._weight > 1e9:
            self._counts = [count / self._weight for count in self._counts]
            self._sums = [total / self._weight for total in self._sums]
            self._weight = 1.0

    def remaining(self) -> Sequence[float]:
        """Tokens that a request still generates in the mean, by the bucket of what it has generated; above 0."""
        if self._remaining is None:
            self._remaining = self._conditional()
        return self._remaining

    def ends_per_step(self, generated: Sequence[int], running: int) -> float:
        """Running requests that end in a decode step, in the mean. `generated`: how many are in each bucket.

        Those that are in no bucket count as new ones.
        """
        remaining = self.remaining()
        ends, counted = 0.0, 0
        for count, tokens in zip(generated, remaining, strict=False):
            if count > 0:
                ends += count / tokens
                counted += count
        return ends + max(0, running - counted) / remaining[0]

    def _conditional(self) -> list[float]:
        """For a request in a bucket: half of the answers of its own bucket, and all longer ones, are longer than it.

        What an answer of its own bucket still adds is a quarter of the bucket's width in the mean.
        """
        prior = PRIOR_REQUESTS * self._weight
        found = [float(TYPICAL_TOKENS)] * _BUCKETS
        count = total = 0.0  # of the longer buckets
        for bucket in reversed(range(self._longest + 1)):
            width = (1 << bucket) // 2
            at = 1.5 * width
            own = self._counts[bucket] / 2
            rest = own * width / 4 + total - count * at
            found[bucket] = max(1.0, (rest + prior * TYPICAL_TOKENS) / (own + count + prior))
            count += self._counts[bucket]
            total += self._sums[bucket]
        return found
