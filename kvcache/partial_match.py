"""Partial matches: the resident block that shares the most leading tokens with the next block of a prompt.

Tracks which resident blocks follow which prefix. Does not depend on the order of eviction: the cache reports which
blocks became resident or were evicted.

A block nearly always has at most one child, so `Block.children` is then that child's bare hash, which costs a commit
one assignment. It is not reset when the child is evicted; readers check whether the child is still resident. Several
children of a block, and first blocks, are kept in a dictionary and removed from it on eviction.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from .hashing import TOKEN_BYTES, BlockHash
from .pool import Block, Siblings

#: A look-up compares the prompt with at most this many of the blocks that follow a prefix, the most recent ones.
#: On the chats of tests/bench/partial_blocks.py with 256-token blocks, 1 found 88 % of the tokens that comparing all
#: blocks found, 4 found 96 %, 8 found 99.6 %; with blocks of 16 or 64 tokens it made no difference.
MAX_SOURCES = 8


@dataclass(slots=True, frozen=True)
class PartialHit:
    """A resident block whose leading tokens continue the prompt after the matched blocks, while later ones differ."""

    source: Block
    tokens: int  #: number of equal leading tokens: at least 1, less than a full block


class PartialMatcher:
    """The resident blocks by their parent block or root. `index` is shared with the cache."""

    __slots__ = ("_index", "_roots")

    def __init__(self, index: Mapping[BlockHash, Block]) -> None:
        self._index = index
        #: First blocks by root. Kept apart from other blocks' children, as a root may equal some block's hash.
        self._roots: dict[BlockHash, Siblings] = {}

    def add_first(self, root: BlockHash, child: Block) -> None:
        self._join(self._roots.setdefault(root, {}), child)

    def add(self, parent: Block, child: Block) -> None:
        """Record that `child` became resident after `parent`."""
        assert child.block_hash is not None, f"{child} has no hash"
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
        assert child.block_hash is not None, f"{child} has no hash"
        siblings[child.block_hash] = None
        child.siblings = siblings

    def _only_child(self, parent: Block) -> Block | None:
        assert not isinstance(parent.children, dict), f"{parent} has several children"
        child = self._index.get(parent.children) if parent.children is not None else None
        return child if child and child.parent == parent.block_hash and not child.first else None

    def leave(self, block: Block) -> None:
        """Remove a block from its siblings. Call it before the block loses its hash."""
        assert block.siblings is not None, f"{block} has no siblings"
        assert block.block_hash is not None, f"{block} has no hash"
        del block.siblings[block.block_hash]
        if block.first and not block.siblings:
            assert block.parent is not None, f"{block} has no root"
            del self._roots[block.parent]
        block.siblings = None

    @staticmethod
    def replace(old: Block, new: Block) -> None:
        """Move the links to `new`, which replaces `old` in the index as the copy of its hash."""
        new.children, new.siblings = old.children, old.siblings

    def clear(self) -> None:
        self._roots.clear()

    def match(self, parent: Block | BlockHash, wanted: bytes) -> PartialHit | None:
        """Among the newest blocks after `parent` (a block or a root), find the one with the most equal leading tokens.

        `wanted` holds the next tokens of the prompt, less than a full block. The prefix needs no further check: the
        cache has verified it up to `parent`, and a resident block's parent is its true predecessor.
        """
        next_token = wanted[:TOKEN_BYTES]
        longest, source = 0, None
        if isinstance(parent, Block):
            followers = self.newest(parent, MAX_SOURCES)
        else:
            followers = self.newest_firsts(parent, MAX_SOURCES)
        for block in followers:
            if not block.tokens.startswith(next_token):  # rejects nearly all when many prompts differ from the start
                continue
            agreed = _common_tokens(block.tokens, wanted)
            if agreed > longest:
                longest, source = agreed, block
        return PartialHit(source, longest) if source else None

    def newest_firsts(self, root: BlockHash, count: int) -> Iterator[Block]:
        """Iterate over at most `count` first blocks under `root`, the most recently resident first."""
        return self._newest(self._roots.get(root, {}), count)

    def newest(self, parent: Block, count: int) -> Iterator[Block]:
        """Iterate over at most `count` children, the most recently resident first."""
        if isinstance(parent.children, dict):
            return self._newest(parent.children, count)
        child = self._only_child(parent)
        return iter((child,) if child else ())

    def _newest(self, siblings: Siblings, count: int) -> Iterator[Block]:
        return map(self._index.__getitem__, islice(reversed(siblings), count))

    def check(self) -> None:
        """Assert that exactly the resident blocks are linked, each once, under its own parent or root."""
        found = [child for root in self._roots for child in self.newest_firsts(root, len(self._index))]
        assert all(child.first for child in found), "a block listed under a root does not start a chain"
        for parent in self._index.values():
            children = list(self.newest(parent, len(self._index)))
            assert all(child.parent == parent.block_hash for child in children), f"{parent} lists another block's child"
            found += children
        assert len(found) == len(self._index), f"{len(found)} blocks are linked, {len(self._index)} are resident"
        assert all(self._roots.values()), "a root without blocks is listed"


def _common_tokens(held: bytes, wanted: bytes) -> int:
    """Count the equal leading tokens. `wanted` must not be longer than `held`."""
    # Compared as little-endian numbers: their lowest differing bit lies in the first token that differs.
    differing = int.from_bytes(held[: len(wanted)], "little") ^ int.from_bytes(wanted, "little")
    lowest = (differing & -differing).bit_length() - 1
    return (lowest // 8 if differing else len(wanted)) // TOKEN_BYTES
