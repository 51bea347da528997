"""A replica's errors, grouped by whose fault they are. No sockets, no torch."""

# ruff: noqa: N818 - these names say what happened; an "Error" suffix would add nothing.
from typing import ClassVar

from .messages import RefusalReason


class ReplicaError(Exception):
    """Base of all errors that a replica reports."""


class RequestError(ReplicaError):
    """A request that this replica cannot run. `retry` says whether another replica might."""

    reason: ClassVar[RefusalReason] = "internal"
    retry: ClassVar[bool] = False


class InvalidRequest(RequestError):
    """The caller's fault: a field of the request is out of range or contradicts another."""

    reason = "invalid"


class PromptTooLong(RequestError):
    """The caller's fault: the prompt leaves no room for an answer, in the model's context or in the KV pool."""

    reason = "prompt_too_long"


class Draining(RequestError):
    """This replica is finishing its requests and accepts no new ones; another replica can take the request."""

    reason = "draining"
    retry = True


class NonFiniteLogits(RequestError):
    """The model's fault: it computed NaN or infinity for this request, so no token can be sampled."""


class ConstraintFailed(RequestError):
    """The caller's fault: the grammar exceeded its limits mid-answer, or allowed no token of the vocabulary."""

    reason = "invalid"


class StepFailed(ReplicaError):
    """A forward pass raised an error: its requests go back to their routers, the engine continues."""


class EngineBroken(ReplicaError):
    """The device failed, or several steps in a row did: the replica must be rebuilt."""


class RankLost(ReplicaError):
    """Another rank no longer responds: all ranks of the replica must be rebuilt."""


class StartupError(ReplicaError):
    """The replica cannot serve with these settings on this machine."""


class DiskTierUnusable(StartupError):
    """The settings of the disk tier, or the files in its folder, do not allow to use it."""


class ModelError(StartupError):
    """The model cannot be loaded or run; raised while a replica starts, never for a request."""


class WeightsMissing(ModelError):
    """The model folder has no safetensors files, or lacks some that its index lists."""


class WeightsMismatch(ModelError):
    """The weights belong to another model: tensors are missing, or there are some that the model does not use."""


class WeightsDamaged(ModelError):
    """A weights file is incomplete or damaged, for example by an interrupted download or a full disk."""


class UnsupportedModel(ModelError):
    """The model needs an operation that the chosen provider does not have."""


class TensorParallelUnsupported(ModelError):
    """The model cannot be split over this number of ranks."""
