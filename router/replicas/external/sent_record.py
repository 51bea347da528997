"""What an engine without events probably holds: the prompts that were sent there, the least recently used forgotten.

Pure state. An approximation: it sees neither the engine's evictions nor what other clients send there.
"""

from collections import OrderedDict
from collections.abc import Sequence

#: Blocks remembered of an engine that does not report how many it has. Not tuned.
UNKNOWN_CAPACITY = 65_536


class SentRecord:
    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def sent(self, keys: Sequence[int], capacity: int) -> tuple[list[int], list[int]]:
        """The engine has computed a prompt of these blocks. Returns the new ones, and those that are forgotten."""
        new = [key for key in keys if key not in self._blocks]
        for key in reversed(keys):  # the tail of a prompt is evicted before its beginning
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        forgotten = [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - capacity)]
        if forgotten:
            new = [key for key in new if key in self._blocks]
        return new, forgotten

    def forget(self) -> None:
        self._blocks.clear()
