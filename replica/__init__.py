"""One replica: the engine, its models and the words it exchanges with routers. Importing this face loads no torch."""

from .config import ReplicaSettings
from .errors import ReplicaError
from .messages import (
    Abort,
    Generate,
    ModelLimits,
    Parity,
    Refused,
    ReplicaDescription,
    SamplingParams,
    TokenBatch,
    TokenOutput,
)

__all__ = [
    "Abort",
    "Generate",
    "ModelLimits",
    "Parity",
    "Refused",
    "ReplicaDescription",
    "ReplicaError",
    "ReplicaSettings",
    "SamplingParams",
    "TokenBatch",
    "TokenOutput",
]
