"""The blocks of requests: takes them from the cache and the host tier, and returns, commits and pins them.

Joins `RequestState` and `PrefixCache`, and does not know which request runs when.
"""

from collections.abc import Sequence

from msgspec import structs

from ...kvcache.hashing import BlockHash, BlockHasher, content_digest
from ...kvcache.host_tier import HOST, HostBlock
from ...kvcache.pool import BlockId
from ...kvcache.prefix_cache import PrefixCache, PrefixMatch
from .host_blocks import HostBlocks
from .request import RequestState
from .step_plan import BlockCopy

_NO_MATCH = PrefixMatch(blocks=(), tokens=0)


class RequestBlocks:
    def __init__(self, cache: PrefixCache, hasher: BlockHasher, host: HostBlocks | None = None) -> None:
        self._cache = cache
        self._block_size = hasher.block_size
        self._host = host
        #: Blocks whose KV the next step copies to others before it computes: nothing may be loaded into them.
        self._copied: set[BlockId] = set()

    def begin_step(self) -> None:
        """Plan the next step: the one before has made its copies."""
        self._copied.clear()

    def take_moved_s(self) -> float:
        """Seconds that moves to and from host memory take, of those begun since the last call."""
        return self._host.take_moved_s() if self._host is not None else 0.0

    def look_up(self, request: RequestState) -> PrefixMatch:
        """The prefix of a waiting request in the pool; without a part of a block if the host tier has that block."""
        if not request.may_use_cache:
            return _NO_MATCH
        known = len(request.tokens)
        match = self._cache.match(request.root, request.hashes, request.token_bytes(0, known), known)
        if match.partial is not None and self._in_host(request, match, 1):
            match = structs.replace(match, tokens=match.tokens - match.partial.tokens, partial=None)
        return structs.replace(match, query_tokens=0) if request.warm_up or request.counted else match

    def _in_host(self, request: RequestState, match: PrefixMatch, most: int | None = None) -> list[HostBlock]:
        """The blocks after a match, at most so many, that the host tier has."""
        start = len(match.blocks)
        end = len(self.usable_hashes(request))
        if self._host is None or start >= end or (match.partial is not None and most is None):
            return []
        end = end if most is None else min(end, start + most)
        run = self._host.tier.run(request.hashes[start:end])
        contents = self._contents(request, start + len(run))[start:] if run else []
        wrong = (at for at, block in enumerate(run) if block.content != contents[at])
        return run[: next(wrong, len(run))]

    def _contents(self, request: RequestState, count: int) -> list[bytes]:
        """The digests of a request's first blocks, at least so many."""
        size, known = self._block_size, request.contents
        for number in range(len(known), count):
            tokens = request.token_bytes(number * size, (number + 1) * size)
            known.append(content_digest(known[-1] if known else request.root, tokens))
        return known

    def expect(self, request: RequestState) -> PrefixMatch:
        """Record the cached tokens and the blocks that a request would find and take now; return its prefix."""
        match = self.look_up(request)
        run = self._in_host(request, match)
        request.expected_cached = match.tokens + len(run) * self._block_size
        used = sum(block.ref_count > 0 for block in match.blocks)
        request.needed_blocks = -(-request.num_tokens // self._block_size) - used
        return match

    def usable_hashes(self, request: RequestState) -> Sequence[BlockHash]:
        """The hashes of the blocks that a waiting request can take from the cache: not that of its last token."""
        usable = (len(request.tokens) - 1) // self._block_size if request.may_use_cache else 0
        return request.hashes[:usable]

    def acquire(self, request: RequestState, match: PrefixMatch, leave: int | None, *, breaks_pins: bool) -> bool:
        """Give a request that starts its cached blocks, and new ones for the rest; False if too few are free.

        If nothing runs, nothing will free blocks: then it `breaks_pins` in its way. Others `leave` so many free
        blocks, besides those that are held for other requests; None: they take any.
        """
        needed = -(-request.num_tokens // self._block_size) - len(match.blocks)
        if self._host is not None:
            self._host.tier.keep(self._in_host(request, match))  # what it evicts would push them out
        blocks = self._cache.acquire(match, needed, leave)
        while blocks is None and breaks_pins and self._cache.break_pin():
            blocks = self._cache.acquire(match, needed)
        if blocks is None:
            return False
        self._cache.unhold(request.key)
        request.counted = True
        request.blocks = blocks
        request.computed = match.tokens
        request.committed_blocks = len(match.blocks)
        loaded = self._load(request, match) * self._block_size
        request.cached_now = request.computed
        if request.cached_tokens is None:
            request.cached_tokens = min(request.computed, request.prompt_tokens)
            loaded_prompt = max(0, request.cached_tokens - match.tokens)
            request.loaded_tokens = ((HOST, loaded_prompt),) if loaded_prompt else ()
        if match.query_tokens:
            self._cache.counters.hit_tokens += loaded
            self._cache.counters.host_hit_tokens += loaded
        return True

    def _load(self, request: RequestState, match: PrefixMatch) -> int:
        """Load the blocks after a match that the host tier has, and share them. Returns how many."""
        run, start = self._in_host(request, match), len(match.blocks)
        targets = request.blocks[start : start + len(run)]
        free = next((at for at, block in enumerate(targets) if block.block_id in self._copied), len(run))
        if self._host is None or not free:
            return 0
        loaded = self._host.load(run[:free], targets[:free])
        request.computed += loaded * self._block_size
        self.commit(request, request.computed)
        return loaded

    def copy_of_partial(self, request: RequestState, match: PrefixMatch) -> BlockCopy | None:
        """The copy of a partial hit's KV that must precede the first step of a request that has acquired it."""
        if match.partial is None:
            return None
        source, target = match.partial.source, request.blocks[len(match.blocks)]
        if source is target:  # the cache may hand out the source itself, which needs no copy
            return None
        self._copied.add(source.block_id)
        return BlockCopy(source.block_id, target.block_id, match.partial.tokens)

    def missing(self, request: RequestState, more: int = 0) -> int:
        """Blocks to allocate for all tokens and `more`; negative if rejected drafts left some over."""
        return -(-(request.num_tokens + more) // self._block_size) - len(request.blocks)

    def extend(self, request: RequestState) -> bool:
        """Provide blocks for all tokens of a running request; False, with no effect, if too few are free."""
        missing = self.missing(request)
        if missing > 0:
            blocks = self._cache.allocate(missing)
            if blocks is None:
                return False
            request.blocks += blocks
        return True

    def extend_for_drafts(self, request: RequestState, count: int) -> int:
        """Provide blocks for drafts after a request's tokens if enough are free and not held. Returns how many fit."""
        missing = self.missing(request, count)
        if 0 < missing <= self._cache.unheld_free_blocks:
            request.blocks += self._cache.allocate(missing) or ()
        return len(request.blocks) * self._block_size - request.num_tokens

    def commit(self, request: RequestState, computed: int) -> None:
        """Share the full blocks of a request's first `computed` tokens."""
        size = self._block_size
        start, full = request.committed_blocks, computed // size
        if full <= start:
            return
        parent = request.hashes[start - 1] if start else request.root
        tokens = request.token_bytes(start * size, full * size)
        self._cache.commit(request.blocks[start:full], start, parent, request.hashes[start:full], tokens, request.salt)
        request.committed_blocks = full

    def pin(self, request: RequestState, now: float) -> int:
        """Pin the prefixes that a request with a computed prompt asked for. Returns the longest, in tokens."""
        size = self._block_size
        kept = [
            self._cache.pin(pin.tenant, request.blocks[: pin.num_tokens // size], now + pin.ttl_s)
            for pin in request.pins
        ]
        return max((blocks or 0 for blocks in kept), default=0) * size

    def release(self, request: RequestState) -> None:
        """Free a request's blocks, and give up the prefix that is held for it."""
        self._cache.unhold(request.key)
        self._cache.release(request.blocks)
        request.rewind()
