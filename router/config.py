"""Settings of the router and its HTTP front. Joined with the other rooms' in `cluster/config.py`."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where requests come in and how they are steered."""

    host: Annotated[str, Meta(description="address that the HTTP server binds")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port of the HTTP server; 0: any free one")] = 8000
    served_model_name: Annotated[str, Meta(description="name in /v1/models; empty: the model's own")] = ""
    policy: Annotated[
        Literal["expected-ttft", "least-loaded", "round-robin", "power-of-two"],
        Meta(description="how a replica is chosen"),
    ] = "expected-ttft"
    backend: Annotated[
        str,
        Meta(
            description="URLs of OpenAI-compatible servers (vLLM, SGLang) that answer instead of replicas of our own, "
            "separated by commas; empty: none",
            extra={"repeatable": True},
        ),
    ] = ""
    events: Annotated[
        str,
        Meta(
            description="where those servers' KV events are to be had, such as tcp://10.0.0.1:5557, one for each in "
            "their order; empty: load alone decides",
            extra={"repeatable": True},
        ),
    ] = ""
    replay: Annotated[
        str,
        Meta(
            description="where those servers' past events are to be had, likewise; empty: what was lost or came "
            "before is not known",
            extra={"repeatable": True},
        ),
    ] = ""
    backend_model: Annotated[
        str, Meta(description="the model's name at those servers; empty: as it was given here, or its last part")
    ] = ""
    backend_key_file: Annotated[
        str, Meta(description="file with the API key that those servers want; empty: they want none")
    ] = ""
    backend_max_requests: Annotated[
        int, Meta(ge=1, description="requests that each of those servers runs at a time; more are held here")
    ] = 256
    api_keys_file: Annotated[
        str, Meta(description="YAML file of the API keys that may ask; empty: whoever asks is a tenant by its key")
    ] = ""
    default_max_tokens: Annotated[int, Meta(ge=1, description="output limit of a request that names none")] = 512
    max_body_bytes: Annotated[int, Meta(ge=1024, description="largest HTTP body")] = 16 * 1024 * 1024
    token_cache_bytes: Annotated[
        int, Meta(ge=0, description="memory for token ids of chat messages that came before; 0: keep none")
    ] = 32 * 1024 * 1024
    max_choices: Annotated[
        int, Meta(ge=1, le=1024, description="largest n (and prompts times n) of one HTTP request")
    ] = 128
    max_waiting_requests: Annotated[
        int, Meta(ge=1, description="requests held when no replica can take them; more get 429")
    ] = 4096
    request_timeout_s: Annotated[float, Meta(gt=0, description="a request that takes longer ends with an error")] = (
        600.0
    )
    replica_silence_s: Annotated[
        float, Meta(gt=0, description="a replica that reports nothing for so long gets no new requests")
    ] = 3.0
    reservation_timeout_s: Annotated[
        float, Meta(gt=0, description="blocks expected at dispatch are forgotten after so long")
    ] = 30.0
    retries: Annotated[int, Meta(ge=0, le=16, description="how often a request is continued on another replica")] = 3
    warm_up_share: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="share of a new replica's cache that is filled with the hottest prefixes before it takes "
            "requests; 0: none",
        ),
    ] = 0.25
    warm_up_bytes: Annotated[
        int, Meta(ge=0, description="memory for the last prompts, of which the hottest prefixes are taken; 0: none")
    ] = 8 * 1024 * 1024
    pin_ttl_s: Annotated[
        float, Meta(gt=0, description="how long cache_control keeps a prefix whose ttl is not given")
    ] = 300.0
    pin_max_ttl_s: Annotated[float, Meta(gt=0, description="longest ttl that cache_control may ask for")] = 3600.0
    access_log: Annotated[
        str, Meta(description="file for one line per request; -: standard error of the router process; empty: none")
    ] = "-"
    cors_origins: Annotated[
        str, Meta(description="origins, separated by commas, whose pages may call the server; *: all; empty: none")
    ] = ""
    tls_cert_file: Annotated[
        str, Meta(description="PEM file with the server's certificate and its chain; empty: plain HTTP")
    ] = ""
    tls_key_file: Annotated[
        str, Meta(description="PEM file with the certificate's key; empty: it is in tls_cert_file")
    ] = ""
    read_timeout_s: Annotated[float, Meta(gt=0, description="a request must arrive whole within so long")] = 60.0
    stall_timeout_s: Annotated[
        float, Meta(gt=0, description="a client that takes nothing of its answer for so long is cut off")
    ] = 30.0
    max_unsent_bytes: Annotated[
        int, Meta(ge=64 * 1024, description="a client that leaves more of its answer unread is cut off")
    ] = 1024 * 1024
