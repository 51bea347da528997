"""Least recently used goes first: the order of vLLM. Learns nothing and remembers nothing of what is gone."""

from collections.abc import Iterator, Sequence

from ..pool import Block, BlockList


class Lru:
    """Least recently used goes first; of one chain, the tail before the root."""

    __slots__ = ("_idle",)

    def __init__(self) -> None:
        self._idle = BlockList()

    def begin(self, capacity: int) -> None:
        """Room makes no difference."""

    def store(self, blocks: Sequence[Block], parent: Block | None) -> None:
        """Nor does what is in use."""

    def add(self, blocks: Sequence[Block]) -> None:
        self._idle.extend(blocks)

    def reuse(self, blocks: Sequence[Block]) -> None:
        self._idle.remove(blocks)

    def discard(self, block: Block) -> None:
        self._idle.remove((block,))

    def take(self, count: int) -> list[Block]:
        return self._idle.take_oldest(count)

    def check(self) -> None:
        self._idle.check()

    def __len__(self) -> int:
        return len(self._idle)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._idle)
