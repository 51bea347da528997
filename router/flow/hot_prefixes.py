"""Which prefixes are asked for again and again, and their token ids: what the cache of a new replica is filled with.

The index knows names of blocks alone, and nothing can be computed from a name. So the last prompts are kept as they
came, bounded in bytes; what is hot among them is worked out when somebody asks, which is seldom. Pure state, no time:
the memory ends with the oldest prompt that it has room for. Knows no replica.

Blocks go by their wire hash, which names a whole prefix: whoever asks for a block asks for all before it, so along a
prompt the numbers of requests only fall, and the blocks asked for at least so often are a prefix of it. Tenants have
roots of their own, and so no block in common.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import msgspec

from ...kvcache.hashing import HASH_BYTES, TOKEN_BYTES, BlockHash, wire_hashes

#: Of a prompt beside its tokens and hashes: three objects and a place in the queue.
ENTRY_BYTES = 250
#: Who asks once may never come back: a block is hot from its second request on.
LEAST_ASKED = 2
#: Heat is told apart every so many tokens: a shorter prefix is computed sooner than a request for it is made.
GRAIN_TOKENS = 128


class HotPrefix(msgspec.Struct, frozen=True, gc=False):
    """The beginning of a prompt, whole blocks, and how often it was asked for."""

    root: BlockHash
    tokens: bytes
    hashes: bytes
    asked: int  #: prompts that began so, of those remembered

    @property
    def names(self) -> tuple[int, ...]:
        """Its blocks as the index knows them."""
        return wire_hashes(self.hashes)


class _Prompt(msgspec.Struct, frozen=True, gc=False):
    root: BlockHash
    tokens: bytes
    hashes: bytes

    @property
    def size(self) -> int:
        return len(self.tokens) + len(self.hashes) + ENTRY_BYTES


class HeatBook:
    """The last prompts of one way of naming blocks."""

    def __init__(self, block_size: int, capacity_bytes: int) -> None:
        self._grain = max(1, GRAIN_TOKENS // block_size)  #: blocks
        self._block_bytes = block_size * TOKEN_BYTES
        self._capacity = capacity_bytes
        self._prompts: deque[_Prompt] = deque()
        self._bytes = 0

    def note(self, root: BlockHash, tokens: bytes, hashes: bytes) -> None:
        """A request came with these tokens; `hashes` are those of their full blocks."""
        prompt = _Prompt(root, tokens, hashes)
        if len(hashes) < self._grain * HASH_BYTES or prompt.size > self._capacity:
            return
        self._prompts.append(prompt)
        self._bytes += prompt.size
        while self._bytes > self._capacity:
            self._bytes -= self._prompts.popleft().size

    def hottest(self, room_blocks: int, *, held: Callable[[int], bool], kept: Callable[[int], bool]) -> list[HotPrefix]:
        """What is asked for most, in classes of half the number each, the newest prompt first within a class.

        Together no more than `room_blocks` blocks, shared ones counted once. Blocks that are `held` cost nothing, and a
        prompt of which no other is left over is left out, as is what is not `kept` anywhere: it was not hot enough.
        """
        grain = self._grain
        marks = [(wire_hashes(prompt.hashes)[grain - 1 :: grain], prompt) for prompt in reversed(self._prompts)]
        asked = Counter(chain.from_iterable(names for names, _ in marks))
        # Little is left of most prompts: nobody else began like them, or a newer one began in the same way.
        hot: dict[tuple[int, ...], _Prompt] = {}
        for names, prompt in marks:
            if depth := bisect_left(names, True, key=lambda name: asked[name] < LEAST_ASKED):
                hot.setdefault(names[:depth], prompt)
        cover, found = _Cover(asked, held, kept, room_blocks // grain), []
        for least in _classes(max(asked.values(), default=0)):
            for names, prompt in hot.items():
                if depth := cover.extend(names, least):
                    found.append(self._prefix(prompt, depth * grain, asked[names[depth - 1]]))
        return found

    def __len__(self) -> int:
        """Prompts that are kept."""
        return len(self._prompts)

    def check(self) -> None:
        """Assert every invariant."""
        size = sum(prompt.size for prompt in self._prompts)
        assert size == self._bytes <= self._capacity, f"{self._bytes} bytes counted, {size} kept of {self._capacity}"

    def _prefix(self, prompt: _Prompt, blocks: int, asked: int) -> HotPrefix:
        tokens, hashes = prompt.tokens[: blocks * self._block_bytes], prompt.hashes[: blocks * HASH_BYTES]
        return HotPrefix(prompt.root, tokens, hashes, asked)


@dataclass(slots=True)
class _Cover:
    """The blocks that were chosen already: of each prompt a prefix."""

    asked: Counter[int]
    held: Callable[[int], bool]
    kept: Callable[[int], bool]
    room: int
    covered: set[int] = field(default_factory=set)

    def extend(self, names: Sequence[int], least: int) -> int:
        """Choose more of a prompt, as far as it was asked for so often and there is room. Where that ends, or 0."""
        if not self.room or self.asked[names[0]] < least:
            return 0
        first = bisect_left(names, True, key=self._is_new)
        last = bisect_left(names, True, key=lambda name: self.asked[name] < least or not self.kept(name))
        last = min(last, first + self.room)
        if last <= first:
            return 0
        self.covered.update(names[first:last])
        self.room -= last - first
        return last

    def _is_new(self, name: int) -> bool:
        return name not in self.covered and not self.held(name)


def _classes(most: int) -> Iterator[int]:
    """How often a block must have been asked for, from class to class."""
    least = most
    while least >= LEAST_ASKED:
        least = max(LEAST_ASKED, least // 2)
        yield least
        least = least if least > LEAST_ASKED else 0
