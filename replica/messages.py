"""The words that router and replica exchange over ZeroMQ; of the replica, the router imports only this.

Types alone: no sockets, no torch. Encoding is msgpack; a frame that does not decode is counted and dropped by its
reader.

Router to replica, DEALER to ROUTER:    `Generate | Abort | ResetCache`      (`Request`)
Replica to router, one frame per step:  `TokenBatch | Refused`, and `CacheReset` when asked   (`Reply`)

Evolution: fields are only added, at the end and with a default; a changed meaning takes a new tag.
"""

from typing import Annotated, Literal

import msgspec

from ..events.wire.messages import EventEndpoints

FinishReason = Literal["stop", "length", "abort", "error"]
#: What `kvcache.hashing.token_bytes` can hold: a request that goes on elsewhere is sent its tokens in that form.
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are drawn. All fields are resolved: the router fills in defaults, the seed and the token limit.

    Sampling is counter-based: the token at position p depends on (seed, p) and the logits alone, so another replica
    can continue the request.
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
    min_tokens: int = 0  #: no stop id is sampled before so many tokens
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None  #: number of alternatives beside the sampled token's own logprob; None: no logprobs
    #: the same for the prompt's tokens (`echo`); such a request takes no cached blocks
    prompt_logprobs: int | None = None


class Pin(msgspec.Struct, frozen=True, array_like=True):
    """Keep the KV of the prompt's first tokens for a time, even while nobody uses it."""

    num_tokens: int  #: of the prompt; what fills whole blocks of them is kept
    ttl_s: float  #: from the moment when the prompt is computed
    tenant: bytes  #: 16 bytes: on whose budget; a digest, never a key


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag="generate", omit_defaults=True):
    """Run one sequence. Ids rise within a router's connection; a replica never sees one twice."""

    request_id: int
    token_ids: bytes  #: uint32 LE: the prompt, followed by what another replica has already generated
    prompt_tokens: int  #: how many of `token_ids` are the prompt
    root: bytes  #: 16 bytes: parent of the first block
    block_hashes: bytes  #: 16 bytes for each full block of `token_ids`
    sampling: SamplingParams
    priority: int = 0  #: lower runs first
    trace_id: str = ""  #: the client's x-request-id, for logs
    pins: tuple[Pin, ...] = ()
    #: after the first token, outputs may wait until they hold so many: for answers that nobody reads as they come
    tokens_per_output: int = 1
    warm_up: bool = False  #: asked by the router itself, to fill the cache: counts as nobody's query


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Stop these requests and free their blocks; unknown ids are ignored. No reply follows."""

    request_ids: list[int]


class ResetCache(msgspec.Struct, frozen=True, kw_only=True, tag="reset_cache"):
    """Forget every cached block, pinned ones too. `CacheReset` answers."""

    ask_id: int  #: the router's number for the question


Request = Generate | Abort | ResetCache


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithm of the model's probability (before temperature and filters) of one token."""

    token_id: int
    logprob: float


class PositionLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs at one position: the token that stands there, and the likeliest ones (best first)."""

    chosen: TokenLogprob
    top: list[TokenLogprob]


class TokenOutput(msgspec.Struct, frozen=True, array_like=True):
    """What one step gave one request."""

    request_id: int
    index: int  #: how many tokens were generated before these, counted over all replicas that worked on the request
    token_ids: list[TokenId]
    finish_reason: FinishReason | None = None
    cached_tokens: int | None = None  #: prompt tokens taken from the cache; on the first output only
    logprobs: list[PositionLogprobs] | None = None  #: one per token of `token_ids`
    prompt_logprobs: list[PositionLogprobs | None] | None = None  #: on the first output only; the first token has none
    stop_token_id: int | None = None  #: the last token is this stop id (it is part of `token_ids`)
    #: how far the prompt is pinned now; on the first output of a request with pins only (0: over the budget)
    pinned_tokens: int | None = None


class TokenBatch(msgspec.Struct, frozen=True, kw_only=True, tag="tokens"):
    """All outputs of one step for one router."""

    step: int
    outputs: list[TokenOutput]


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """A request that this replica cannot run. `retry` says whether another replica might."""

    request_id: int
    reason: Literal["prompt_too_long", "draining", "invalid", "internal"]
    message: str
    retry: bool = False


class CacheReset(msgspec.Struct, frozen=True, kw_only=True, tag="cache_reset"):
    """What became of a `ResetCache`."""

    ask_id: int
    done: bool  #: False: blocks were in use, and nothing has changed


Reply = TokenBatch | Refused | CacheReset


class Parity(msgspec.Struct, frozen=True, kw_only=True):
    """What router and replica must agree on; compared at join, field by field, and refused loudly when different."""

    tokenizer_digest: str  #: sha256 hex of the tokenizer's files
    template_digest: str  #: sha256 hex of the chat template
    block_size: int
    hash_algorithm: str
    model_root: bytes  #: root of the model's chains before the tenant's salt
    canary: bytes  #: last hash of a fixed prompt under `model_root` and the cluster's seed


class ModelLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the router must know of the model to judge a request."""

    name: str
    path: str  #: local folder of tokenizer and configuration, as the replica sees it
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]


class ReplicaDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A replica as it introduces itself once it can serve."""

    replica_id: str  #: stable name, such as r0; the same after a rebuild
    epoch: int  #: random per start: a rebuilt replica is a new one
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
