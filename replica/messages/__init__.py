"""The messages between router and replica over ZeroMQ, and what a constraint in them means (`grammar`).

All that the router imports of the replica. No sockets, no torch, nothing else of the replica. Encoding is msgpack; the
reader counts and drops a frame that does not decode.

Router to replica, DEALER to ROUTER:    `Generate | Abort`, and the questions `ResetCache` and `AskNextEvictions`
                                        (`Request`)
Replica to router, one frame per step:  `TokenBatch | Refused`, and the answers `CacheReset` and `NextEvictions`
                                        (`Reply`)

Evolution: fields are only added, at the end and with a default; a changed meaning takes a new tag.
"""

from typing import Annotated, Literal

import msgspec

from ...events.wire.messages import EventEndpoints

FinishReason = Literal["stop", "length", "abort", "error"]
RefusalReason = Literal["prompt_too_long", "draining", "invalid", "internal"]
#: The range of `kvcache.hashing.token_bytes`, which carries the tokens of a request that another replica continues.
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]

#: A request waits while another one computes at least this many tokens that it needs, too: in one step they would be
#: computed and kept twice. A step's fixed cost is about 128 tokens on a CPU, so for fewer tokens two of a kind wait
#: longer than they would compute. But the router counts on it: only then do siblings find each other's blocks whether
#: or not they meet in one step. With 128 tokens 51 of 220 predictions for `n` = 4 were too high.
WORTH_WAITING_TOKENS = 16


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are drawn. The router has filled in defaults, the seed and the token limit.

    Sampling is counter-based: the token at position p depends only on (seed, p) and the logits, so another replica can
    continue the request.
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
    min_tokens: int = 0  #: no stop id is sampled before this many tokens
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None  #: number of alternatives beside the sampled token's own logprob; None: no logprobs
    #: the same for the prompt's tokens (`echo`); such a request takes no cached blocks
    prompt_logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] = ()  #: no other token is sampled; empty: all are allowed
    bad_words: tuple[tuple[int, ...], ...] = ()  #: sequences of tokens that are not generated
    logprob_token_ids: tuple[int, ...] = ()  #: with `logprobs`: the alternatives are these tokens, not the likeliest


class Pin(msgspec.Struct, frozen=True, array_like=True):
    """Keep the KV of the prompt's first tokens for a time, even while no request uses it."""

    num_tokens: int  #: of the prompt; only whole blocks are kept
    ttl_s: float  #: from the moment when the prompt is computed
    tenant: bytes  #: 16 bytes: whose budget pays; a digest, never a key


#: Which hidden states become an embedding: the one of the last token, or the mean of all. The mean takes no cached
#: blocks, because they hold no hidden states.
Pooling = Literal["last", "mean"]

ConstraintKind = Literal["json_schema", "json_object", "regex", "choice", "grammar", "structural_tag"]


class Constraint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the generated text must match. The router has checked it; a replica compiles it before it admits a request.

    A grammar's state follows from the generated tokens alone, so another replica can continue the request.
    """

    kind: ConstraintKind
    #: A JSON schema, a JSON list of choices and a structural tag as JSON; a regular expression; a grammar in Lark or
    #: GBNF; nothing for a JSON object.
    source: str = ""
    #: The constraint begins behind the text of these generated tokens, such as what ends a model's reasoning; empty: at
    #: once. With `opener`, it does so only in an answer that begins with these tokens, which are allowed then.
    after: tuple[int, ...] = ()
    opener: tuple[int, ...] = ()


class EmbeddingParams(msgspec.Struct, frozen=True, array_like=True):
    """A request for the vector of its prompt: the model's last hidden states, pooled and scaled to length 1."""

    pooling: Pooling
    dimensions: int | None = None  #: only the first numbers of the vector; None: all


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag="generate", omit_defaults=True):
    """Run one sequence. Ids rise within a router's connection and are never reused."""

    request_id: int
    token_ids: bytes  #: uint32 LE: the prompt, followed by what another replica has already generated
    prompt_tokens: int  #: how many of `token_ids` are the prompt
    root: bytes  #: 16 bytes: parent of the first block
    block_hashes: bytes  #: 16 bytes for each full block of `token_ids`
    sampling: SamplingParams
    priority: int = 0  #: lower runs first
    trace_id: str = ""  #: the client's x-request-id, for logs
    traceparent: str = ""  #: W3C trace context, for external engines
    pins: tuple[Pin, ...] = ()
    #: after the first token, outputs may wait until they hold this many: for answers that are not streamed
    tokens_per_output: int = 1
    warm_up: bool = False  #: sent by the router itself to fill the cache; not counted as a query
    constraint: Constraint | None = None  #: from the first token behind the prompt on
    chat: bytes = b""  #: for external engines: the request as a JSON chat, which they render and parse themselves
    #: No token is generated: the only output has the vector of the prompt.
    embedding: EmbeddingParams | None = None


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Stop these requests and free their blocks. Unknown ids are ignored. No reply follows."""

    request_ids: list[int]


class ResetCache(msgspec.Struct, frozen=True, kw_only=True, tag="reset_cache"):
    """Drop every cached block, pinned ones too. The reply is `CacheReset`."""

    ask_id: int  #: the router's number for this question


class AskNextEvictions(msgspec.Struct, frozen=True, kw_only=True, tag="ask_next_evictions"):
    """Which blocks would be evicted next? The reply is `NextEvictions`. Changes nothing."""


Request = Generate | Abort | ResetCache | AskNextEvictions


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithm of the model's probability (before temperature and filters) of one token."""

    token_id: int
    logprob: float


class PositionLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs at one position: of the token there, and of the likeliest ones (best first)."""

    chosen: TokenLogprob
    top: list[TokenLogprob]


class TokenOutput(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of one request from one step."""

    request_id: int
    index: int  #: tokens generated before these, over all replicas that worked on the request
    token_ids: list[TokenId]
    finish_reason: FinishReason | None = None
    cached_tokens: int | None = None  #: prompt tokens taken from the cache; on the first output only
    logprobs: list[PositionLogprobs] | None = None  #: one per token of `token_ids`
    prompt_logprobs: list[PositionLogprobs | None] | None = None  #: on the first output only; the first token has none
    stop_token_id: int | None = None  #: the last token is this stop id (it is part of `token_ids`)
    #: tokens of the prompt pinned now; only on the first output of a request with pins (0: over the budget)
    pinned_tokens: int | None = None
    embedding: bytes | None = None  #: float32 LE, if the request is for one; there are no tokens then


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


class CacheReset(msgspec.Struct, frozen=True, kw_only=True, tag="cache_reset"):
    ask_id: int
    done: bool  #: False: blocks were in use, and nothing was dropped


class NextEvictions(msgspec.Struct, frozen=True, kw_only=True, tag="next_evictions"):
    """The blocks that go next, once no free block is left."""

    hashes: bytes  #: 16 bytes each, the first to go first; at most `MAX_NEXT_EVICTIONS`


#: A replica names no more blocks than this.
MAX_NEXT_EVICTIONS = 32

Reply = TokenBatch | Refused | CacheReset | NextEvictions


class Parity(msgspec.Struct, frozen=True, kw_only=True):
    """What router and replica must agree on; compared field by field when a replica joins, and refused if different."""

    tokenizer_digest: str  #: sha256 hex of the tokenizer's files
    template_digest: str  #: sha256 hex of the chat template
    block_size: int
    hash_algorithm: str
    model_root: bytes  #: root of the model's block hashes before the tenant's salt
    canary: bytes  #: last hash of a fixed prompt under `model_root` and the cluster's seed


class ModelLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the router must know of the model to validate a request."""

    name: str
    path: str  #: local folder of configuration and tokenizer on the replica's node
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    embedding_size: int = 0  #: numbers of an embedding; 0: its replicas make none
    tokenizer: str = ""  #: folder of the tokenizer and the chat template; empty: `path`


class ReplicaDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that is ready to serve."""

    replica_id: str  #: stable name, such as r0; kept across rebuilds
    epoch: int  #: random per start: differs after a rebuild
    request_endpoint: str
    event_endpoints: EventEndpoints
    parity: Parity
    model: ModelLimits
    num_blocks: int
    max_running_requests: int
    max_batched_tokens: int
    tensor_parallel_size: int
    prefill_tokens_per_s: float  #: measured at warm-up
    decode_step_s: float  #: measured at warm-up, batch of one
    node: str = ""
    pids: tuple[int, ...] = ()  #: of all ranks
    foreign: bool = False  #: another engine: `request_endpoint` is the URL of its OpenAI-compatible server
    data_parallel_rank: int | None = None  #: of another engine that has several: this one of them
