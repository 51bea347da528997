"""The prefixes that clients send most often, with their token ids: the content for the caches of new replicas.

The prefix index knows only block hashes, and no KV can be computed from a hash. So the last prompts are kept whole,
bounded in bytes; which prefixes are hot is computed on request, which is rare. Pure state without a clock: the oldest
prompts are dropped when the memory is full. Knows no replica.

Blocks go by their wire hash, which names a whole prefix: a request for a block is a request for all blocks before it.
So along a prompt the request counts only fall, and the blocks with at least a given count are a prefix of it. Tenants
have roots of their own and therefore no block in common.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import msgspec

from ...kvcache.hashing import HASH_BYTES, TOKEN_BYTES, BlockHash, wire_hashes

#: Of a prompt beside its tokens and hashes: three objects and a place in the queue.
ENTRY_BYTES = 250
#: A prompt that was sent once may never come again: a block is hot from its second request on.
MIN_REQUESTS = 2
#: Prefixes are told apart in steps of so many tokens: computing fewer costs less than the warm-up request itself.
STEP_TOKENS = 128


class HotPrefix(msgspec.Struct, frozen=True, gc=False):
    """The beginning of a prompt, in whole blocks, and how often it was sent."""

    root: BlockHash
    tokens: bytes
    hashes: bytes
    requests: int = 1  #: kept prompts that begin with it

    @property
    def size(self) -> int:
        """Bytes, as a kept prompt."""
        return len(self.tokens) + len(self.hashes) + ENTRY_BYTES


class HotPrefixes:
    """The last prompts, all hashed in the same way."""

    def __init__(self, block_size: int, capacity_bytes: int) -> None:
        self.step = max(1, STEP_TOKENS // block_size)  #: blocks
        self._block_bytes = block_size * TOKEN_BYTES
        self._capacity = capacity_bytes
        self._prompts: deque[HotPrefix] = deque()
        self._bytes = 0

    def add(self, root: BlockHash, tokens: bytes, hashes: bytes) -> None:
        """Add a request's prompt; `hashes` are those of its full blocks."""
        prompt = HotPrefix(root, tokens, hashes)
        if len(hashes) < self.step * HASH_BYTES or prompt.size > self._capacity:
            return
        self._prompts.append(prompt)
        self._bytes += prompt.size
        while self._bytes > self._capacity:
            self._bytes -= self._prompts.popleft().size

    def newest(self) -> Iterator[Sequence[int]]:
        """The block hashes of each prompt, as the index names them; the newest prompt first."""
        return (wire_hashes(prompt.hashes) for prompt in reversed(self._prompts))

    def clear(self) -> None:
        """Drop all prompts: blocks are hashed in another way from now on."""
        self._prompts.clear()
        self._bytes = 0

    def hottest(self, max_blocks: int, *, held: Callable[[int], bool], kept: Callable[[int], bool]) -> list[HotPrefix]:
        """The prefixes with the most requests, in classes of half the count each, newest prompt first within a class.

        Together at most `max_blocks` blocks, shared ones counted once. Blocks that are `held` already cost nothing; a
        prefix that consists of them is left out. So are blocks that no replica has `kept`: they were not hot enough.
        """
        step = self.step
        marks = [(wire_hashes(prompt.hashes)[step - 1 :: step], prompt) for prompt in reversed(self._prompts)]
        requests = Counter(chain.from_iterable(names for names, _ in marks))
        # Most prompts drop out here: no other begins like them, or a newer one begins in the same way.
        hot: dict[tuple[int, ...], HotPrefix] = {}
        for names, prompt in marks:
            if depth := bisect_left(names, True, key=lambda name: requests[name] < MIN_REQUESTS):
                hot.setdefault(names[:depth], prompt)
        found, covered, left = [], set[int](), max_blocks // step  #: `left`: steps that may still be chosen
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
                    found.append(HotPrefix(prompt.root, tokens, hashes, requests[names[depth - 1]]))
        return found

    def __len__(self) -> int:
        return len(self._prompts)

    def check(self) -> None:
        size = sum(prompt.size for prompt in self._prompts)
        assert size == self._bytes <= self._capacity, f"{self._bytes} bytes counted, {size} kept of {self._capacity}"


def _classes(most: int) -> Iterator[int]:
    """The least number of requests of each class, falling."""
    while most >= MIN_REQUESTS:
        least = max(MIN_REQUESTS, most // 2)
        yield least
        most = least if least > MIN_REQUESTS else 0
