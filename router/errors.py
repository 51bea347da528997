"""What can go wrong on the routing side, and whose fault it is.

    RouterError
    ├── PromptTooLong        400  the caller's: prompt (plus one token) exceeds the model's context
    ├── InvalidGeneration    400  the caller's: a replica cannot run these parameters
    ├── QueueFull            429  more requests wait than the router holds; has `retry_after_s`
    ├── RequestFailed        500  a replica failed the request, or the token stream is inconsistent
    │   ├── ReplicaLost      502  the replica died and the request could not continue elsewhere
    │   └── DeadlineExceeded 504  the request's time is over
    ├── NoReplica            503  no replica serves and the request may not wait
    ├── RouterClosed         503  the router is shutting down
    └── ParityMismatch       500  a replica differs from the router in what both must agree on; never meets a client

`http_status`, `error_type`, `code` and `param` are what one place in the HTTP front turns into OpenAI's error shape.
"""
# ruff: noqa: N818 - these names say what happened to a request; clients read them in docs and logs without "Error".

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


class ParityMismatch(RouterError):
    """A replica that would hash or tokenize differently from the router: its cache would never be hit."""

    code = "parity_mismatch"

    def __init__(self, replica_id: str, field: str, ours: object, theirs: object) -> None:
        super().__init__(f"replica {replica_id} refused: its {field} is {theirs!r}, the router's is {ours!r}")
        self.replica_id = replica_id
        self.field = field
