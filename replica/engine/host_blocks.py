"""Blocks on their way between the pool and host memory: what the pool evicts is saved, what a prompt needs is loaded.

The engine's thread calls everything. Evicted blocks are collected, and saved before the next step or load overwrites
them. Loads happen when a request starts, into blocks that it has just got; one that fails leaves the rest of the prompt
to be computed.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from ...events.wire.messages import TierLoad
from ...kvcache.host_tier import HOST, HostBlock, HostTier
from ...kvcache.pool import Block
from .step_plan import Load, Save

#: Moves between two steps take about so many seconds at most; what the pool evicts beyond that is lost. As long as a
#: step with prompts. Not tuned.
SAVE_S = 0.1
#: Weight of the newest move in the time that one block takes. Not tuned.
PACE_WEIGHT = 0.1

#: Moves blocks on all ranks. For each load, why it failed, or None.
Mover = Callable[[Sequence[Save], Sequence[Load]], Sequence[str | None]]


class HostBlocks:
    """The host tier of one engine, which is its cache's `LowerTier`."""

    def __init__(
        self,
        tier: HostTier,
        move: Mover,
        clock: Callable[[], float],
        *,
        block_s: float,
        failures: Counter[str] | None = None,
    ) -> None:
        """`block_s`: measured seconds to move a block. `failures`: counts by kind the blocks that were lost."""
        self.tier = tier
        self.failures: Counter[str] = Counter() if failures is None else failures
        self.saved = self.loaded = 0  #: blocks
        self._moved_s = 0.0
        self._move = move
        self._clock = clock
        self._block_s = block_s
        self._saves: list[tuple[HostBlock, Save]] = []

    def evicted(self, blocks: Sequence[Block]) -> None:
        missing = self.tier.missing(blocks)
        room = max(1, int(SAVE_S / self._block_s)) - len(self._saves)
        if len(missing) > room:  # the last ones are the first of their chains
            self.failures["host_behind"] += len(missing) - room
            missing = missing[len(missing) - room :]
        ids = {block.block_hash: block.block_id for block in missing}
        self._moved_s += len(missing) * self._block_s
        for place in self.tier.add(missing):
            self._saves.append((place, Save(ids[place.block_hash], place.slot, place.generation)))

    def cleared(self) -> None:
        self._saves.clear()
        self.tier.clear()

    def load(self, run: Sequence[HostBlock], targets: Sequence[Block]) -> int:
        """Load a run of the tier into these blocks, and return how many came before the first that failed."""
        loads = [Load(place.slot, place.generation, block.block_id) for place, block in zip(run, targets, strict=True)]
        results = self._run(loads)
        good = next((at for at, failure in enumerate(results) if failure), len(results))
        for place, failure in zip(run, results, strict=True):
            if failure:
                self.failures[failure] += 1
                self.tier.drop(place)
        self.loaded += good
        self.tier.loaded(run[:good])
        return good

    def take_moved_s(self) -> float:
        """Seconds that moves take, of those begun since the last call; of saves, which come later, an estimate."""
        moved_s, self._moved_s = self._moved_s, 0.0
        return moved_s

    def save(self) -> None:
        """Save what was evicted. Call before a step, which may overwrite it."""
        if self._saves:
            self._run([])

    def _run(self, loads: Sequence[Load]) -> Sequence[str | None]:
        # Others may have taken the slot of a block in the meantime; the order of the saves makes that right.
        saves = [save for place, save in self._saves if self.tier.holds(place)]
        self._saves.clear()
        if not saves and not loads:
            return []
        began = self._clock()
        results = self._move(saves, loads)
        seconds = self._clock() - began
        self.saved += len(saves)
        block_s = seconds / (len(saves) + len(loads))
        self._moved_s += len(loads) * block_s
        self._block_s += PACE_WEIGHT * (block_s - self._block_s)
        return results

    def report(self) -> TierLoad:
        return TierLoad(HOST, self.tier.slots, len(self.tier), self._block_s)

    def check(self) -> None:
        self.tier.check()
        assert not self._saves, f"{len(self._saves)} blocks evicted and not saved"
