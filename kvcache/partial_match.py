"""Partial matches: the resident block that shares the most leading tokens with what a prompt continues with.

Also keeps track of which resident blocks follow which prefix. Knows no eviction policy: the cache reports what became
resident and what was evicted.

A block nearly always has one child or none, so `Block.children` is the bare hash of that one, which costs a commit one
assignment. It is not reset when the child is evicted: the reader checks whether the child is still resident. Further
children of a block, and first blocks, are kept in a dictionary, from which they are removed when they are evicted.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from .hashing import TOKEN_BYTES, BlockHash
from .pool import Block, Siblings

#: A look-up compares the prompt with so many of the blocks that follow a prefix: the last ones to become resident.
#: On the chats of tests/bench/partial_blocks.py at 256 tokens a block, 1 found 88 % of the tokens that all together
#: found, 4 found 96 %, 8 found 99.6 %; in blocks of 16 or 64 it made no difference.
MOST_SOURCES = 8


@dataclass(slots=True, frozen=True)
class PartialHit:
    """A resident block whose first tokens continue the prompt behind the matched blocks; later ones differ."""

    source: Block
    tokens: int  #: at least 1, fewer than a block


class PartialMatcher:
    """The resident blocks by the block before them, or by their root. `index` is the cache's own."""

    __slots__ = ("_index", "_roots")

    def __init__(self, index: Mapping[BlockHash, Block]) -> None:
        self._index = index
        #: First blocks by root. Apart from the others, as a root may equal some block's hash.
        self._roots: dict[BlockHash, Siblings] = {}

    def add_first(self, root: BlockHash, child: Block) -> None:
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
        self._roots.clear()

    def match(self, parent: Block | BlockHash, wanted: bytes) -> PartialHit | None:
        """Of the newest blocks behind `parent` (a root: first blocks), the one that shares most leading tokens.

        `wanted`: the next tokens of the prompt, fewer than a block. The blocks follow the very prefix that the cache
        verified, as a resident block's parent is its true predecessor.
        """
        next_token = wanted[:TOKEN_BYTES]
        longest, source = 0, None
        if isinstance(parent, Block):
            followers = self.newest(parent, MOST_SOURCES)
        else:
            followers = self.newest_firsts(parent, MOST_SOURCES)
        for block in followers:
            if not block.tokens.startswith(next_token):  # nearly all, where a thousand prompts begin differently
                continue
            agreed = _common_tokens(block.tokens, wanted)
            if agreed > longest:
                longest, source = agreed, block
        return PartialHit(source, longest) if source else None

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


def _common_tokens(held: bytes, wanted: bytes) -> int:
    """How many leading tokens agree. `wanted` is not the longer one."""
    # As little-endian numbers, so that the lowest bit in which they differ is in the first token that does.
    differing = int.from_bytes(held[: len(wanted)], "little") ^ int.from_bytes(wanted, "little")
    lowest = (differing & -differing).bit_length() - 1
    return (lowest // 8 if differing else len(wanted)) // TOKEN_BYTES
