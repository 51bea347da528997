"""The policies there are, by the name under which settings, simulator, `--help` and benchmarks know them.

Found in the modules of this folder and of `peers/`: each names its policies in `POLICIES`. Adding one is adding a file.
"""

from importlib import import_module
from pkgutil import walk_packages

from .. import policy as package
from .base import Policy

_NAMES = [found.name for found in walk_packages(package.__path__, f"{package.__name__}.") if found.name != __name__]

#: In the order of module names, those of this folder before those of `peers/`.
REGISTRY: dict[str, type[Policy]] = {
    policy.name: policy
    for name in sorted(_NAMES, key=lambda name: (name.count("."), name))
    for policy in getattr(import_module(name), "POLICIES", ())
}


def policy_names() -> tuple[str, ...]:
    """All values of the setting `policy`."""
    return tuple(REGISTRY)


def make_policy(name: str) -> Policy:
    """A new policy of that name, one of `policy_names()`."""
    return REGISTRY[name]()
