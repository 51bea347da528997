"""What all tests share: the environment, the sizes of property tests, and how pytest-xdist divides the tests.

The environment is set before torch and numba are imported. Two intra-op threads on contended cores are ten times
slower than one.
"""

import os
import re
import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from xdist.scheduler import LoadGroupScheduling

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not any(Path("/dev", name).exists() for name in ("nvidiactl", "dxg", "kfd")):
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, whoever imports it first

#: The xdist group of tests that start clusters. They run one after the other: each uses several processes, and some
#: check that nothing is left on the machine.
CLUSTER = "cluster"
#: How many times as many examples property tests try with `--hypothesis-profile=nightly`.
NIGHTLY_FACTOR = 20


def pytest_configure(config: pytest.Config) -> None:
    """Clean up on SIGTERM, register the Hypothesis profiles, and let all processes share compiled kernels."""
    divides = bool(config.getoption("numprocesses", None)) and not hasattr(config, "workerinput")
    signal.signal(signal.SIGTERM, _end_workers if divides else _cut)
    settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
    settings.register_profile("nightly", deadline=None, max_examples=100 * NIGHTLY_FACTOR)
    settings.load_profile("nightly" if _nightly(config) else "untimed")
    cache = getattr(config, "cache", None)
    if cache is not None and "NUMBA_CACHE_DIR" not in os.environ:
        # Kernels are stored under a digest of all their sources, so the folder may outlive the run.
        folder = cache.mkdir("kernels")
        folder.chmod(0o700)
        os.environ["NUMBA_CACHE_DIR"] = str(folder)


def _nightly(config: pytest.Config) -> bool:
    return bool(config.getoption("hypothesis_profile", None) == "nightly")


def _cut(number: int, frame: FrameType | None) -> None:
    """End as Ctrl-C does, so that fixtures end their clusters: SIGTERM would end this process and nothing below it."""
    raise KeyboardInterrupt


def _end_workers(number: int, frame: FrameType | None) -> None:
    """Pass the signal on: a terminal's Ctrl-C reaches all processes of the group, a signal to one process does not."""
    for worker in psutil.Process().children():
        worker.terminate()
    raise KeyboardInterrupt


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start with the tests that start clusters, which one worker runs while the others run everything else."""
    owners = [_owner_of_settings(item) for item in items]
    for item, owner in zip(items, owners, strict=True):
        if item.get_closest_marker("cluster"):
            item.add_marker(pytest.mark.xdist_group(CLUSTER))
        if owner is not None:
            item.add_marker(pytest.mark.property)
    items.sort(key=lambda item: item.get_closest_marker("cluster") is None)
    if _nightly(config):
        for owner in {id(owner): owner for owner in owners if owner is not None}.values():
            _enlarge(owner)


def _owner_of_settings(item: pytest.Item) -> Any:
    """The class of a state machine's test, or the function of a property test."""
    case = getattr(item, "cls", None)
    if isinstance(getattr(case, "settings", None), settings):
        return case
    function = getattr(item, "obj", None)
    return function if getattr(function, "is_hypothesis_test", False) else None


def _enlarge(owner: Any) -> None:
    """Multiply the examples of a property test that names their number itself; others take the profile's."""
    name = "settings" if isinstance(owner, type) else "_hypothesis_internal_use_settings"
    own = getattr(owner, name, None)
    if own is not None and own.max_examples < settings.default.max_examples:
        setattr(owner, name, settings(own, max_examples=own.max_examples * NIGHTLY_FACTOR))


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pytest's own, with a shorter name: a socket's path has at most 103 bytes, and xdist adds a folder."""
    return tmp_path_factory.mktemp(re.sub(r"\W", "_", request.node.name)[:16])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> "LoadGroupScheduling | None":
    """With `--dist loadgroup`: groups stay together, and so does what is left of each file."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class GroupOrFile(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope: str = super()._split_scope(nodeid)
            return scope.split("::")[0]

    config.option.loadscopereorder = False  # in the order above, not by the number of tests
    return GroupOrFile(config, log)
