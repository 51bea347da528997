"""Errors of models that cannot be loaded. A branch of the tree in `replica/errors.py`.

StartupError
└── ModelError
    ├── WeightsMissing             the folder lacks a tensor, or has none at all
    ├── WeightsTorn                a file of weights is shorter or longer than its header says
    ├── UnsupportedModel           the provider cannot run this model; names the reason
    └── TensorParallelUnsupported  the model cannot be split over this number of ranks
"""

# ruff: noqa: N818 - these names describe a problem of a model; operators read them in logs without "Error".

from ..errors import StartupError


class ModelError(StartupError):
    """A model that cannot be loaded or run; raised while a replica starts, never for a request."""


class WeightsMissing(ModelError):
    """The folder has no safetensors, or they lack a tensor that the model needs."""


class WeightsTorn(ModelError):
    """A file of weights is incomplete, as after an interrupted download or on a full disk."""


class UnsupportedModel(ModelError):
    """The model needs an operation that the chosen provider does not have."""


class TensorParallelUnsupported(ModelError):
    """The model cannot be split over this number of ranks."""
