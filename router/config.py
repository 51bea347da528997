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

    host: Annotated[str, "address of the HTTP server"] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), "port of the HTTP server; 0: any free one"] = 8000
    served_model_name: Annotated[str, "name in /v1/models; empty: the model's own"] = ""
    model_aliases: Annotated[str, "more names, separated by commas; with several models ALIAS=NAME"] = ""
    policy: Annotated[
        PolicyName, Meta(extra={"allowed": "the policies that `homing serve --help` lists"}), "how a replica is chosen"
    ] = "expected-ttft"
    backend: Annotated[
        str,
        Meta(extra={"repeatable": True}),
        "URLs of engines (vLLM, SGLang) to route to, separated by commas, or dns+http://NAME:PORT",
    ] = ""
    engines: Annotated[
        str,
        "YAML file that lists engines, or ray://HOST:PORT/LABEL",
    ] = ""
    events: Annotated[
        str,
        Meta(extra={"repeatable": True}),
        "addresses of the engines' events, in the order of backend; empty: discovered",
    ] = ""
    replay: Annotated[
        str, Meta(extra={"repeatable": True}), "addresses where the engines replay events, in the order of backend"
    ] = ""
    backend_model: Annotated[str, "the model's name at the engines; empty: discovered"] = ""
    backend_key_file: Annotated[str, "file with the API key for the engines"] = ""
    engine_chat: Annotated[
        Literal["auto", "engine", "tokens"],
        "who renders chats for engines: they, or homing (tokens); auto: homing where both agree",
    ] = "auto"
    backend_max_requests: Annotated[int, Meta(ge=1), "concurrent requests at each engine"] = 256
    api_keys_file: Annotated[
        str, "YAML file of accepted API keys; empty: any key is accepted, and each is a tenant"
    ] = ""
    api_key: Annotated[
        str,
        "one more accepted key; use HOMING_API_KEY, since others can see flags",
    ] = ""
    default_max_tokens: Annotated[
        int,
        Meta(ge=0),
        "output limit of requests without one; 0: 512, or the rest of the context in chats",
    ] = 0
    generation_config: Annotated[
        bool,
        "take sampling defaults from the model's generation_config.json",
    ] = True
    max_body_bytes: Annotated[int, Meta(ge=1024), "largest HTTP body"] = 8 * 1024 * 1024
    tool_call_parser: Annotated[
        ToolParserName,
        Meta(extra={"allowed": "auto, none, or a family in docs/api.md"}),
        "format of tool calls; auto: detected; none: calls stay text",
    ] = AUTO
    reasoning_parser: Annotated[
        ReasoningParserName,
        Meta(extra={"allowed": "auto, none, or a family in docs/api.md"}),
        "format of reasoning; auto: detected; none: it stays text",
    ] = AUTO
    embedding_pooling: Annotated[
        Pooling,
        "embed by the last token's state, or the mean over all",
    ] = "last"
    strict_fields: Annotated[bool, "refuse unknown fields instead of ignoring them"] = False
    unknown_calls_as_text: Annotated[
        bool,
        "leave calls of functions that were not offered as text",
    ] = False
    open_objects: Annotated[
        bool,
        "let guided objects have keys that their schema does not declare",
    ] = False
    drop_billing_line: Annotated[
        bool,
        "drop Claude Code's first system line, which differs in every request",
    ] = True
    response_store: Annotated[
        str,
        "SQLite file that stores responses of /v1/responses",
    ] = ""
    response_store_bytes: Annotated[int, Meta(ge=1024), "most bytes of stored responses"] = 1024**3
    response_store_age_s: Annotated[float, Meta(gt=0), "seconds to keep a stored response"] = 2_592_000.0
    request_history: Annotated[
        str,
        "SQLite file that keeps the history of requests over restarts",
    ] = ""
    request_history_bytes: Annotated[int, Meta(ge=0), "most bytes of the request history; 0: none is kept"] = (
        16 * 1024 * 1024
    )
    chat_template: Annotated[str, "file with another chat template"] = ""
    token_cache_bytes: Annotated[int, Meta(ge=0), "memory for token ids of chat messages; 0: none"] = 32 * 1024 * 1024
    max_choices: Annotated[int, Meta(ge=1, le=1024), "most answers to one HTTP request"] = 128
    max_answer_values: Annotated[
        int,
        Meta(ge=1024),
        "most logprobs, token ids and echoed tokens in one answer",
    ] = 512 * 1024
    max_waiting_requests: Annotated[int, Meta(ge=1), "requests held in the router; more get 429"] = 4096
    request_timeout_s: Annotated[float, Meta(gt=0), "seconds after which a request ends with an error"] = 600.0
    replica_silence_s: Annotated[
        float, Meta(gt=0), "seconds without a report after which a replica gets no requests"
    ] = 3.0
    retries: Annotated[
        int,
        Meta(ge=0, le=16),
        "times that a request may continue on another replica",
    ] = 3
    warm_up_share: Annotated[
        float,
        Meta(ge=0, le=1),
        "share of a new replica's cache that is filled before it serves",
    ] = 0.25
    pin_max_ttl_s: Annotated[float, Meta(gt=0), "longest ttl of cache_control"] = 3600.0
    access_log: Annotated[
        str,
        Meta(extra={"arguments": True}),
        "file for a line per request; -: the log of `homing logs requests`; empty: none",
    ] = "-"
    otlp_endpoint: Annotated[
        str,
        "URL of an OpenTelemetry collector; needs homing[otel]",
    ] = ""
    allowed_hosts: Annotated[
        str,
        "host names of the server, separated by commas; *: any; empty: any, but on the loopback only localhost",
    ] = ""
    cors_origins: Annotated[str, "origins of web pages that may call the server, separated by commas; *: all"] = ""
    tls_cert_file: Annotated[str, "PEM file with the certificate chain; empty: plain HTTP"] = ""
    tls_key_file: Annotated[str, "PEM file with the key; empty: in tls_cert_file"] = ""
    read_timeout_s: Annotated[float, Meta(gt=0), "seconds to receive an HTTP request"] = 60.0
