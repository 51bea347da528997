"""The errors of a replica, by whose fault they are. No sockets, no torch.

ReplicaError
├── RequestError            the request cannot run here; becomes a `Refused`
│   ├── InvalidRequest      the caller's fault: a field out of range, hashes that do not fit the tokens
│   ├── PromptTooLong       the caller's fault: longer than the model or the KV pool allows
│   ├── Draining            another replica can take the request
│   └── NonFiniteLogits     the model's fault: it computed NaN or infinity for this request
├── StepFailed              a forward pass raised; its requests end with an error, the engine continues
├── EngineBroken            several steps in a row failed: the process must be rebuilt
├── RankLost                another rank is gone: all ranks of the replica must be rebuilt
└── StartupError            the replica cannot serve with these settings on this machine
"""

# ruff: noqa: N818 - these names say what happened; an "Error" at the end would say no more.
from typing import ClassVar

from .messages import RefusalReason


class ReplicaError(Exception):
    """Base of all errors that a replica reports."""

    http_status: ClassVar[int] = 500


class RequestError(ReplicaError):
    """A request that this replica cannot run. `retry` says whether another replica might."""

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
    """This replica finishes its requests and takes no new ones."""

    http_status = 503
    reason = "draining"
    retry = True


class NonFiniteLogits(RequestError):
    """The model computed logits from which no token can be drawn."""


class StepFailed(ReplicaError):
    """A step raised; its requests were ended."""


class EngineBroken(ReplicaError):
    """Several steps in a row failed."""


class RankLost(ReplicaError):
    """A rank of this replica no longer responds; the other ranks cannot continue without it."""

    http_status = 503


class StartupError(ReplicaError):
    """The replica cannot serve with these settings on this machine."""
