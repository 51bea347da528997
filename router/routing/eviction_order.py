"""Predicts which blocks an external engine evicts for requests ahead of a new one. Pure: blocks and requests come in.

The order is that of vLLM 0.32 (`v1/core/block_pool.py`), and of SGLang's `lru` as long as prompts share no blocks:
memory without a cached block first, then the blocks that no request uses, least recently used first, and the last
blocks of a prompt before its first. Requests start in the order in which they were sent. Blocks used by other clients
of the engine are known only once they are stored. For engines that announce nothing, this prediction is all there is.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import filterfalse, islice

import msgspec

#: Blocks remembered for an engine that announces nothing. Not tuned.
MAX_REMEMBERED = 65_536


class _Request(msgspec.Struct):
    """A request at the engine."""

    chain: Sequence[int]  #: hashes of the prompt's full blocks
    used: int  #: number of leading blocks that it already uses


class EvictionOrder:
    """One engine's cached blocks in order of eviction."""

    def __init__(self, total_blocks: int) -> None:
        self._capacity = total_blocks - 1  # vLLM reserves one block
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._in_use: Counter[int] = Counter()
        self._sent: dict[int, _Request] = {}
        self._storing: dict[int, _Request] = {}  #: requests that have not stored their whole prompt yet

    def __contains__(self, block: object) -> bool:
        return block in self._blocks

    def surplus(self) -> list[int]:
        """The idle blocks that exceed the engine's memory or MAX_REMEMBERED, in order of eviction."""
        idle = filterfalse(self._in_use.__contains__, self._blocks)
        return list(islice(idle, max(0, len(self._blocks) - min(self._capacity, MAX_REMEMBERED))))

    def stored(self, blocks: Iterable[int]) -> None:
        self._blocks.update(dict.fromkeys(blocks))

    def removed(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._blocks.pop(block, None)

    def reset(self, blocks: Iterable[int]) -> None:
        """The engine holds exactly these blocks."""
        self._blocks.clear()
        self.stored(blocks)

    def sent(self, request_id: int, chain: Sequence[int], cached: int) -> None:
        """A request is sent to the engine, which has the first `cached` blocks of its prompt in cache."""
        self._in_use.update(chain[:cached])
        self._sent[request_id] = self._storing[request_id] = _Request(chain, cached)

    def ended(self, request_id: int) -> None:
        """The request has left the engine. Idempotent."""
        self._storing.pop(request_id, None)
        if (sent := self._sent.pop(request_id, None)) is None:
            return
        in_use, blocks = self._in_use, self._blocks
        for block in sent.chain[: sent.used]:
            if (users := in_use.pop(block)) > 1:
                in_use[block] = users - 1
        for block in reversed(sent.chain):
            if block in blocks:
                blocks.move_to_end(block)

    def remaining_hit(self, chain: Sequence[int], held: int) -> int:
        """How many of a prompt's first `held` blocks remain cached once all requests sent so far have started."""
        if not self._storing or not held:
            return held
        missing = self._blocks_needed() - (self._capacity - len(self._blocks) - len(self._sent) + len(self._storing))
        if missing <= 0:
            return held
        gone = set(chain[:held]).intersection(islice(filterfalse(self._in_use.__contains__, self._blocks), missing))
        return next((place for place, block in enumerate(chain[:held]) if block in gone), held)

    def _blocks_needed(self) -> int:
        """Blocks that requests which are still storing will take: the rest of their full blocks, and a partial one."""
        needed = 0
        for request_id, sent in list(self._storing.items()):
            if not needed:  # requests start in order: behind one that still needs blocks, none has started
                start = sent.used
                while sent.used < len(sent.chain) and sent.chain[sent.used] in self._blocks:
                    sent.used += 1
                self._in_use.update(sent.chain[start : sent.used])
                if sent.used == len(sent.chain):
                    del self._storing[request_id]
                    continue
            needed += len(sent.chain) - sent.used + 1
        return needed

    def check(self) -> None:
        """Assert that the tables agree."""
        used = Counter(block for sent in self._sent.values() for block in sent.chain[: sent.used])
        assert used == self._in_use, "blocks in use are not those of the requests"
        assert self._storing.keys() <= self._sent.keys(), "a request that has left still counts as storing"
