"""What can go wrong in a replica, and whose fault it is. Knows no sockets and no torch.

ReplicaError
├── RequestError            the request cannot run here; becomes a `Refused`
│   ├── InvalidRequest      the caller's fault: a field out of range, hashes that do not fit the tokens
│   ├── PromptTooLong       the caller's fault: longer than the model or the KV pool allows
│   ├── Draining            nobody's fault: another replica can take it
│   └── OddLogits           the model's fault: it answered this request with NaN or infinity
├── StepFailed              a forward pass raised; its requests end with an error, the engine goes on
├── EngineBroken            steps fail again and again: the process must be rebuilt
├── RankLost                another rank is gone: the gang must be rebuilt
└── StartupError            the replica cannot serve with these settings
"""

# ruff: noqa: N818 - these names say what happened; an "Error" at the end would say no more.
from typing import ClassVar, Literal

RefusalReason = Literal["prompt_too_long", "draining", "invalid", "internal"]


class ReplicaError(Exception):
    """Anything that a replica reports by name."""

    http_status: ClassVar[int] = 500


class RequestError(ReplicaError):
    """A request that this replica cannot run."""

    reason: ClassVar[RefusalReason] = "internal"
    retry: ClassVar[bool] = False


class InvalidRequest(RequestError):
    """A field of the request is out of range or contradicts another."""

    http_status = 400
    reason = "invalid"


class PromptTooLong(RequestError):
    """The prompt leaves no room for an answer, in the model's context or in the KV pool."""

    http_status = 400
    reason = "prompt_too_long"


class Draining(RequestError):
    """This replica finishes what it has and takes nothing new."""

    http_status = 503
    reason = "draining"
    retry = True


class OddLogits(RequestError):
    """The model gave a request logits from which no token can be drawn."""


class StepFailed(ReplicaError):
    """A step raised; its requests were ended."""


class EngineBroken(ReplicaError):
    """Several steps in a row failed."""


class RankLost(ReplicaError):
    """A rank of this replica no longer answers; the others cannot go on without it."""

    http_status = 503


class StartupError(ReplicaError):
    """The replica cannot serve with these settings on this machine."""
