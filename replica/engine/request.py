"""One request inside the engine: its tokens, its block hashes, and how much of its KV is computed.

Pure state: no other requests, no cache policy, no clock, no sockets. `admit` builds it from a `Generate` message.
Routers validate client input; `admit` protects the engine from a router with another version or block size, whose
hashes would otherwise make a whole step fail.
"""

from array import array
from dataclasses import dataclass, field
from enum import Enum
from math import isfinite
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...kvcache.hashing import HASH_BYTES, TOKEN_BYTES, BlockHash, BlockHasher, split_hashes, token_array, token_bytes
from ...kvcache.pool import Block
from ..errors import InvalidRequest
from ..messages import NO_LOGPROBS, EmbeddingParams, EncodedPosition, Generate, Pin, PositionLogprobs, SamplingParams
from ..structured.guide import Guide

#: Maximum number of alternatives besides a token's own logprob. OpenAI allows 20 (chat) and 5 (completions).
MAX_LOGPROBS = 100
#: Tokens without drafts after a first failure; each further failure in a row multiplies the pause by this.
PAUSE_FACTOR = 5
#: Length of a tenant's digest.
TENANT_BYTES = 16


class RequestKey(NamedTuple):
    """The source (the router's id) and that router's number for the request."""

    source: str
    request_id: int


class RequestPhase(Enum):
    """Waiting and running alternate under preemption; finished is final."""

    WAITING = "waiting"  #: holds no blocks
    RUNNING = "running"  #: holds blocks for all its tokens
    FINISHED = "finished"  #: holds no blocks


@dataclass(slots=True)
class Drafting:
    """Whether drafts pay for a request: one at a time until drafts prove right, and a pause after each failure.

    Each pause in a row is longer, so an answer whose drafts all fail takes only 0.3 to 2 % longer.
    """

    failures: int = 0  #: in a row
    trusted: bool = False  #: whether at least half of the last drafts were right
    paused_until: int = 0  #: no drafts until this many tokens are generated
    #: Index and guess of a token in flight, while the next step waits to learn whether the guess is right.
    expected: tuple[int, int] | None = None

    def learn(self, drafts: int, right: int, generated: int) -> None:
        """Record that the first `right` of `drafts` were kept, when `generated` tokens exist."""
        self.trusted = 2 * right >= drafts
        if self.trusted:
            self.failures = 0
            return
        self.failures += 1
        self.paused_until = generated + PAUSE_FACTOR**self.failures


@dataclass(slots=True, eq=False)
class RequestState:
    """A request from its admission to its last token. Only the scheduler and the engine change it."""

    key: RequestKey
    #: The prompt, then the generated tokens (generated here or on an earlier replica).
    tokens: "array[int]"
    prompt_tokens: int
    #: Parent of the first block.
    root: BlockHash
    #: One hash for each full block of `tokens`.
    hashes: list[BlockHash]
    sampling: SamplingParams
    #: `content_digest` of the leading blocks, as far as a tier asked for them.
    contents: list[bytes] = field(default_factory=list)
    #: Names the first block on the event stream.
    salt: str = ""
    priority: int = 0
    #: Whose share of the replica the request takes, and that tenant's weight (tenant_shares.py).
    tenant: bytes = b""
    weight: float = 1.0
    #: Order of arrival.
    arrival: int = 0
    #: Time of its arrival, on the engine's clock.
    arrived_at: float = 0.0
    #: Seconds from then to the start of its first step; None before it.
    waited_s: float | None = None
    #: Place within a priority (queue_order.py); kept across preemptions, so that preempted requests do not go last.
    queue_key: int = 0
    #: Prefixes of the prompt to keep once it is computed.
    pins: tuple[Pin, ...] = ()
    tokens_per_output: int = 1
    #: Sent by the router to fill the cache; excluded from the counts of queries, hits and generated tokens.
    warm_up: bool = False
    #: Its look-up is in the statistics, here or at an earlier replica; preempted and moved requests repeat it.
    counted: bool = False
    #: State of the request's constraint after the generated tokens; None without a constraint.
    guide: Guide | None = None
    #: Set if the request wants the vector of its prompt and no tokens.
    embedding: EmbeddingParams | None = None

    phase: RequestPhase = RequestPhase.WAITING
    blocks: list[Block] = field(default_factory=list)
    #: Ids of `blocks`, extended by `block_table`. Kept because every step's plan has them all, and they only grow.
    table: "array[int]" = field(default_factory=lambda: array("i"))
    #: Number of tokens whose KV is in `blocks`.
    computed: int = 0
    #: Rows launched and not yet landed; `computed` already counts them, since steps run in order.
    in_flight: int = 0
    #: Tokens that rows in flight will draw: they have a position but no value yet.
    pending: int = 0
    #: Number of leading blocks that are in the cache (taken from it or committed to it).
    committed_blocks: int = 0
    #: Prompt tokens taken from the cache at the first admission; None before it.
    cached_tokens: int | None = None
    #: The part of `cached_tokens` that was loaded from tiers, by medium.
    loaded_tokens: tuple[tuple[str, int], ...] = ()
    #: The part of `computed` that the latest admission took from the cache.
    cached_now: int = 0
    #: Tokens that were cached when the request started to wait; for the load report.
    expected_cached: int = 0
    #: Free blocks that admission would have taken when the request started to wait; for the load report.
    needed_blocks: int = 0
    #: Room for prompts, in blocks, when the request last did not fit; None if it was not tried or has run since.
    refused_at_room: int | None = None
    #: Whether an output was sent. The first one carries additional fields.
    output_sent: bool = False
    #: Tokens, and their logprobs if requested, that no output has carried yet.
    unsent: list[int] = field(default_factory=list)
    unsent_logprobs: list[PositionLogprobs] = field(default_factory=list)
    preemptions: int = 0
    #: Its tokens when it last gave way to another tenant's request; 0: never.
    gave_way_at: int = 0
    drafting: Drafting = field(default_factory=Drafting)
    #: Collected while the prompt is computed in chunks; None unless requested.
    prompt_logprobs: list[EncodedPosition] | None = None
    #: For an embedding: the sum of the pooled hidden states of the tokens computed so far.
    hidden_sum: npt.NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        if self.sampling.prompt_logprobs is not None:
            self.prompt_logprobs = [NO_LOGPROBS]

    @property
    def urgency(self) -> tuple[int, int, int]:
        """Sort key; the smallest runs first."""
        return self.priority, self.queue_key, self.arrival

    @property
    def loss(self) -> int:
        """Tokens to recompute if the request is preempted."""
        return self.computed - self.cached_now

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) + self.pending

    @property
    def generated(self) -> int:
        """Number of tokens generated so far, on all replicas."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def uncomputed(self) -> int:
        """Tokens whose KV is still to be computed; at least 1 until the request finishes."""
        return self.num_tokens - self.computed

    @property
    def decoding(self) -> bool:
        """Whether the prompt is computed and only the newest token is not."""
        return self.uncomputed == 1 and self.computed >= self.prompt_tokens

    @property
    def may_use_cache(self) -> bool:
        """False for requests that need results for every prompt position: the cache holds only KV."""
        return not self.scores_prompt and (self.embedding is None or self.embedding.pooling != "mean")

    @property
    def scores_prompt(self) -> bool:
        """Whether prompt logprobs are still to be sent."""
        return self.sampling.prompt_logprobs is not None and not self.output_sent

    def block_table(self) -> "array[int]":
        """Ids of all blocks, in order. Read-only for the caller."""
        table = self.table
        if len(table) < len(self.blocks):
            table.extend(block.block_id for block in self.blocks[len(table) :])
        return table

    def append(self, token_id: int, hasher: BlockHasher) -> None:
        """Add a generated token, and the hash of the block if it fills one."""
        self.tokens.append(token_id)
        self.pending = max(0, self.pending - 1)
        start = len(self.hashes) * hasher.block_size
        if len(self.tokens) - start < hasher.block_size:
            return
        parent = self.hashes[-1] if self.hashes else self.root
        self.hashes += hasher.chain(parent, self.token_bytes(start, start + hasher.block_size))

    def token_bytes(self, start: int, stop: int) -> bytes:
        return token_bytes(self.tokens[start:stop])

    def rewind(self) -> None:
        """Reset everything that describes the KV, after the blocks were released."""
        self.blocks = []
        self.table = array("i")
        self.computed = 0
        self.committed_blocks = 0
        self.hidden_sum = None

    def check(self, block_size: int) -> None:
        name = f"request {self.key}"
        assert 0 < self.prompt_tokens <= self.num_tokens, f"{name}: prompt {self.prompt_tokens} of {self.num_tokens}"
        full = len(self.tokens) // block_size
        assert len(self.hashes) == full, f"{name}: {len(self.hashes)} hashes for {full} full blocks"
        assert 0 <= self.pending <= self.in_flight, f"{name}: {self.pending} tokens pending of {self.in_flight} rows"
        table = list(self.table)
        assert table == [block.block_id for block in self.blocks[: len(table)]], f"{name}: table differs from blocks"
        if self.phase is not RequestPhase.RUNNING:
            assert not self.blocks, f"{name}: {self.phase.value} with {len(self.blocks)} blocks"
            return
        assert self.computed < self.num_tokens, f"{name}: computed {self.computed} of {self.num_tokens}"
        slots = len(self.blocks) * block_size
        assert self.computed <= slots, f"{name}: computed {self.computed} tokens in {slots} slots"
        whole = self.computed // block_size
        held = self.committed_blocks <= whole if self.in_flight else self.committed_blocks == whole
        assert held, f"{name}: committed {self.committed_blocks} of {whole} whole blocks, {self.in_flight} in flight"
        assert all(block.ref_count > 0 for block in self.blocks), f"{name}: holds a block without a reference"


def admit(source: str, request: Generate, vocab_size: int, block_size: int, guide: Guide | None = None) -> RequestState:
    """The state of a new request. Raises InvalidRequest, which names the field and its limits.

    `guide`: compiled from the request's constraint; None without one.
    """
    assert (guide is None) == (request.constraint is None), f"{request.constraint} with the guide {guide}"
    size = len(request.token_ids)
    _check(size > 0 and size % TOKEN_BYTES == 0, f"token_ids: {size} bytes are not a whole number of 4-byte ids")
    tokens = token_array(request.token_ids)
    _check(0 < request.prompt_tokens <= len(tokens), f"prompt_tokens: {request.prompt_tokens} of {len(tokens)} tokens")
    highest = max(tokens)
    _check(highest < vocab_size, f"token_ids: {highest} is not below the vocabulary size {vocab_size}")
    _check(len(request.root) == HASH_BYTES, f"root: {len(request.root)} bytes instead of {HASH_BYTES}")
    full, size = len(tokens) // block_size, len(request.block_hashes)
    _check(
        size == full * HASH_BYTES,
        f"block_hashes: {size} bytes for {len(tokens)} tokens, which are {full} full blocks of {block_size}",
    )
    _check_sampling(request.sampling, vocab_size)
    for pin in request.pins:
        count, prompt = pin.num_tokens, request.prompt_tokens
        _check(0 < count <= prompt, f"pins: {count} tokens of a prompt of {prompt} tokens")
        _check(isfinite(pin.ttl_s) and pin.ttl_s > 0, f"pins: ttl_s {pin.ttl_s} is not a positive number")
        _check(len(pin.tenant) == TENANT_BYTES, f"pins: tenant has {len(pin.tenant)} bytes instead of {TENANT_BYTES}")
    _check(len(request.tenant) <= TENANT_BYTES, f"tenant: {len(request.tenant)} bytes are more than {TENANT_BYTES}")
    _check(isfinite(request.weight) and request.weight > 0, f"weight: {request.weight} is not a positive number")
    generated, most = len(tokens) - request.prompt_tokens, request.sampling.max_tokens
    _check(generated < most, f"max_tokens: {generated} of {most} were already generated")
    _check(request.embedding is None or not (generated or guide), "embedding: such a request cannot generate tokens")
    return RequestState(
        key=RequestKey(source, request.request_id),
        tokens=tokens,
        prompt_tokens=request.prompt_tokens,
        root=BlockHash(request.root),
        salt=request.salt,
        hashes=split_hashes(request.block_hashes),
        sampling=request.sampling,
        priority=request.priority,
        tenant=request.tenant,
        weight=request.weight,
        pins=request.pins,
        tokens_per_output=request.tokens_per_output,
        warm_up=request.warm_up,
        counted=request.counted,
        guide=guide,
        embedding=request.embedding,
    )


def _check_sampling(params: SamplingParams, vocab_size: int) -> None:
    _check(params.max_tokens >= 1, f"max_tokens: {params.max_tokens} is below 1")
    most = params.max_tokens
    _check(0 <= params.min_tokens <= most, f"min_tokens: {params.min_tokens} is not between 0 and max_tokens, {most}")
    _check(0 <= params.seed < 2**64, f"seed: {params.seed} is not an unsigned 64-bit number")
    temperature = params.temperature
    _check(isfinite(temperature) and temperature >= 0, f"temperature: {temperature} is not a number of at least 0")
    _check(0 < params.top_p <= 1, f"top_p: {params.top_p} is not above 0 and at most 1")
    _check(params.top_k >= 0, f"top_k: {params.top_k} is below 0")
    _check(0 <= params.min_p <= 1, f"min_p: {params.min_p} is not between 0 and 1")
    _check(isfinite(params.presence_penalty), f"presence_penalty: not finite: {params.presence_penalty}")
    _check(isfinite(params.frequency_penalty), f"frequency_penalty: not finite: {params.frequency_penalty}")
    repetition = params.repetition_penalty
    _check(isfinite(repetition) and repetition > 0, f"repetition_penalty: {repetition} is not above 0")
    for name, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", params.logit_bias),
        ("allowed_token_ids", params.allowed_token_ids),
        ("logprob_token_ids", params.logprob_token_ids),
        *(("bad_words", word) for word in params.bad_words),
    ):
        wrong = [token for token in ids if not 0 <= token < vocab_size]
        _check(not wrong, f"{name}: {wrong[:3]} are not token ids below {vocab_size}")
    _check(all(params.bad_words), "bad_words: a word has no tokens")
    _check(all(map(isfinite, params.logit_bias.values())), "logit_bias: a bias is not finite")
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        _check(count is None or 0 <= count <= MAX_LOGPROBS, f"{name}: {count} is not between 0 and {MAX_LOGPROBS}")


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise InvalidRequest(message)
