"""Which resident blocks follow a given prefix: where a look-up goes on after the last whole block that it found.

Knows no tokens and no policy: the cache tells it what became resident and what is gone, and compares tokens itself.

A block nearly always has one child or none, so `Block.children` is the bare hash of that one, which costs a commit one
assignment. Nobody takes it back when the child is evicted: who reads it looks whether it is still resident. Children
that came to stand beside others, and first blocks, are kept in a dictionary, which they leave when they are evicted.
"""

from collections.abc import Iterator, Mapping
from itertools import islice

from .hashing import BlockHash
from .pool import Block, Siblings


class Children:
    """The resident blocks by the one before them, or by their root. `index` is the cache's own."""

    __slots__ = ("_index", "_roots")

    def __init__(self, index: Mapping[BlockHash, Block]) -> None:
        self._index = index
        #: First blocks by root. Apart from the others, as a root may equal some block's hash.
        self._roots: dict[BlockHash, Siblings] = {}

    def add_first(self, root: BlockHash, child: Block) -> None:
        """A first block became resident."""
        self._join(self._roots.setdefault(root, {}), child)

    def add(self, parent: Block, child: Block) -> None:
        """`child` became resident and follows `parent`."""
        assert child.block_hash is not None, f"{child} holds nothing"
        if isinstance(parent.children, dict):
            self._join(parent.children, child)
        elif (only := self._only_child(parent)) is None or only is child:
            parent.children = child.block_hash
        else:
            parent.children = {}
            self._join(parent.children, only)
            self._join(parent.children, child)

    @staticmethod
    def _join(siblings: Siblings, child: Block) -> None:
        assert child.block_hash is not None, f"{child} holds nothing"
        siblings[child.block_hash] = None
        child.siblings = siblings

    def _only_child(self, parent: Block) -> Block | None:
        assert not isinstance(parent.children, dict), f"{parent} has several children"
        child = self._index.get(parent.children) if parent.children is not None else None
        return child if child and child.parent == parent.block_hash and not child.first else None

    def leave(self, block: Block) -> None:
        """A block that has siblings is about to lose its hash."""
        assert block.siblings is not None, f"{block} has no siblings"
        assert block.block_hash is not None, f"{block} holds nothing"
        del block.siblings[block.block_hash]
        if block.first and not block.siblings:
            assert block.parent is not None, f"{block} has no root"
            del self._roots[block.parent]
        block.siblings = None

    @staticmethod
    def hand_over(old: Block, new: Block) -> None:
        """Another copy stands for this hash from now on."""
        new.children, new.siblings = old.children, old.siblings

    def clear(self) -> None:
        """Nothing is resident any more."""
        self._roots.clear()

    def newest_firsts(self, root: BlockHash, count: int) -> Iterator[Block]:
        """At most `count` first blocks, the last to become resident first."""
        return self._newest(self._roots.get(root, {}), count)

    def newest(self, parent: Block, count: int) -> Iterator[Block]:
        """At most `count` children, the last to become resident first."""
        if isinstance(parent.children, dict):
            return self._newest(parent.children, count)
        child = self._only_child(parent)
        return iter((child,) if child else ())

    def _newest(self, siblings: Siblings, count: int) -> Iterator[Block]:
        return map(self._index.__getitem__, islice(reversed(siblings), count))

    def check(self) -> None:
        """Assert that each resident block is found once, where it belongs, and nothing else is."""
        found = [child for root in self._roots for child in self.newest_firsts(root, len(self._index))]
        assert all(child.first for child in found), "a block that starts no chain follows a root"
        for parent in self._index.values():
            children = list(self.newest(parent, len(self._index)))
            assert all(child.parent == parent.block_hash for child in children), f"{parent} has another's child"
            found += children
        assert len(found) == len(self._index), f"{len(found)} blocks follow something, {len(self._index)} are resident"
        assert all(self._roots.values()), "a root without blocks is remembered"
