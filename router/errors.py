"""The router's errors. Their messages can be shown to clients; each class has the HTTP status for the response.

4xx: the caller's fault. 503: not possible now. 500: a failed request, a fault of this process or an operator's mistake.
`http/errors.py` turns `http_status`, `error_type`, `code` and `param` into OpenAI's error object.
"""
# ruff: noqa: N818 - these names say what happened to a request; clients read them in docs and logs without "Error".

from collections.abc import Iterable
from typing import Any, ClassVar, Self

#: OpenAI's `type` of an error, by HTTP status.
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    409: "conflict_error",
    429: "rate_limit_error",
    500: "server_error",
    502: "server_error",
    503: "service_unavailable",
    504: "timeout_error",
}


class RouterError(Exception):
    """Base class. A subclass inherits its parent's status and code unless it gives its own."""

    http_status: ClassVar[int] = 500
    error_type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None
    should_retry: ClassVar[bool] = True  #: whether clients may send a request again that ended with a 5xx
    limit: str | None = None  #: the setting, or the tenant's limit, that the request reached

    def __init_subclass__(
        cls, *, status: int | None = None, code: str | None = None, limit: str | None = None, **kwargs: Any
    ) -> None:
        super().__init_subclass__(**kwargs)
        if status is not None:
            cls.http_status, cls.error_type = status, _ERROR_TYPES.get(status, "invalid_request_error")
        if code is not None:
            cls.code = code
        if limit is not None:
            cls.limit = limit

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        """`param`: name of the offending field. `retry_after_s`: seconds after which a retry may succeed."""
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(RouterError, status=400, code="invalid_value"):
    """A field of the request is unknown, of the wrong type or out of range; `param` names it."""

    @classmethod
    def field(cls, param: str, reason: str) -> Self:
        """An error whose message starts with the name of the field."""
        return cls(f"field {param!r}: {reason}", param=param)


class InvalidJson(InvalidRequest, code="invalid_json"):
    """The body is not JSON."""


class PreviousResponseNotFound(InvalidRequest, code="previous_response_not_found"):
    """The response that a request wants to continue is not stored (any more)."""

    def __init__(self, response_id: str) -> None:
        super().__init__(f"previous response {response_id!r} not found", param="previous_response_id")


class ConversationTooLong(InvalidRequest, code="conversation_too_long"):
    """The conversation that a request wants to continue has too many stored responses, or too large ones."""

    def __init__(self, most: str) -> None:
        super().__init__(
            f"the conversation has more than {most}; send its items as input instead",
            param="previous_response_id",
        )


class ContextTooLong(InvalidRequest, code="context_length_exceeded", limit="max_model_len"):
    """Prompt and requested output together exceed the model's context."""


class TemplateRefusal(InvalidRequest, code="invalid_messages"):
    """The chat template rejects these messages, or the model has no template."""


class TemplateBroken(RouterError, status=500, code="template_broken"):
    """The model's chat template does not parse, or fails on any chat of this kind: the operator's fault."""

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"the chat template {file} cannot be used: {reason}; correct it, or set --chat-template")


class ThreadUnsupported(InvalidRequest, code="thread_unsupported_request"):
    """A Messages request relies on messages stored by the server. Clients then resend the whole conversation."""

    def __init__(self) -> None:
        super().__init__("thread: this server stores no messages; send the whole conversation", param="thread")


class PromptOverLimit(InvalidRequest, code="prompt_over_limit", limit="max_prompt_tokens"):
    """The prompt exceeds its tenant's limit."""

    def __init__(self, prompt_tokens: int, most: int, *, at_least: bool = False) -> None:
        super().__init__(
            f"the prompt has {'at least ' * at_least}{prompt_tokens} tokens; "
            f"this tenant's limit max_prompt_tokens is {most} tokens"
        )


class PromptTooLong(RouterError, status=400, code="context_length_exceeded", limit="max_model_len"):
    """The prompt leaves no room for a single generated token."""

    def __init__(
        self, prompt_tokens: int, max_model_len: int, *, param: str | None = None, at_least: bool = False
    ) -> None:
        """`at_least`: `prompt_tokens` is a lower bound."""
        super().__init__(
            f"the prompt has {'at least ' * at_least}{prompt_tokens} tokens; "
            f"the model's context is {max_model_len} tokens and must also hold at least one generated token",
            param=param,
        )


class InvalidGeneration(RouterError, status=400, code="invalid_request"):
    """A replica cannot run a request with these parameters."""


class MalformedRequest(RouterError, status=400, code="malformed_http"):
    """The bytes received are not HTTP/1.1."""


class UnknownTransferEncoding(RouterError, status=501, code="unknown_transfer_encoding"):
    """The body is encoded for its transfer in another way than in chunks."""

    def __init__(self, given: str) -> None:
        super().__init__(f"transfer-encoding {given[:100]!r}: only 'chunked' is supported")


class MissingKey(RouterError, status=401, code="missing_api_key"):
    """The server requires an API key, and the request has none."""


class UnknownKey(RouterError, status=401, code="invalid_api_key"):
    """The API key is not among the accepted ones."""

    def __init__(self, key_sha256: str) -> None:
        super().__init__("this API key is unknown")
        self.key_sha256 = key_sha256  #: hex digest, as in the keys file


class NotAllowed(RouterError, status=403, code="not_allowed"):
    """The operation affects all tenants, and the caller is not an admin."""


class ForeignHost(RouterError, status=403, code="foreign_host"):
    """The request calls the server by a name that it does not have, as pages do that reach it by DNS rebinding."""

    def __init__(self, host: str) -> None:
        super().__init__(f"this server is not called {host[:100]!r}; list its names in the setting allowed_hosts")


class ForeignOrigin(RouterError, status=403, code="foreign_origin"):
    """A web page of another server asks for what changes this one."""

    def __init__(self, origin: str) -> None:
        super().__init__(f"pages of {origin[:100]!r} may not do this; the setting cors_origins can name them")


class ModelNotFound(RouterError, status=404, code="model_not_found"):
    """No model of this name is served."""

    def __init__(self, model: str, served: Iterable[str]) -> None:
        names = ", ".join(map(repr, served)) or "none yet"
        super().__init__(f"model {model[:200]!r} does not exist; served models: {names}", param="model")


class ResponseNotFound(RouterError, status=404, code="response_not_found"):
    """No response with this id is stored for the tenant."""

    def __init__(self, response_id: str) -> None:
        super().__init__(f"Response with id {response_id!r} not found.")


class RequestNotFound(RouterError, status=404, code="request_not_found"):
    """No request with this id is in progress or in the history."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"there is no request {request_id[:200]!r}, in progress or in the history of this router")


class RequestOver(RouterError, status=404, code="request_not_found"):
    """The request that should be ended has ended already."""

    def __init__(self, request_id: str, state: str) -> None:
        super().__init__(f"request {request_id[:200]!r} is not in progress: its state is {state!r}")


class UnknownPath(RouterError, status=404, code="not_found"):
    """No endpoint has this path."""


class EngineNotFound(RouterError, status=404, code="engine_not_found"):
    """No engine with this URL is listed."""

    def __init__(self, url: str) -> None:
        super().__init__(f"no engine {url} is listed; GET /engines lists them", param="url")


class WrongMethod(RouterError, status=405, code="method_not_allowed"):
    """The endpoint does not support this HTTP method."""

    def __init__(self, method: str, path: str, allowed: str) -> None:
        super().__init__(f"{method} is not allowed for {path}; allowed: {allowed}")
        self.allowed = allowed  #: value of the Allow header


class RequestTooSlow(RouterError, status=408, code="request_too_slow", limit="read_timeout_s"):
    """The request did not arrive completely within `read_timeout_s`."""


class EndedByOperator(RouterError, status=410, code="ended_by_operator"):
    """An admin has ended the request. Clients do not repeat it, as they do after a 5xx."""

    def __init__(self) -> None:
        super().__init__("an operator of this server has ended the request")


class RequestAborted(RouterError, status=410, code="request_aborted"):
    """The caller has aborted the request."""

    def __init__(self) -> None:
        super().__init__("the caller has aborted the request")


class CacheInUse(RouterError, status=409, code="cache_in_use"):
    """A reset would free blocks that running requests use."""


class BodyTooLarge(RouterError, status=413, code="body_too_large", limit="max_body_bytes"):
    """The HTTP body exceeds `max_body_bytes`."""


class NotJson(RouterError, status=415, code="unsupported_media_type"):
    """The body is not declared as JSON, so a web page could have sent it without a CORS preflight request."""


class HeadTooLarge(RouterError, status=431, code="head_too_large"):
    """The HTTP head exceeds 64 KiB."""


class QueueFull(RouterError, status=429, code="queue_full", limit="max_waiting_requests"):
    """The router already holds `max_waiting_requests` requests."""

    def __init__(self, waiting: int) -> None:
        super().__init__(f"{waiting} requests are already waiting; try again in 1 s", retry_after_s=1.0)


class TooManyBodies(RouterError, status=429, code="too_many_bodies"):
    """Large bodies together exceed the server's memory limit; rejects the largest of the client with the most."""

    def __init__(self, most: int) -> None:
        super().__init__(f"{most} bytes of large bodies are being received; try again in 1 s", retry_after_s=1.0)


class TooManyViewers(RouterError, status=429, code="too_many_viewers"):
    """The live page has reached its maximum number of viewers."""

    def __init__(self, most: int) -> None:
        super().__init__(f"{most} viewers are connected already; try again in 10 s", retry_after_s=10.0)


class RateLimited(RouterError, status=429, code="rate_limit_exceeded"):
    """The tenant has reached one of its limits."""

    def __init__(self, tenant: str, limit: str, value: int, retry_after_s: float) -> None:
        super().__init__(
            f"tenant {tenant!r} has reached its limit {limit} of {value}; try again in {retry_after_s:.1f} s",
            retry_after_s=retry_after_s,
        )
        self.limit = limit


class RequestFailed(RouterError, code="request_failed"):
    """An accepted request failed, either at a replica or because its token stream was inconsistent."""


class ReplicaLost(RequestFailed, status=502, code="replica_lost"):
    """The replica was lost, and no retry is left."""


class ReplicasDied(RequestFailed, code="replicas_died"):
    """Two replicas died, or failed a step, with the request, so it may be the cause and is not sent to a third.

    Official clients would send it again after a 5xx; a header of the response tells them not to.
    """

    should_retry = False

    def __init__(self, replicas: Iterable[str]) -> None:
        super().__init__(
            f"replicas {' and '.join(dict.fromkeys(replicas))} died, or failed a step, while they ran this request; "
            "it may be the cause and is not sent to another one"
        )


class DeadlineExceeded(RequestFailed, status=504, code="deadline_exceeded", limit="request_timeout_s"):
    """The request did not finish in time."""


class NoReplica(RouterError, status=503, code="no_replica"):
    """No replica can serve the request now, and it cannot be held."""


class RouterSilent(RouterError, status=503, code="router_silent"):
    """Another router process of the cluster, which may have the request, did not answer in time."""

    def __init__(self, seats: Iterable[int]) -> None:
        numbers = ", ".join(map(str, seats))
        super().__init__(f"router {numbers} did not answer; the request may be there", retry_after_s=1.0)


class RouterClosed(RouterError, status=503, code="shutting_down"):
    """The router is shutting down."""


class Superseded(RouterError, status=503, code="model_replaced"):
    """Newer replicas have permanently replaced those that the request was tokenized for.

    The HTTP server restarts a request that has no token yet; otherwise the client gets this error.
    """

    def __init__(self) -> None:
        super().__init__("the model was replaced before the request finished; send it again", retry_after_s=1.0)


class TokenizerUnavailable(RouterError, status=503, code="tokenizer_unavailable"):
    """The model's folder has no usable tokenizer."""


class KeysFileInvalid(RouterError, code="keys_file_invalid"):
    """The keys file cannot be read or has an invalid entry; the message names the file and the entry."""


class BackendsInvalid(RouterError, status=400, code="backends_invalid"):
    """An address of an external engine is unusable; the message names it."""


class AddressInUse(RouterError, code="address_in_use"):
    """The server cannot bind its address."""

    def __init__(self, host: str, port: int, reason: str) -> None:
        super().__init__(f"cannot listen on {host}:{port}: {reason}; choose another with --port")


class TlsUnusable(RouterError, code="tls_unusable"):
    """The TLS certificate or key in the settings cannot be used."""


class TracingUnavailable(RouterError, code="tracing_unavailable"):
    """The settings require OpenTelemetry, which is not installed."""

    def __init__(self, cause: ImportError) -> None:
        super().__init__(f"otlp_endpoint needs OpenTelemetry: pip install 'homing[otel]' ({cause})")


class ParityMismatch(RouterError, code="parity_mismatch"):
    """A replica hashes or tokenizes differently from the router, so its cache would never be hit."""

    def __init__(self, replica_id: str, field: str, ours: object, theirs: object, *, remedy: str = "") -> None:
        difference = f"its {field} is {theirs!r}, the router's is {ours!r}"
        super().__init__(f"replica {replica_id} refused: {difference}{f'; {remedy}' if remedy else ''}")
        self.replica_id = replica_id
        self.field = field
