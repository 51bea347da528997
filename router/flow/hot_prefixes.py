"""The prefixes that clients send most often, with their token ids: used to fill the caches of new replicas.

The prefix index has only block hashes, from which no KV can be computed. So the last prompts are kept whole, up to a
limit in bytes. Hot prefixes are computed on demand, which is rare. Pure state: no clock, no replicas.

Blocks are identified by wire hash, which covers the whole prefix: a request for a block is a request for all blocks
before it. So request counts never rise along a prompt, and its blocks with at least a given count form a prefix of it.
Tenants have different roots and therefore share no blocks.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import msgspec

from ...kvcache.hashing import HASH_BYTES, TOKEN_BYTES, BlockHash, wire_hashes

#: Overhead of a kept prompt besides its tokens and hashes: three objects and a deque entry.
ENTRY_BYTES = 250
#: A block is hot from its second request on: a prompt sent once may never come again.
MIN_REQUESTS = 2
#: Prefixes are distinguished in steps of this many tokens: computing fewer costs less than the warm-up request itself.
STEP_TOKENS = 128


class HotPrefix(msgspec.Struct, frozen=True, gc=False):
    """A prompt, or a prefix of it in whole blocks, and how often it was sent."""

    root: BlockHash
    tokens: bytes
    hashes: bytes
    salt: bytes = b""  #: what the root was derived from
    requests: int = 1  #: number of kept prompts that start with it

    @property
    def size(self) -> int:
        """Memory that it takes as a kept prompt, in bytes."""
        return len(self.tokens) + len(self.hashes) + ENTRY_BYTES


class HotPrefixes:
    """The most recent prompts, all hashed in the same way."""

    def __init__(self, block_size: int, capacity_bytes: int) -> None:
        self.step = max(1, STEP_TOKENS // block_size)  #: in blocks
        self._block_bytes = block_size * TOKEN_BYTES
        self._capacity = capacity_bytes
        self._prompts: deque[HotPrefix] = deque()
        self._bytes = 0

    def add(self, root: BlockHash, tokens: bytes, hashes: bytes, salt: bytes = b"") -> None:
        """Keep a request's prompt. `hashes`: those of its full blocks. Ignores prompts of less than a step."""
        if len(hashes) < self.step * HASH_BYTES:
            return
        prompt = HotPrefix(root, tokens, hashes, salt)
        if prompt.size > self._capacity:
            return
        self._prompts.append(prompt)
        self._bytes += prompt.size
        while self._bytes > self._capacity:
            self._bytes -= self._prompts.popleft().size

    def newest(self) -> Iterator[Sequence[int]]:
        """The wire hashes of each prompt's blocks, newest prompt first."""
        return (wire_hashes(prompt.hashes) for prompt in reversed(self._prompts))

    def clear(self) -> None:
        """Drop all prompts; needed when the way blocks are hashed changes."""
        self._prompts.clear()
        self._bytes = 0

    def hottest(self, max_blocks: int, *, held: Callable[[int], bool], kept: Callable[[int], bool]) -> list[HotPrefix]:
        """The prefixes with the most requests, at most `max_blocks` blocks in total.

        Ordered in classes whose minimum request counts halve, newest prompt first within a class. Shared blocks count
        once; blocks that are `held` already cost nothing, and a prefix of only such blocks is left out. A prefix ends
        before the first block that no replica has `kept`: the rest was not hot enough.
        """
        step = self.step
        marks = [(wire_hashes(prompt.hashes)[step - 1 :: step], prompt) for prompt in reversed(self._prompts)]
        requests = Counter(chain.from_iterable(names for names, _ in marks))
        # Most prompts are dropped here: no other has the same prefix, or a newer one does.
        hot: dict[tuple[int, ...], HotPrefix] = {}
        for names, prompt in marks:
            if depth := bisect_left(names, True, key=lambda name: requests[name] < MIN_REQUESTS):
                hot.setdefault(names[:depth], prompt)
        found, covered, left = [], set[int](), max_blocks // step  #: `left`: number of steps that still fit
        for least in _classes(max(requests.values(), default=0)):
            for names, prompt in hot.items():
                if not left or requests[names[0]] < least:
                    continue
                first = bisect_left(names, True, key=lambda name: name not in covered and not held(name))
                depth = bisect_left(names, True, key=lambda name: requests[name] < least or not kept(name))
                depth = min(depth, first + left)
                if depth > first:
                    covered.update(names[first:depth])
                    left -= depth - first
                    blocks = depth * step
                    tokens, hashes = prompt.tokens[: blocks * self._block_bytes], prompt.hashes[: blocks * HASH_BYTES]
                    found.append(HotPrefix(prompt.root, tokens, hashes, prompt.salt, requests[names[depth - 1]]))
        return found

    def __len__(self) -> int:
        return len(self._prompts)

    def check(self) -> None:
        size = sum(prompt.size for prompt in self._prompts)
        assert size == self._bytes <= self._capacity, f"{self._bytes} bytes counted, {size} kept of {self._capacity}"


def _classes(most: int) -> Iterator[int]:
    """The lowest request count of each class, in descending order."""
    while most >= MIN_REQUESTS:
        least = max(MIN_REQUESTS, most // 2)
        yield least
        most = least if least > MIN_REQUESTS else 0
