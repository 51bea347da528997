"""All policies by the name that settings, simulator, `--help` and benchmarks use.

Each module of this folder lists its policies in `POLICIES`. To add a policy, add a file.
"""

from importlib import import_module
from pkgutil import iter_modules

from .. import policy as package
from .base import Policy

_MODULES = [found.name for found in iter_modules(package.__path__, f"{package.__name__}.") if found.name != __name__]

#: In order of module names.
REGISTRY: dict[str, type[Policy]] = {
    policy.name: policy for name in sorted(_MODULES) for policy in getattr(import_module(name), "POLICIES", ())
}


def policy_names() -> tuple[str, ...]:
    """All valid values of the setting `policy`."""
    return tuple(REGISTRY)


def make_policy(name: str) -> Policy:
    """A new policy with this name, which is one of `policy_names()`."""
    return REGISTRY[name]()
