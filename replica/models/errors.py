"""Why a model cannot be loaded here, and what to do about it. A branch of the room's tree in `replica/errors.py`.

StartupError
└── ModelError
    ├── WeightsMissing             the folder lacks a tensor, or has none at all
    ├── WeightsTorn                a file of weights is shorter or longer than it says
    ├── UnsupportedModel           the provider cannot run this model; names the reason
    └── TensorParallelUnsupported  it runs, but not split over so many ranks
"""

# ruff: noqa: N818 - these names say what is the matter with a model; operators read them in logs without "Error".

from ..errors import StartupError


class ModelError(StartupError):
    """A model that cannot be loaded or run; raised while a replica starts, never for a request."""


class WeightsMissing(ModelError):
    """The folder has no safetensors, or they lack a tensor that the model needs."""


class WeightsTorn(ModelError):
    """A file of weights is not whole: a download that broke off, or a full disk."""


class UnsupportedModel(ModelError):
    """The model does something that the chosen provider cannot do."""


class TensorParallelUnsupported(ModelError):
    """The model cannot be split over this number of ranks."""
