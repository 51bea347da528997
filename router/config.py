"""Settings of the router and its HTTP server; `cluster/config.py` combines them with those of other packages."""

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from ..replica.messages import Pooling
from .routing.policy.registry import policy_names
from .text.parsers.families import AUTO, NONE, REASONING_FAMILIES, TOOL_FAMILIES

if TYPE_CHECKING:
    PolicyName = str
    ToolParserName = str
    ReasoningParserName = str
else:  # the values are known only at run time: each policy is a file in routing/policy
    PolicyName = Literal[policy_names()]
    ToolParserName, ReasoningParserName = (
        Literal[(AUTO, NONE, *(name for each in families for name in (each.name, *each.aliases)))]
        for families in (TOOL_FAMILIES, REASONING_FAMILIES)
    )


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the router accepts, routes and limits requests."""

    host: Annotated[str, "address that the HTTP server binds"] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), "port of the HTTP server; 0: any free one"] = 8000
    served_model_name: Annotated[str, "name in /v1/models; empty: the model's own"] = ""
    model_aliases: Annotated[
        str, "more names for the model, separated by commas; with several models, as ALIAS=NAME; empty: none"
    ] = ""
    policy: Annotated[
        PolicyName, Meta(extra={"allowed": "the policies that `homing serve --help` lists"}), "how a replica is chosen"
    ] = "expected-ttft"
    backend: Annotated[
        str,
        Meta(extra={"repeatable": True}),
        "URLs of OpenAI-compatible servers (vLLM, SGLang) to use instead of homing's own replicas, "
        "separated by commas; dns+http://NAME:PORT: all addresses of a name, such as a headless Kubernetes "
        "Service; empty: none",
    ] = ""
    engines: Annotated[
        str,
        "YAML file with more such servers, reread when it changes: a list of URLs, or of maps with "
        "url, events and replay; ray://HOST:PORT/LABEL: those in Ray actors with a label; empty: none",
    ] = ""
    events: Annotated[
        str,
        Meta(extra={"repeatable": True}),
        "addresses of those servers' KV events, such as tcp://10.0.0.1:5557, one per server in the "
        "same order; empty: discovered from the server or at the usual ports",
    ] = ""
    replay: Annotated[
        str, Meta(extra={"repeatable": True}), "addresses where those servers replay past events; same form as `events`"
    ] = ""
    backend_model: Annotated[
        str, "the model's name at those servers; empty: MODEL, its last part, or served_model_name"
    ] = ""
    backend_key_file: Annotated[str, "file with the API key for those servers; empty: they need none"] = ""
    engine_chat: Annotated[
        Literal["auto", "engine", "tokens"],
        "who renders and parses chats of external engines: the engine, or homing, which sends token ids; "
        "auto: homing, but with `homing route` only plain chats that the engine renders alike",
    ] = "auto"
    backend_max_requests: Annotated[
        int, Meta(ge=1), "maximum concurrent requests at each of those servers; more wait in the router"
    ] = 256
    api_keys_file: Annotated[
        str, "YAML file of the accepted API keys; empty: any key is accepted, and each is a tenant"
    ] = ""
    api_key: Annotated[
        str,
        "the only accepted API key besides those in api_keys_file; set it as HOMING_API_KEY, because "
        "other users of the machine can see flags; empty: none",
    ] = ""
    default_max_tokens: Annotated[
        int,
        Meta(ge=0),
        "output limit of requests without one; 0: 512 for completions, the rest of the context for chats",
    ] = 0
    generation_config: Annotated[
        bool,
        "use the model's generation_config.json for sampling parameters that a request does not set; engines "
        "behind `homing route` decide that themselves",
    ] = True
    max_body_bytes: Annotated[int, Meta(ge=1024), "largest HTTP body"] = 8 * 1024 * 1024
    tool_call_parser: Annotated[
        ToolParserName,
        Meta(extra={"allowed": "auto, none, or a family in docs/api.md"}),
        "format of the model's tool calls; auto: detected from its chat template or type; none: calls stay text",
    ] = AUTO
    reasoning_parser: Annotated[
        ReasoningParserName,
        Meta(extra={"allowed": "auto, none, or a family in docs/api.md"}),
        "format of the model's reasoning; auto: as for tool calls; none: reasoning stays in the text",
    ] = AUTO
    embedding_pooling: Annotated[
        Pooling,
        "default pooling of embeddings: the state of the last token, or the mean over all tokens",
    ] = "last"
    strict_fields: Annotated[
        bool, "refuse requests with unknown fields; otherwise they are ignored and listed in a header"
    ] = False
    unknown_calls_as_text: Annotated[
        bool,
        "a call of a function that is not among the request's tools stays text instead of being returned as a call",
    ] = False
    open_objects: Annotated[
        bool,
        "in guided calls and strict formats, objects may have keys that their schemas do not declare, "
        "as JSON Schema allows",
    ] = False
    drop_billing_line: Annotated[
        bool,
        "remove the first line of Claude Code's system prompts, which differs in every request, so "
        "that the rest can be cached",
    ] = True
    response_store: Annotated[
        str,
        "SQLite file that stores responses of /v1/responses for previous_response_id, shared by the "
        "router processes of one machine; empty: nothing is stored",
    ] = ""
    response_store_count: Annotated[int, Meta(ge=1), "maximum number of stored responses"] = 100_000
    response_store_bytes: Annotated[int, Meta(ge=1024), "maximum bytes of stored responses"] = 1024**3
    response_store_age_s: Annotated[float, Meta(gt=0), "seconds to keep a stored response"] = 2_592_000.0
    request_history: Annotated[
        str,
        "SQLite file that keeps the history of requests when the router restarts, shared by the router "
        "processes of one machine; empty: in memory",
    ] = ""
    request_history_bytes: Annotated[
        int, Meta(ge=0), "maximum bytes of that history, in memory or in the file; 0: none is kept"
    ] = 16 * 1024 * 1024
    chat_template: Annotated[
        str, "file with a chat template to use instead of the model's own; empty: the model's own"
    ] = ""
    token_cache_bytes: Annotated[
        int, Meta(ge=0), "memory for cached token ids of chat messages, for tokenizers without fastokens; 0: no cache"
    ] = 32 * 1024 * 1024
    max_choices: Annotated[
        int, Meta(ge=1, le=1024), "maximum n (and maximum of prompts times n) in one HTTP request"
    ] = 128
    max_answer_values: Annotated[
        int,
        Meta(ge=1024),
        "maximum number of logprobs, token ids and echoed tokens in one answer; of a stream, only those of its prompts",
    ] = 512 * 1024
    max_waiting_requests: Annotated[
        int, Meta(ge=1), "maximum requests held while no replica can accept them; more get 429"
    ] = 4096
    request_timeout_s: Annotated[float, Meta(gt=0), "a request that takes longer ends with an error"] = 600.0
    replica_silence_s: Annotated[
        float, Meta(gt=0), "a replica that has not reported for this long gets no new requests"
    ] = 3.0
    retries: Annotated[
        int,
        Meta(ge=0, le=16),
        "maximum number of continuations of a request on other replicas; "
        "those for which another request is to blame do not count",
    ] = 3
    warm_up_share: Annotated[
        float,
        Meta(ge=0, le=1),
        "share of a new replica's cache that is filled with the hottest prefixes before it gets requests; 0: none",
    ] = 0.25
    warm_up_bytes: Annotated[
        int, Meta(ge=0), "memory for recent prompts, from which the hottest prefixes are chosen; 0: none"
    ] = 8 * 1024 * 1024
    pin_ttl_s: Annotated[float, Meta(gt=0), "how long cache_control keeps a prefix if it has no ttl"] = 300.0
    pin_max_ttl_s: Annotated[float, Meta(gt=0), "maximum ttl of cache_control"] = 3600.0
    access_log: Annotated[
        str,
        Meta(extra={"arguments": True}),
        "file for one line per request; -: the log that `homing logs requests` prints (standard error "
        "in a joined Ray cluster or with --backend); empty: none",
    ] = "-"
    otlp_endpoint: Annotated[
        str,
        "URL for traces of an OpenTelemetry collector (http://127.0.0.1:4318/v1/traces), which gets "
        "one span per request; needs homing[otel]; empty: none",
    ] = ""
    allowed_hosts: Annotated[
        str,
        "names (header Host) of the server besides those of the loopback, separated by commas; *: any; empty: "
        "any, unless `host` is on the loopback, against DNS rebinding",
    ] = ""
    cors_origins: Annotated[
        str, "origins of web pages that may call the server, separated by commas; *: all; empty: none"
    ] = ""
    tls_cert_file: Annotated[str, "PEM file with the server's certificate chain; empty: plain HTTP"] = ""
    tls_key_file: Annotated[str, "PEM file with the certificate's key; empty: the key is in tls_cert_file"] = ""
    read_timeout_s: Annotated[float, Meta(gt=0), "time limit for receiving a complete HTTP request"] = 60.0
    stall_timeout_s: Annotated[
        float, Meta(gt=0), "time after which a client that reads nothing of its response is disconnected"
    ] = 30.0
    max_unsent_bytes: Annotated[
        int, Meta(ge=64 * 1024), "unread bytes of a response beyond which the client is disconnected"
    ] = 1024 * 1024
