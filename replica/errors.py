"""The errors of a replica, by whose fault they are. No sockets, no torch."""

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
    """The caller's fault: a field of the request is out of range or contradicts another."""

    http_status = 400
    reason = "invalid"


class PromptTooLong(RequestError):
    """The caller's fault: the prompt leaves no room for an answer, in the model's context or in the KV pool."""

    http_status = 400
    reason = "prompt_too_long"


class Draining(RequestError):
    """This replica finishes its requests and takes no new ones; another one can take the request."""

    http_status = 503
    reason = "draining"
    retry = True


class NonFiniteLogits(RequestError):
    """The model's fault: it computed NaN or infinity for this request, from which no token can be drawn."""


class ConstraintFailed(RequestError):
    """The grammar of this request exceeded its limits in mid-answer, or allowed no token of the vocabulary."""


class StepFailed(ReplicaError):
    """A forward pass raised; its requests end with an error, the engine continues."""


class EngineBroken(ReplicaError):
    """Several steps in a row failed: the process must be rebuilt."""


class RankLost(ReplicaError):
    """Another rank no longer responds: all ranks of the replica must be rebuilt."""

    http_status = 503


class StartupError(ReplicaError):
    """The replica cannot serve with these settings on this machine."""


class ModelError(StartupError):
    """A model that cannot be loaded or run; raised while a replica starts, never for a request."""


class WeightsMissing(ModelError):
    """The folder has no safetensors, or lacks some of those that its index names."""


class WeightsUnlike(ModelError):
    """The weights lack tensors of the model, or have others that it does not use: they are not this model's."""


class WeightsTorn(ModelError):
    """A file of weights is incomplete, as after an interrupted download or on a full disk."""


class UnsupportedModel(ModelError):
    """The model needs an operation that the chosen provider does not have."""


class TensorParallelUnsupported(ModelError):
    """The model cannot be split over this number of ranks."""
