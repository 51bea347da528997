"""How many tokens requests generate, learned from finished requests.

Pure: lengths in, expectations out. Independent of replicas and prompts.

Lengths are counted in buckets of powers of two. Each count decays with every later request, so the distribution follows
the traffic. The expected remaining length depends on the tokens generated so far: answer lengths vary so widely that an
answer that is already long will probably continue for long.
"""

from collections.abc import Sequence

#: Assumed length while no request has finished; afterwards it weighs as much as PRIOR_REQUESTS finished requests. Not
#: measured.
TYPICAL_TOKENS = 128
PRIOR_REQUESTS = 4.0
#: Share of its weight that a finished request keeps with each later one: a memory of about 500 requests. Not tuned.
DECAY = 0.998
#: Answers of 2^29 tokens and more share the last bucket.
_BUCKETS = 31


def bucket_of(tokens: int) -> int:
    """0 for no token, then one bucket for each power of two: 1, 2 to 3, 4 to 7, ..."""
    return min(tokens.bit_length(), _BUCKETS - 1)


class OutputLengths:
    """The lengths of recent answers."""

    def __init__(self) -> None:
        self._counts = [0.0] * _BUCKETS
        self._sums = [0.0] * _BUCKETS  #: tokens of the requests in each bucket
        self._weight = 1.0  #: weight of the next request; it grows, which is cheaper than scaling down all others
        self._longest = 0  #: the highest bucket that has received a request
        self._remaining: list[float] | None = None

    def finished(self, tokens: int) -> None:
        """Count a request that ended by itself after this many tokens."""
        bucket = bucket_of(tokens)
        self._longest = max(self._longest, bucket)
        self._counts[bucket] += self._weight
        self._sums[bucket] += self._weight * tokens
        self._weight /= DECAY
        self._remaining = None
        if self._weight > 1e9:
            self._counts = [count / self._weight for count in self._counts]
            self._sums = [total / self._weight for total in self._sums]
            self._weight = 1.0

    def remaining(self) -> Sequence[float]:
        """Mean number of tokens still to come, by the bucket of the tokens generated so far; always above 0."""
        if self._remaining is None:
            self._remaining = self._conditional()
        return self._remaining

    def ends_per_step(self, generated: Sequence[int], running: int) -> float:
        """Mean number of running requests that end in a decode step. `generated`: number of requests in each bucket.

        Running requests that no bucket counts are taken as new.
        """
        remaining = self.remaining()
        ends, others = 0.0, running
        for count, tokens in zip(generated, remaining):  # noqa: B905 - `strict` would take a third of the time
            if count > 0:
                ends += count / tokens
                others -= count
        return ends + others / remaining[0] if others > 0 else ends

    def _conditional(self) -> list[float]:
        """Mean remaining tokens by bucket, assuming that a request is in the middle of its bucket.

        Half of that bucket's answers are longer, by a quarter of its width on average; all in longer buckets are, too.
        """
        prior = PRIOR_REQUESTS * self._weight
        found = [float(TYPICAL_TOKENS)] * _BUCKETS
        count = total = 0.0  # over all longer buckets
        for bucket in reversed(range(self._longest + 1)):
            width = (1 << bucket) // 2
            at = 1.5 * width
            own = self._counts[bucket] / 2
            rest = own * width / 4 + total - count * at
            found[bucket] = max(1.0, (rest + prior * TYPICAL_TOKENS) / (own + count + prior))
            count += self._counts[bucket]
            total += self._sums[bucket]
        return found
