"""The load of one replica as policies see it. Pure values."""

from math import exp
from typing import Literal

import msgspec

from ...events.wire.messages import PrefillCost

#: Tokens of an answer while no request has finished.
TYPICAL_TOKENS = 128

#: Error in the predicted number of free blocks when a request starts, as a share of the blocks in use. Simulated on 16
#: cells of agent traffic: geometric means of mean TTFT and p99 were 0.208 and 2.48 s with 0, 0.179
#: and 1.96 s with 0.05, 0.171 and 1.55 s with 0.1.
UNCERTAIN = 0.1
#: With more spare blocks than this many times that error, the wait for blocks is ignored: the expected shortage is
#: below a hundredth of the error.
NEGLIGIBLE = 5
#: Keeps a wait finite.
LEAST_ENDS_PER_STEP = 1e-9
#: Replicas are ordered by the cost of a prompt with this many tokens, of which nothing is cached.
TYPICAL_PROMPT_TOKENS = 1024

#: Why a replica takes no new requests: it is about to leave, or its cache is being filled.
UnavailableReason = Literal["draining", "warming"]


class ReplicaLoad(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One replica's load as policies see it."""

    running: int
    waiting: int  #: reported and pending requests
    queued_prefill_tokens: int  #: of reported and pending requests
    busy_until: float  #: time on the router's clock when those are computed; meaningless if there are none
    free_blocks: int  #: allocatable blocks, less those that pending requests need
    cached_free_blocks: int
    spare_blocks: int  #: free blocks, less those that waiting and pending requests need; below 0: a shortage
    total_blocks: int
    prefill_tokens_per_s: float
    decode_step_s: float
    prefill_cost: PrefillCost
    max_running_requests: int
    max_batched_tokens: int
    draining: bool = False
    warming: bool = False
    silent: bool = False
    external: bool = False  #: an engine that is not ours
    pinned_blocks: int = 0
    #: mean number of running requests that end per decode step
    ends_per_step: float = 1 / TYPICAL_TOKENS
    load_block_s: tuple[tuple[str, float], ...] = ()  #: seconds to bring a block up, by medium of its tiers

    @property
    def available(self) -> bool:
        """Whether the replica takes new requests."""
        return not (self.draining or self.warming or self.silent)

    @property
    def requests(self) -> int:
        return self.running + self.waiting

    @property
    def occupied_blocks(self) -> int:
        """Blocks in use or still holding cached KV."""
        return self.total_blocks - self.free_blocks + self.cached_free_blocks

    def wait_s(self, blocks: int) -> float:
        """Expected seconds until one more request has a slot and this many blocks, as running requests end.

        If memory is nearly full, some blocks count as possibly missing: the needs of running requests and the requests
        that other routers send there are not known exactly.
        """
        slots = self.requests + 1 - self.max_running_requests
        used = max(1, self.total_blocks - self.free_blocks)
        spread, missing = UNCERTAIN * used, blocks - self.spare_blocks
        if missing < -NEGLIGIBLE * spread and slots <= 0:
            return 0.0
        # A cached block that no request uses is needed like any free one.
        likely = missing + spread if missing > 0 else spread * exp(missing / spread)
        ends = max(slots, likely / used * (self.running or self.waiting))
        return ends / max(LEAST_ENDS_PER_STEP, self.ends_per_step) * self.decode_step_s
