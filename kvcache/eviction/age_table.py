"""Estimates how likely an idle block is to be hit again, from its earlier hits and the time it has been idle.

Pure counting: does not depend on blocks or the eviction order. Blocks of one *lane* (number of earlier hits) that
become idle in the same *epoch* (a period of time) form a cohort; for each cohort, the table counts the blocks not hit
yet. It estimates the chance of a hit at each age with the Kaplan-Meier estimator, which also uses the blocks that are
still waiting. The hit density at an age is the number of hits gained per block and epoch of further waiting, taken
along the concave hull of the curve, because a wait that pays off late is worth its average (Beckmann and Sanchez,
"Maximizing cache performance under uncertainty", HPCA 2017: economic value added; here per lane and never rising).
"""

from collections import deque
from itertools import accumulate
from operator import sub

#: Epochs per turnover, the time in which as many blocks are stored as the cache can hold.
EPOCHS_PER_TURNOVER = 8
#: Number of distinct ages in epochs. A block is thus remembered for eight turnovers. On the two Mooncake traces with
#: 1,000 to 64,000 blocks, four closed 10 % of the gap between LRU and the optimum, eight 12 %, sixteen 12.4 %.
AGES = 8 * EPOCHS_PER_TURNOVER
#: Weight that past counts keep after one turnover. Tuned coarsely: 0.78 and 0.92 differ by a point in the closed gap.
DECAY = 0.92
#: Learning takes about 0.2 ms. Small caches learn less than once per turnover, so that the cost per block stays small.
FEWEST_BLOCKS_PER_LEARNING = 8_192
#: Weight of the estimate over all lanes in each lane's own, in turnovers' worth of observations. Tuned coarsely.
PRIOR_TURNOVERS = 0.25


class AgeTable:
    """The cohorts, their observed hits, and the densities learned from them."""

    def __init__(self, lanes: int, epoch_blocks: int) -> None:
        self.epoch = 0
        #: Epochs between two learnings; at most AGES, so that no cohort passes through all ages in between.
        self._interval = min(AGES, max(EPOCHS_PER_TURNOVER, FEWEST_BLOCKS_PER_LEARNING // epoch_blocks))
        self._prior = PRIOR_TURNOVERS * EPOCHS_PER_TURNOVER * epoch_blocks
        #: By lane, the current epoch first: blocks of the cohort that were not hit yet.
        self._waiting = [deque([0] * AGES, maxlen=AGES) for _ in range(lanes)]
        #: By lane and age: hits since the last learning.
        self._recent = [[0] * AGES for _ in range(lanes)]
        #: By lane and age, decayed: hits, and blocks that reached that age.
        self._hits = [[0.0] * AGES for _ in range(lanes)]
        self._reached = [[0.0] * AGES for _ in range(lanes)]
        #: By lane and age. Never falls from one lane to the next and never rises with age; zero beyond the last age.
        self._density = [[0.0] * AGES for _ in range(lanes)]

    def idle(self, lane: int, count: int) -> None:
        self._waiting[lane][0] += count

    def hit(self, lane: int, since: int, count: int) -> None:
        """Record a hit on `count` blocks that had been idle since epoch `since`, whether still resident or not."""
        age = self.epoch - since
        if age < AGES:
            self._waiting[lane][age] -= count
            self._recent[lane][age] += count

    def density(self, lane: int, since: int) -> float:
        """Return the expected hits per block and epoch of further waiting."""
        age = self.epoch - since
        return self._density[lane][age] if age < AGES else 0.0

    def age_of(self, blocks: int) -> float:
        """Return the age, in epochs, of the oldest of the last `blocks` that became idle and were not hit since."""
        left = blocks
        for age, waiting in enumerate(map(sum, zip(*self._waiting, strict=True))):
            if waiting >= left:
                return age - 0.5 + left / waiting if waiting else float(age)
            left -= waiting
        return float(AGES)

    def advance(self) -> None:
        """Start the next epoch. Densities are relearned at most once per turnover: O(1) per stored block."""
        self.epoch += 1
        if self.epoch % self._interval == 0:
            self._learn()
        for waiting in self._waiting:
            waiting.appendleft(0)

    def _learn(self) -> None:
        for lane, waiting in enumerate(self._waiting):
            self._account(lane, list(waiting))
        hits, reached = ([sum(lanes) for lanes in zip(*rows, strict=True)] for rows in (self._hits, self._reached))
        common = [hit / passed if passed else 0.0 for hit, passed in zip(hits, reached, strict=True)]
        below = [0.0] * AGES
        for lane in range(len(self._density)):
            below = self._density[lane] = list(map(max, _densities(self._chances(lane, common)), below))

    def _account(self, lane: int, waiting: list[int]) -> None:
        """Add the counts since the last learning, in which a cohort of age `a` passed `interval` ages, `a` the last."""
        interval, recent = self._interval, self._recent[lane]
        keep = DECAY ** (interval / EPOCHS_PER_TURNOVER)
        younger = list(accumulate(waiting, initial=0))
        passed = map(sub, younger[interval:] + [younger[-1]] * interval, younger[:-1])
        self._reached[lane] = [
            known * keep + hits + still for known, hits, still in zip(self._reached[lane], recent, passed, strict=True)
        ]
        self._hits[lane] = [known * keep + hits for known, hits in zip(self._hits[lane], recent, strict=True)]
        self._recent[lane] = [0] * AGES

    def _chances(self, lane: int, common: list[float]) -> list[float]:
        """Return, by age, the fraction of the blocks that reached this age and were hit at it."""
        rows = zip(self._hits[lane], self._reached[lane], common, strict=True)
        return [min(1.0, (hits + self._prior * chance) / (reached + self._prior)) for hits, reached, chance in rows]

    def check(self) -> None:
        """Assert that densities are ordered by lane and age, and that no cohort has a negative count."""
        for waiting in self._waiting:
            assert min(waiting) >= 0, f"a cohort has {min(waiting)} blocks"
        for lane, densities in enumerate(self._density):
            assert densities == sorted(densities, reverse=True), f"the density of lane {lane} rises with age"
            below = self._density[max(0, lane - 1)]
            assert all(map(float.__ge__, densities, below)), f"the density of lane {lane} falls below the lane before"


def _densities(chances: list[float]) -> list[float]:
    """Return, by age, the slope of the concave hull of hits over time waited."""
    #: Linear segments of the hull: time waited, hits, number of ages.
    pieces: list[tuple[float, float, int]] = []
    left = 1.0
    for chance in chances:
        hits = left * chance
        waited, ages = left - hits / 2, 1
        left -= hits
        while pieces and hits * pieces[-1][0] >= pieces[-1][1] * waited:
            before = pieces.pop()
            waited, hits, ages = waited + before[0], hits + before[1], ages + before[2]
        pieces.append((waited, hits, ages))
    densities: list[float] = []
    for waited, hits, ages in pieces:
        slope = hits / waited if waited > 0 else 0.0
        # Rounding may make a slope exceed the one before it.
        densities += [min(slope, densities[-1]) if densities else slope] * ages
    return densities
