"""The messages between router and replica over ZeroMQ, and the meaning of the constraints in them (`grammar`).

The only part of the replica that the router imports, and it imports no other part. No sockets, no torch. Messages are
encoded in msgpack; the reader counts and drops a frame that does not decode.

Router to replica, DEALER to ROUTER:    `Generate | Abort`, and the questions `ResetCache` and `AskNextEvictions`
                                        (`Request`)
Replica to router, one frame per step:  `TokenBatch | Refused`, and the answers `CacheReset` and `NextEvictions`
                                        (`Reply`)

Evolution: fields are only added, at the end and with a default; a changed meaning takes a new tag.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec

from ...events.wire.messages import EventEndpoints

FinishReason = Literal["stop", "length", "abort", "error"]
RefusalReason = Literal["prompt_too_long", "draining", "invalid", "internal"]
#: The range of `kvcache.hashing.token_bytes`, which carries the tokens of a request that another replica continues.
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]

#: A request waits while another one computes at least this many tokens that both need; in the same step, they would be
#: computed and stored twice. On a CPU a step's fixed cost is about that of 128 tokens, so below 128 the wait costs more
#: than the computation. The router relies on the low value: it makes siblings find each other's blocks whether or not
#: they meet in one step. With 128, 51 of 220 predictions for `n` = 4 were too high.
WORTH_WAITING_TOKENS = 16


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are drawn. The router fills in defaults, the seed and the token limit.

    Sampling is counter-based: the token at position p depends only on (seed, p) and the logits, so another replica can
    continue a request.
    """

    max_tokens: int  #: at least 1
    seed: int = 0  #: 64 bits, unsigned
    temperature: float = 1.0  #: 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  #: 0 keeps all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0  #: no stop id is sampled before this many generated tokens
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None  #: number of alternatives besides the sampled token's own logprob; None: no logprobs
    #: the same for the prompt's tokens (`echo`); such a request uses no cached blocks
    prompt_logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] = ()  #: no other token is sampled; empty: all are allowed
    bad_words: tuple[tuple[int, ...], ...] = ()  #: token sequences that are never generated
    logprob_token_ids: tuple[int, ...] = ()  #: with `logprobs`: return these tokens instead of the likeliest


class Pin(msgspec.Struct, frozen=True, array_like=True):
    """Keep the KV of the prompt's first tokens for some time, even while no request uses it."""

    num_tokens: int  #: length of the prefix; only whole blocks are kept
    ttl_s: float  #: counted from the moment the prompt is computed
    tenant: bytes  #: 16 bytes: digest of the tenant whose pin budget is charged; never an API key


#: How hidden states become an embedding: that of the last token, or the mean of all. The mean uses no cached blocks,
#: because they hold no hidden states.
Pooling = Literal["last", "mean"]

ConstraintKind = Literal["json_schema", "json_object", "regex", "choice", "grammar", "structural_tag"]


class Constraint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the generated text must match. Routers check it; a replica compiles it before it admits the request.

    A grammar's state depends only on the generated tokens, so another replica can continue the request.
    """

    kind: ConstraintKind
    #: JSON for a schema, a list of choices or a structural tag; a regular expression; a grammar in Lark or GBNF; empty
    #: for a JSON object.
    source: str = ""
    #: The constraint applies after the text of these generated tokens, such as the end of a model's reasoning, or at
    #: once if empty. With `opener`, it is delayed only in answers that begin with its tokens, which are then allowed.
    after: tuple[int, ...] = ()
    opener: tuple[int, ...] = ()


class EmbeddingParams(msgspec.Struct, frozen=True, array_like=True):
    """Asks for the prompt's embedding: the model's last hidden states, pooled and scaled to length 1."""

    pooling: Pooling
    dimensions: int | None = None  #: number of leading components to keep before scaling; None: all


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag="generate", omit_defaults=True):
    """Run one sequence. Ids increase within a router's connection and are never reused."""

    request_id: int
    token_ids: bytes  #: uint32 LE: the prompt, then the tokens that another replica has already generated
    prompt_tokens: int  #: how many of `token_ids` are the prompt
    root: bytes  #: 16 bytes: parent of the first block
    salt: str = ""  #: what `root` was derived from, which names the first block on the event stream; empty: nothing
    block_hashes: bytes  #: 16 bytes for each full block of `token_ids`
    sampling: SamplingParams
    priority: int = 0  #: lower runs first
    trace_id: str = ""  #: the client's x-request-id, for logs
    traceparent: str = ""  #: W3C trace context, for external engines
    pins: tuple[Pin, ...] = ()
    #: after the first token, an output is held back until it has this many; for answers that are not streamed
    tokens_per_output: int = 1
    warm_up: bool = False  #: sent by the router itself to fill the cache; not counted as a query
    constraint: Constraint | None = None  #: applies from the first token after the prompt
    chat: bytes = b""  #: for external engines: the client's JSON chat, which they render and parse themselves
    #: If set, no tokens are generated: the only output carries the prompt's embedding.
    embedding: EmbeddingParams | None = None
    counted: bool = False  #: another replica has had it: not a query once more
    #: For external engines that get ids: the fields that the client set. What it did not set is the engine's to decide.
    given: dict[str, Any] = {}
    adapter: str = ""  #: for external engines: name of the adapter that answers; empty: the model itself
    #: Digest of the tenant whose share of the replica the request takes, and the share's weight; b"": not told.
    tenant: bytes = b""
    weight: float = 1.0


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Stop these requests and free their blocks. Unknown ids are ignored. No reply follows."""

    request_ids: list[int]


class ResetCache(msgspec.Struct, frozen=True, kw_only=True, tag="reset_cache"):
    """Drop every cached block, including pinned ones. The reply is `CacheReset`."""

    ask_id: int  #: the router's number for this question


class AskNextEvictions(msgspec.Struct, frozen=True, kw_only=True, tag="ask_next_evictions"):
    """Ask which blocks would be evicted next. Changes nothing. The reply is `NextEvictions`."""


Request = Generate | Abort | ResetCache | AskNextEvictions


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithm of the model's probability of one token, before temperature and filters."""

    token_id: int
    logprob: float


class PositionLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs at one position: the token there, and the alternatives (best first)."""

    chosen: TokenLogprob
    top: list[TokenLogprob]


#: `PositionLogprobs` or null in MessagePack. Prompts have thousands of positions: decoding all at once would block.
EncodedPosition = msgspec.Raw
#: A position without logprobs, as a prompt's first one is.
NO_LOGPROBS = EncodedPosition(b"\xc0")


def encoded_position(position: PositionLogprobs) -> EncodedPosition:
    return EncodedPosition(_ENCODER.encode(position))


def decoded_positions(encoded: Iterable[EncodedPosition]) -> list[PositionLogprobs | None]:
    """The logprobs of some positions; None for a position without any. Raises msgspec.MsgspecError."""
    return list(map(_POSITION.decode, encoded))


_ENCODER = msgspec.msgpack.Encoder()
_POSITION: "msgspec.msgpack.Decoder[PositionLogprobs | None]" = msgspec.msgpack.Decoder(PositionLogprobs | None)


class TokenOutput(msgspec.Struct, frozen=True, array_like=True):
    """One request's tokens that are ready after a step."""

    request_id: int
    index: int  #: tokens generated before these, on all replicas that worked on the request
    token_ids: list[TokenId]
    finish_reason: FinishReason | None = None
    cached_tokens: int | None = None  #: prompt tokens taken from the cache; on the first output only
    logprobs: list[PositionLogprobs] | None = None  #: one per token of `token_ids`
    prompt_logprobs: list[EncodedPosition] | None = None  #: on the first output only; null for the first token
    stop_token_id: int | None = None  #: the stop id that ended the answer; also the last of `token_ids`
    #: prompt tokens now pinned (0: over the budget, or not yet); on the first output of a request with pins
    pinned_tokens: int | None = None
    embedding: bytes | None = None  #: float32 LE, if the request asked for one; `token_ids` is then empty
    waited_s: float | None = None  #: from its arrival here to the start of its first step; on the first output only
    #: the part of `cached_tokens` that was loaded from tiers, by medium; on the first output only
    loaded_tokens: tuple[tuple[str, int], ...] = ()


class TokenBatch(msgspec.Struct, frozen=True, kw_only=True, tag="tokens"):
    """All outputs of one step for one router."""

    step: int
    outputs: list[TokenOutput]


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """A request that this replica cannot run. `retry` says whether another replica might."""

    request_id: int
    reason: RefusalReason
    message: str
    retry: bool = False


class FailedStep(msgspec.Struct, frozen=True, kw_only=True, tag="failed_step"):
    """A step that failed with these requests, for want of memory, say. The replica goes on without them.

    One of them may be the cause; the others have lost nothing that another replica cannot compute.
    """

    request_ids: list[int]
    message: str


class CacheReset(msgspec.Struct, frozen=True, kw_only=True, tag="cache_reset"):
    ask_id: int
    done: bool  #: False: blocks were in use, so nothing was dropped


class NextEvictions(msgspec.Struct, frozen=True, kw_only=True, tag="next_evictions"):
    """The cached blocks that would be evicted next, once no other block is free."""

    hashes: bytes  #: 16 bytes each, in order of eviction; at most `MAX_NEXT_EVICTIONS`


#: Maximum number of blocks in `NextEvictions`.
MAX_NEXT_EVICTIONS = 32

Reply = TokenBatch | Refused | FailedStep | CacheReset | NextEvictions


class Parity(msgspec.Struct, frozen=True, kw_only=True):
    """What router and replica must agree on. A replica that differs in any field when it joins is refused."""

    tokenizer_digest: str  #: sha256 hex of the tokenizer's files
    template_digest: str  #: sha256 hex of the chat template
    block_size: int
    hash_algorithm: str
    model_root: bytes  #: root of the model's block hashes before the tenant's salt
    canary: bytes  #: last hash of a fixed prompt under `model_root` and the cluster's seed


class ModelLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the router must know about the model to validate a request."""

    name: str
    path: str  #: local folder with configuration and tokenizer, on the replica's node
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    embedding_size: int = 0  #: components of an embedding; 0: the model's replicas compute none
    tokenizer: str = ""  #: folder with tokenizer and chat template; empty: `path`


class ReplicaDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that is ready to serve."""

    replica_id: str  #: stable name, such as r0; kept across rebuilds
    epoch: int  #: random at each start, so it differs after a rebuild
    request_endpoint: str
    event_endpoints: EventEndpoints
    parity: Parity
    model: ModelLimits
    num_blocks: int
    max_running_requests: int
    max_batched_tokens: int
    tensor_parallel_size: int
    prefill_tokens_per_s: float  #: measured at warm-up
    decode_step_s: float  #: measured at warm-up for a batch of one
    node: str = ""
    pids: tuple[int, ...] = ()  #: process ids of all ranks
    external: bool = False  #: an external engine; `request_endpoint` is the URL of its OpenAI-compatible server
    data_parallel_rank: int | None = None  #: which rank this is, of an external engine with several
