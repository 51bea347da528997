"""Decides between the learned order and LRU: learning may be misled, and must not cost more than it gains.

Pure counting: knows no blocks. What LRU would have hit needs no second cache. LRU keeps the blocks that fell idle last,
as many as there is room for; the ages of all blocks that wait for a hit are known, whether they are still resident or
not (age_table.py); so the age at which LRU gives a block up is known, and LRU has every hit at a lower age.

When the learned order has had fewer, LRU is in force for a while, twice as long after each relapse.
"""

from math import inf

#: Share of the blocks asked for by which the learned order may be behind. Below it is noise: an age is an eighth of a
#: turnover, and within it hits are taken to be spread evenly.
TOLERANCE = 0.008
#: What counts of the past after a turnover.
DECAY = 0.95
#: Turnovers until the cache is full and gives blocks up: before that there is nothing to compare.
WARM_UP = 3
#: Turnovers of the longest and the shortest rest.
LONGEST_REST = 128
SHORTEST_REST = 8


class LruGuard:
    """Compares hits with those of LRU, a turnover at a time."""

    def __init__(self) -> None:
        #: Whether the learned order is in force.
        self.learned = True
        #: LRU has given up what waited for more epochs; nothing yet.
        self._lru_age = inf
        #: Hits since the last turnover: ours, and those that LRU would have had.
        self._own_hits = self.lru_hits = 0.0
        self._lead = self._asked = 0.0
        self._rest = SHORTEST_REST
        self._resting = 0
        self._turnovers = 0

    def hit(self, age: int, blocks: int, *, resident: bool) -> None:
        if resident:
            self._own_hits += blocks
        self.lru_hits += blocks * min(1.0, max(0.0, self._lru_age - age))

    def turnover(self, stored: int, lru_age: float) -> None:
        """`stored` blocks were stored since the last call; LRU would evict what waits for over `lru_age` epochs."""
        own, lru = self._own_hits, self.lru_hits
        self._own_hits = self.lru_hits = 0.0
        self._lru_age = lru_age
        self._turnovers += 1
        if self._turnovers > WARM_UP:
            self._lead = self._lead * DECAY + own - lru
        self._asked = self._asked * DECAY + own + stored
        if not self.learned:
            self._resting -= 1
            if not self._resting:
                self.learned = True
                self._lead = self._asked = 0.0
        elif self._lead < -TOLERANCE * self._asked:
            self.learned = False
            self._resting = self._rest
            self._rest = min(LONGEST_REST, 2 * self._rest)
        elif self._lead > TOLERANCE * self._asked:
            self._rest = max(SHORTEST_REST, self._rest // 2)

    def check(self) -> None:
        assert SHORTEST_REST <= self._rest <= LONGEST_REST, f"a rest of {self._rest} turnovers"
        assert self.learned == (self._resting == 0), f"{self._resting} turnovers to rest, learned order: {self.learned}"
