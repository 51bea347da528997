"""What all tests share: the environment, the sizes of property tests, and how pytest-xdist divides the tests.

The environment is set before torch and numba are imported. Two intra-op threads on contended cores are ten times
slower than one.
"""

import functools
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from xdist.scheduler import LoadFileScheduling

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not any(Path("/dev", name).exists() for name in ("nvidiactl", "dxg", "kfd")):
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, whoever imports it first

#: How many examples property tests try, by Hypothesis profile (`--hypothesis-profile`), as a factor.
FACTORS = {"fast": 0.1, "default size": 0.5, "nightly": 20.0}


def pytest_configure(config: pytest.Config) -> None:
    """Clean up on SIGTERM, register the Hypothesis profiles, and let all processes share compiled kernels."""
    divides = bool(config.getoption("numprocesses", None)) and not hasattr(config, "workerinput")
    signal.signal(signal.SIGTERM, _end_workers if divides else _cut)
    for name, factor in FACTORS.items():
        settings.register_profile(name, deadline=None, max_examples=int(100 * factor))  # a busy machine is no failure
    settings.load_profile(_profile(config))
    cache = getattr(config, "cache", None)
    if cache is not None and "NUMBA_CACHE_DIR" not in os.environ:
        # Kernels are stored under a digest of all their sources, so the folder may outlive the run.
        folder = cache.mkdir("kernels")
        folder.chmod(0o700)
        os.environ["NUMBA_CACHE_DIR"] = str(folder)


def _profile(config: pytest.Config) -> str:
    return str(config.getoption("hypothesis_profile", None) or "default size")


def _cut(number: int, frame: FrameType | None) -> None:
    """End as Ctrl-C does, so that fixtures end their clusters: SIGTERM would end this process and nothing below it."""
    raise KeyboardInterrupt


def _end_workers(number: int, frame: FrameType | None) -> None:
    """Pass the signal on: a terminal's Ctrl-C reaches all processes of the group, a signal to one process does not."""
    for worker in psutil.Process().children():
        worker.terminate()
    raise KeyboardInterrupt


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark property tests before tests are chosen by markers, and start with those that start clusters."""
    owners = [_owner_of_settings(item) for item in items]
    for item, owner in zip(items, owners, strict=True):
        if owner is not None:
            item.add_marker(pytest.mark.property)
    for owner in {id(owner): owner for owner in owners if owner is not None}.values():
        _resize(owner, FACTORS.get(_profile(config), 1.0))
    yield
    items.sort(key=lambda item: not _starts_clusters(item.path))


@functools.cache
def _starts_clusters(path: Path) -> bool:
    """Whether tests of this file do. By its text, as xdist's scheduler knows no markers."""
    return path.is_file() and "pytest.mark.cluster" in path.read_text(encoding="utf-8")


def _owner_of_settings(item: pytest.Item) -> Any:
    """The class of a state machine's test, or the function of a property test."""
    case = getattr(item, "cls", None)
    if isinstance(getattr(case, "settings", None), settings):
        return case
    function = getattr(item, "obj", None)
    return function if getattr(function, "is_hypothesis_test", False) else None


def _resize(owner: Any, factor: float) -> None:
    """Scale the examples of a property test that sets their number itself; others take the profile's."""
    name = "settings" if isinstance(owner, type) else "_hypothesis_internal_use_settings"
    own = getattr(owner, name, None)
    if own is not None and own.max_examples != settings.default.max_examples and factor != 1.0:
        setattr(owner, name, settings(own, max_examples=max(1, int(own.max_examples * factor))))


@pytest.fixture
def scale(request: pytest.FixtureRequest) -> float:
    """How many examples a test that counts them itself should try, as a factor of its own number."""
    return FACTORS.get(_profile(request.config), 1.0)


@pytest.fixture(scope="session", autouse=True)
def _tokenizers_are_read_once() -> Iterator[None]:
    """Each reading starts a process of transformers (two seconds of CPU). Failures are not kept."""
    from homing.router.text import tokenizer

    read = tokenizer.load_parts

    @functools.cache
    def load(folder: Path, _files: tuple[tuple[str, int, int], ...]) -> tokenizer.TokenizerParts:
        return read(folder)

    def load_once(folder: Path) -> tokenizer.TokenizerParts:
        stats = [(path.name, path.stat()) for path in sorted(folder.glob("*"))]
        return load(folder, tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "load_parts", load_once)
        yield


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pytest's own, with a shorter name: a socket's path has at most 103 bytes, and xdist adds a folder."""
    return tmp_path_factory.mktemp(re.sub(r"\W", "_", request.node.name)[:16])


@functools.cache
def _shares_the_cluster(path: Path) -> bool:
    """Whether tests of this file use the cluster of tests/e2e/conftest.py, which is one for each worker."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return "(cluster: Serving" in text and "def cluster(" not in text


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> "LoadFileScheduling | None":
    """With `--dist loadfile`: one worker runs all files that share one cluster; files that start clusters come first.

    (An `xdist_group` would do, but has no effect with xdist 3.8 and pytest 9.2.)
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class SharedClusterAndFiles(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path: str = super()._split_scope(nodeid)
            return "shared cluster" if _shares_the_cluster(config.rootpath / path) else path

    config.option.loadscopereorder = False  # in the order of the tests, not by their number
    return SharedClusterAndFiles(config, log)
