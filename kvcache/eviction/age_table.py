"""How likely idle blocks are hit again, by how often they were hit before and how long they have been idle.

Pure counting: knows no blocks and no order of eviction. Blocks of one *lane* (hits before) that fall idle in one
*epoch* (a stretch of time) are a cohort; of each cohort it knows how many are not hit yet. From what cohorts went
through it estimates the chance of a hit at each age as Kaplan and Meier do, so that a block that is still waiting says
as much as one that was hit. The density of hits at an age follows: hits gained per block and epoch by waiting on, along
the concave hull of the curve, as a wait that pays late is worth its average (Beckmann and Sanchez, "Maximizing cache
performance under uncertainty", HPCA 2017, call it economic value added; here per lane, and never rising with age).
"""

from collections import deque
from itertools import accumulate
from operator import sub

#: Epochs in the time in which as many blocks are stored as the cache can hold.
EPOCHS_PER_TURNOVER = 8
#: Distinct ages, hence how long a block is remembered: eight turnovers. On the two Mooncake traces at 1,000
#: to 64,000 blocks, four closed 10 % of the gap between LRU and the optimum, eight 12 %, sixteen 12.4 %.
AGES = 8 * EPOCHS_PER_TURNOVER
#: What counts of the past after a turnover. Tuned coarsely: 0.78 and 0.92 differ by a point in the closed gap.
DECAY = 0.92
#: Learning takes about 0.2 ms. Small caches do it less than once in a turnover, so that no stored block feels it.
FEWEST_BLOCKS_PER_LEARNING = 8_192
#: A lane's estimate leans on that of all lanes as if so much of a cache had been seen beside. Tuned coarsely.
PRIOR_TURNOVERS = 0.25


class AgeTable:
    """Cohorts, what they went through, and the densities learned from it."""

    def __init__(self, lanes: int, epoch_blocks: int) -> None:
        self.epoch = 0
        #: Epochs from one learning to the next; a cohort must not grow through all ages in between.
        self._interval = min(AGES, max(EPOCHS_PER_TURNOVER, FEWEST_BLOCKS_PER_LEARNING // epoch_blocks))
        self._prior = PRIOR_TURNOVERS * EPOCHS_PER_TURNOVER * epoch_blocks
        #: By lane, the current epoch first: how many of a cohort are not hit yet.
        self._waiting = [deque([0] * AGES, maxlen=AGES) for _ in range(lanes)]
        #: By lane and age: hits since densities were learned last.
        self._recent = [[0] * AGES for _ in range(lanes)]
        #: By lane and age, decayed: hits, and blocks that reached that age.
        self._hits = [[0.0] * AGES for _ in range(lanes)]
        self._reached = [[0.0] * AGES for _ in range(lanes)]
        #: By lane and age. Does not fall from lane to lane, does not rise with age; behind the last age it is zero.
        self._density = [[0.0] * AGES for _ in range(lanes)]

    def idle(self, lane: int, count: int) -> None:
        self._waiting[lane][0] += count

    def hit(self, lane: int, since: int, count: int) -> None:
        """`count` blocks that had been idle since that epoch were hit, resident or not."""
        age = self.epoch - since
        if age < AGES:
            self._waiting[lane][age] -= count
            self._recent[lane][age] += count

    def density(self, lane: int, since: int) -> float:
        """Hits to expect per block and epoch of waiting on."""
        age = self.epoch - since
        return self._density[lane][age] if age < AGES else 0.0

    def age_of(self, blocks: int) -> float:
        """Age in epochs that the last `blocks` to fall idle, hit blocks aside, reach back to."""
        left = blocks
        for age, waiting in enumerate(map(sum, zip(*self._waiting, strict=True))):
            if waiting >= left:
                return age - 0.5 + left / waiting if waiting else float(age)
            left -= waiting
        return float(AGES)

    def advance(self) -> None:
        """An epoch has passed. At most once in a turnover all densities are learned again: O(1) per stored block."""
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
        """Add what happened since the last learning: in it a cohort of age a passed the last ages up to a."""
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
        """By age: the share of the blocks which reached it that were hit in that epoch."""
        rows = zip(self._hits[lane], self._reached[lane], common, strict=True)
        return [min(1.0, (hits + self._prior * chance) / (reached + self._prior)) for hits, reached, chance in rows]

    def check(self) -> None:
        """Assert what `density` promises, and that no cohort lost more than it had."""
        for waiting in self._waiting:
            assert min(waiting) >= 0, f"a cohort has {min(waiting)} blocks"
        for lane, densities in enumerate(self._density):
            assert densities == sorted(densities, reverse=True), f"the density of lane {lane} rises with age"
            below = self._density[max(0, lane - 1)]
            assert all(map(float.__ge__, densities, below)), f"the density of lane {lane} falls below the lane before"


def _densities(chances: list[float]) -> list[float]:
    """Slope of the concave hull of hits over waiting, by age."""
    #: Straight pieces of the hull: waiting, hits, ages.
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
        # Rounding may leave a slope above the one before it.
        densities += [min(slope, densities[-1]) if densities else slope] * ages
    return densities
