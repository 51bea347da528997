"""What can go wrong on the routing side, and whose fault it is.

    RouterError
    ├── PromptTooLong        400  the caller's: prompt (plus one token) exceeds the model's context
    ├── InvalidGeneration    400  the caller's: a replica cannot run these parameters
    ├── InvalidRequest       400  the caller's: a field is unknown, of the wrong type or out of range; names the field
    │   ├── InvalidJson      400  the body is no JSON
    │   ├── ContextTooLong   400  prompt and wanted answer exceed the model's context
    │   ├── TemplateRefusal  400  the chat template does not take these messages
    │   └── PromptOverLimit  400  the prompt is longer than its tenant may send
    ├── CacheInUse           409  the caches cannot be reset while requests run
    ├── MissingKey           401  the caller's: no API key, and the server has a file of them
    ├── UnknownKey           401  the caller's: the API key is not in the file
    ├── NotAllowed           403  the caller's: it is not an admin
    ├── ModelNotFound        404  the caller's
    ├── UnknownPath          404  the caller's
    ├── WrongMethod          405  the caller's
    ├── MalformedRequest     400  the caller's: what came is not HTTP/1.1
    ├── RequestTooSlow       408  the caller's: the request did not arrive whole in time
    ├── BodyTooLarge         413  the caller's
    ├── HeadTooLarge         431  the caller's
    ├── QueueFull            429  more requests wait than the router holds; has `retry_after_s`
    ├── RateLimited          429  the tenant has used up a limit, which it names; has `retry_after_s`
    ├── RequestFailed        500  a replica failed the request, or the token stream is inconsistent
    │   ├── ReplicaLost      502  the replica died and the request could not continue elsewhere
    │   └── DeadlineExceeded 504  the request's time is over
    ├── NoReplica            503  no replica serves and the request may not wait
    ├── RouterClosed         503  the router is shutting down
    ├── Superseded           503  the model was replaced while the request ran; who has no token yet begins anew
    ├── TokenizerUnavailable 503  the model's folder has no tokenizer that can serve
    ├── KeysFileInvalid      500  the operator's: the file of API keys cannot be used; never meets a client
    ├── BackendsInvalid      500  the operator's: addresses of foreign replicas that do not fit; never meets a client
    ├── AddressInUse         500  the server's address cannot be bound; never meets a client
    ├── TlsUnusable          500  certificate or key cannot be read; never meets a client
    └── ParityMismatch       500  a replica differs from the router in what both must agree on; never meets a client

`http_status`, `error_type`, `code` and `param` are what one place in the HTTP front turns into OpenAI's error shape.
"""
# ruff: noqa: N818 - these names say what happened to a request; clients read them in docs and logs without "Error".

from collections.abc import Iterable
from typing import ClassVar


class RouterError(Exception):
    """Base of all; `message` is fit for a client."""

    http_status: ClassVar[int] = 500
    error_type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param  #: name of the offending field, where there is one
        self.retry_after_s = retry_after_s  #: when it may be worth another try


class PromptTooLong(RouterError):
    """The prompt leaves no room for a single generated token."""

    http_status = 400
    error_type = "invalid_request_error"
    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, max_model_len: int, *, param: str | None = None) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens; this model's context is {max_model_len} tokens, "
            "of which at least one is for the answer",
            param=param,
        )
        self.prompt_tokens = prompt_tokens
        self.max_model_len = max_model_len


class InvalidGeneration(RouterError):
    """A replica found the request impossible to run."""

    http_status = 400
    error_type = "invalid_request_error"
    code = "invalid_request"


class QueueFull(RouterError):
    """As many requests wait as the router holds; `retry_after_s` says when to come back."""

    http_status = 429
    error_type = "rate_limit_error"
    code = "queue_full"

    def __init__(self, waiting: int, *, retry_after_s: float = 1.0) -> None:
        super().__init__(
            f"{waiting} requests are waiting already; try again in {retry_after_s:.0f} s", retry_after_s=retry_after_s
        )
        self.waiting = waiting


class RateLimited(RouterError):
    """The tenant has used up one of its limits; `retry_after_s` says when it has room again."""

    http_status = 429
    error_type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, tenant: str, limit: str, value: int, retry_after_s: float) -> None:
        super().__init__(
            f"tenant {tenant!r} has reached its limit {limit} of {value}; try again in {retry_after_s:.1f} s",
            retry_after_s=retry_after_s,
        )
        self.limit = limit


class RequestFailed(RouterError):
    """A request that was accepted and did not end well."""

    code = "request_failed"


class ReplicaLost(RequestFailed):
    """The replica is gone and the request used up its retries."""

    http_status = 502
    code = "replica_lost"


class DeadlineExceeded(RequestFailed):
    """The request's time was over before it finished."""

    http_status = 504
    error_type = "timeout_error"
    code = "deadline_exceeded"


class NoReplica(RouterError):
    """Nobody can serve this now."""

    http_status = 503
    error_type = "service_unavailable"
    code = "no_replica"


class RouterClosed(RouterError):
    """The router is shutting down."""

    http_status = 503
    error_type = "service_unavailable"
    code = "shutting_down"


class Superseded(RouterError):
    """The replicas that a request was tokenized for are gone for good, and others have their place."""

    http_status = 503
    error_type = "service_unavailable"
    code = "model_replaced"

    def __init__(self) -> None:
        super().__init__("the model was replaced before the request was done: send it again", retry_after_s=1.0)


class ParityMismatch(RouterError):
    """A replica that would hash or tokenize differently from the router: its cache would never be hit."""

    code = "parity_mismatch"

    def __init__(self, replica_id: str, field: str, ours: object, theirs: object, *, remedy: str = "") -> None:
        difference = f"its {field} is {theirs!r}, the router's is {ours!r}"
        super().__init__(f"replica {replica_id} refused: {difference}{f'; {remedy}' if remedy else ''}")
        self.replica_id = replica_id
        self.field = field


class InvalidRequest(RouterError):
    """A field of the request is unknown, of the wrong type or out of range; `param` names it."""

    http_status = 400
    error_type = "invalid_request_error"
    code = "invalid_value"


class InvalidJson(InvalidRequest):
    """The body is no JSON."""

    code = "invalid_json"


class ContextTooLong(InvalidRequest):
    """Prompt and wanted answer exceed the model's context."""

    code = "context_length_exceeded"


class TemplateRefusal(InvalidRequest):
    """The chat template does not take these messages, or the model has none."""

    code = "invalid_messages"


class PromptOverLimit(InvalidRequest):
    """The prompt has more tokens than its tenant may send at once."""

    code = "prompt_over_limit"

    def __init__(self, prompt_tokens: int, most: int) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens; this API key's tenant may send {most} (max_prompt_tokens)"
        )


class CacheInUse(RouterError):
    """A reset would take running requests' blocks from under them; try again when they are over."""

    http_status = 409
    error_type = "conflict_error"
    code = "cache_in_use"


class MissingKey(RouterError):
    """This server serves known API keys only, and none was sent."""

    http_status = 401
    error_type = "authentication_error"
    code = "missing_api_key"


class UnknownKey(RouterError):
    """The API key that was sent is not one of those that this server knows."""

    http_status = 401
    error_type = "authentication_error"
    code = "invalid_api_key"


class NotAllowed(RouterError):
    """What was asked concerns everybody, and the tenant is not an admin."""

    http_status = 403
    error_type = "permission_error"
    code = "not_allowed"


class KeysFileInvalid(RouterError):
    """The file of API keys cannot be read or an entry of it is wrong; the message names file and entry."""

    code = "keys_file_invalid"


class BackendsInvalid(RouterError):
    """The addresses of foreign replicas cannot be used as they stand; the message names the one."""

    code = "backends_invalid"


class ModelNotFound(RouterError):
    """No such model is served here."""

    http_status = 404
    error_type = "invalid_request_error"
    code = "model_not_found"

    def __init__(self, model: str, served: Iterable[str]) -> None:
        there = ", ".join(map(repr, served)) or "no model yet"
        super().__init__(f"model {model!r} does not exist here; this server has {there}", param="model")


class UnknownPath(RouterError):
    """Nothing is served under this path."""

    http_status = 404
    error_type = "invalid_request_error"
    code = "not_found"


class WrongMethod(RouterError):
    """The path exists, but not for this HTTP method."""

    http_status = 405
    error_type = "invalid_request_error"
    code = "method_not_allowed"

    def __init__(self, method: str, path: str, allowed: str) -> None:
        super().__init__(f"{method} is not allowed for {path}; allowed: {allowed}")
        self.allowed = allowed  #: value of the Allow header


class BodyTooLarge(RouterError):
    """The HTTP body exceeds `max_body_bytes`."""

    http_status = 413
    error_type = "invalid_request_error"
    code = "body_too_large"


class MalformedRequest(RouterError):
    """What came is not HTTP/1.1."""

    http_status = 400
    error_type = "invalid_request_error"
    code = "malformed_http"


class RequestTooSlow(RouterError):
    """The request did not arrive whole within `read_timeout_s`."""

    http_status = 408
    error_type = "invalid_request_error"
    code = "request_too_slow"


class HeadTooLarge(RouterError):
    """The head of the HTTP request is larger than any honest one."""

    http_status = 431
    error_type = "invalid_request_error"
    code = "head_too_large"


class TokenizerUnavailable(RouterError):
    """The model's folder has no tokenizer that can serve."""

    http_status = 503
    error_type = "service_unavailable"
    code = "tokenizer_unavailable"


class AddressInUse(RouterError):
    """The server's address cannot be bound; never meets a client."""

    code = "address_in_use"

    def __init__(self, host: str, port: int, reason: str) -> None:
        super().__init__(f"cannot listen on {host}:{port}: {reason}; choose another with --port")
        self.host = host
        self.port = port


class TlsUnusable(RouterError):
    """The settings name a certificate or key that cannot be used; never meets a client."""

    code = "tls_unusable"
