"""Switches between the learned order and LRU, because learning may be misled and must not cost more than it gains.

Pure counting: does not depend on blocks. Knowing what LRU would have hit needs no second cache. LRU keeps the blocks
that became idle last, as many as fit. The ages of all blocks that wait for a hit are known, resident or not
(age_table.py), so the age at which LRU evicts a block is known, too, and LRU has every hit at a lower age.

When the learned order has had fewer hits than LRU, LRU is used for a while, twice as long after each relapse.
"""

from math import inf

#: Lead or deficit in hits that counts as noise, as a fraction of the blocks requested: an age is an eighth of a
#: turnover, and hits are assumed to be spread evenly within it.
TOLERANCE = 0.008
#: Weight that past counts keep after one turnover.
DECAY = 0.95
#: Turnovers until the cache is full and evicts blocks; before that there is nothing to compare.
WARM_UP = 3
#: Longest and shortest time for which LRU is used after a relapse, in turnovers.
LONGEST_REST = 128
SHORTEST_REST = 8


class LruGuard:
    """Compares hits with those of LRU, once per turnover."""

    def __init__(self) -> None:
        #: Whether the learned order is used, rather than LRU.
        self.learned = True
        #: Age in epochs at which LRU would evict a block; infinite before the first turnover.
        self._lru_age = inf
        #: Hits since the last turnover: actual ones, and those that LRU would have had.
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
        """Compare after `stored` more blocks. LRU would have evicted blocks that wait for over `lru_age` epochs."""
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
