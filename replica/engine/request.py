"""One request inside the engine: its tokens, the names of its blocks, and how far its KV is computed.

Pure state. Knows no other request, no cache policy, no clock and no sockets.
"""

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from ...kvcache.hashing import BlockHash, BlockHasher, token_bytes
from ...kvcache.pool import Block
from ..messages import Pin, PositionLogprobs, SamplingParams


class RequestKey(NamedTuple):
    """Who sent it (the router's id), and that router's number for it."""

    source: str
    request_id: int


class Phase(Enum):
    """Where a request is. Waiting and running alternate under preemption; finished is the end."""

    WAITING = "waiting"  #: holds no blocks
    RUNNING = "running"  #: holds blocks for all its tokens
    FINISHED = "finished"  #: holds no blocks


@dataclass(slots=True, eq=False)
class RequestState:
    """A request from its admission to its last token. Changed by the scheduler and the engine only."""

    key: RequestKey
    #: Prompt, then what was generated (here or on a replica before this one).
    tokens: "array[int]"
    prompt_tokens: int
    #: Parent of the first block.
    root: BlockHash
    #: One hash for each full block of `tokens`.
    hashes: list[BlockHash]
    sampling: SamplingParams
    priority: int = 0
    #: Rises with each request that is added; kept across preemptions, so that a preempted request goes first.
    arrival: int = 0
    trace_id: str = ""
    #: Prefixes of the prompt to keep when it is computed.
    pins: tuple[Pin, ...] = ()
    tokens_per_output: int = 1
    #: Nobody asked for it: it fills the cache, and is in no count of queries, hits and generated tokens.
    warm_up: bool = False

    phase: Phase = Phase.WAITING
    blocks: list[Block] = field(default_factory=list)
    #: Their ids, as far as `block_table` was asked for: each step tells them all, and they only grow.
    told_blocks: "array[int]" = field(default_factory=lambda: array("i"))
    #: Tokens whose KV is in `blocks`.
    computed: int = 0
    #: Rows that were launched and have not landed; `computed` counts them already, since steps run in order.
    in_flight: int = 0
    #: Tokens that rows in flight will draw: they have a place and no value yet.
    pending: int = 0
    #: Leading blocks that were announced to the cache (taken from it, or committed to it).
    committed_blocks: int = 0
    #: Prompt tokens taken from the cache at the first admission; None before it.
    cached_tokens: int | None = None
    #: Of `computed`, those that the last admission took from the cache.
    cached_now: int = 0
    #: What the cache would give it, as of its arrival: for the load report while it waits.
    expected_cached: int = 0
    #: Free blocks when it last did not fit; None when it was not tried or has run since.
    refused_at_free: int | None = None
    #: Whether an output went out already; the first one carries more.
    answered: bool = False
    #: Tokens, and their logprobs if wanted, that no output has told yet.
    untold: list[int] = field(default_factory=list)
    untold_logprobs: list[PositionLogprobs] = field(default_factory=list)
    preemptions: int = 0
    #: Collected while the prompt is computed in chunks; None unless asked for.
    prompt_logprobs: list[PositionLogprobs | None] | None = None

    def __post_init__(self) -> None:
        if self.sampling.prompt_logprobs is not None:
            self.prompt_logprobs = [None]

    @property
    def urgency(self) -> tuple[int, int]:
        """Smaller goes first."""
        return self.priority, self.arrival

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) + self.pending

    @property
    def generated(self) -> int:
        """Tokens generated so far, counted over all replicas."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def uncomputed(self) -> int:
        """Tokens whose KV is still to be computed; at least 1 while the request is alive."""
        return self.num_tokens - self.computed

    @property
    def decoding(self) -> bool:
        """Only the newest token is to be computed, and something was computed before it."""
        return self.uncomputed == 1 and self.computed >= self.prompt_tokens

    @property
    def may_use_cache(self) -> bool:
        """Prompt logprobs need the logits of every prompt position, so nothing may be skipped until they are out."""
        return self.sampling.prompt_logprobs is None or self.answered

    def block_table(self) -> "array[int]":
        """Ids of all blocks, in order; to be read only."""
        table = self.told_blocks
        if len(table) < len(self.blocks):
            table.extend(block.block_id for block in self.blocks[len(table) :])
        return table

    def append(self, token_id: int, hasher: BlockHasher) -> None:
        """Add a generated token; a block that it fills gets its hash."""
        self.tokens.append(token_id)
        self.pending = max(0, self.pending - 1)
        start = len(self.hashes) * hasher.block_size
        if len(self.tokens) - start < hasher.block_size:
            return
        parent = self.hashes[-1] if self.hashes else self.root
        self.hashes += hasher.chain(parent, self.token_bytes(start, start + hasher.block_size))

    def token_bytes(self, start: int, stop: int) -> bytes:
        """Tokens `start` up to `stop` as uint32 little-endian."""
        return token_bytes(self.tokens[start:stop])

    def rewind(self) -> None:
        """Forget the KV: the blocks were given back."""
        self.blocks = []
        self.told_blocks = array("i")
        self.computed = 0
        self.committed_blocks = 0
        if self.prompt_logprobs is not None and not self.answered:
            self.prompt_logprobs = [None]

    def check(self, block_size: int) -> None:
        """Assert what always holds between two steps."""
        name = f"request {self.key}"
        assert 0 < self.prompt_tokens <= self.num_tokens, f"{name}: prompt {self.prompt_tokens} of {self.num_tokens}"
        full = len(self.tokens) // block_size
        assert len(self.hashes) == full, f"{name}: {len(self.hashes)} hashes for {full} full blocks"
        assert 0 <= self.pending <= self.in_flight, f"{name}: {self.pending} tokens pending of {self.in_flight} rows"
        told = list(self.told_blocks)
        assert told == [block.block_id for block in self.blocks[: len(told)]], f"{name}: tells blocks it does not hold"
        if self.phase is not Phase.RUNNING:
            assert not self.blocks, f"{name}: {self.phase.value} with {len(self.blocks)} blocks"
            return
        assert self.computed < self.num_tokens, f"{name}: computed {self.computed} of {self.num_tokens}"
        slots = len(self.blocks) * block_size
        assert self.computed <= slots, f"{name}: computed {self.computed} tokens in {slots} slots"
        whole = self.computed // block_size
        held = self.committed_blocks <= whole if self.in_flight else self.committed_blocks == whole
        assert held, f"{name}: committed {self.committed_blocks} of {whole} whole blocks, {self.in_flight} in flight"
        assert all(block.ref_count > 0 for block in self.blocks), f"{name}: holds a block without a reference"
