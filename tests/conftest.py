"""Shared test setup: the environment, the sizes of property tests, and how pytest-xdist distributes test files.

The environment is set before torch and numba are imported. Two intra-op threads on contended cores are ten times
slower than one.
"""

import contextlib
import functools
import gc
import itertools
import logging
import os
import re
import signal
from collections import Counter
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
    os.environ["TRITON_INTERPRET"] = "1"  # triton reads it once, when it is first imported


def _keep_kernels() -> None:
    """Let all processes, runs and checkouts share compiled kernels: compiling them takes more than a minute of CPU.

    Their keys are digests of all kernel sources, the compilers and the processor. Here and not in `pytest_configure`,
    because numba reads the variable when it is imported, which conftest files below do before that.
    """
    with contextlib.suppress(OSError, RuntimeError):  # no home, or a read-only one: each process compiles for itself
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "homing" / "test-kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ.setdefault("NUMBA_CACHE_DIR", str(folder))


_keep_kernels()

#: Per Hypothesis profile (`--hypothesis-profile`): the factor by which the number of examples is multiplied.
FACTORS = {"fast": 0.1, "default size": 0.5, "nightly": 20.0}


def pytest_configure(config: pytest.Config) -> None:
    """Clean up on SIGTERM, and register the Hypothesis profiles."""
    divides = bool(config.getoption("numprocesses", None)) and not hasattr(config, "workerinput")
    signal.signal(signal.SIGTERM, _end_workers if divides else _cut)
    for name, factor in FACTORS.items():
        settings.register_profile(name, deadline=None, max_examples=int(100 * factor))  # a busy machine fails no test
    settings.load_profile(_profile(config))


def _profile(config: pytest.Config) -> str:
    return str(config.getoption("hypothesis_profile", None) or "default size")


def _cut(number: int, frame: FrameType | None) -> None:
    """Exit as on Ctrl-C, so that fixtures stop their clusters: SIGTERM alone would kill only this process."""
    raise KeyboardInterrupt


def _end_workers(number: int, frame: FrameType | None) -> None:
    """Forward the signal to the workers: a terminal sends Ctrl-C to the whole group, `kill` only to one process."""
    for worker in psutil.Process().children():
        worker.terminate()
    raise KeyboardInterrupt


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark property tests before tests are selected by marker, and run the files that start clusters first."""
    owners = [_owner_of_settings(item) for item in items]
    for item, owner in zip(items, owners, strict=True):
        if owner is not None:
            item.add_marker(pytest.mark.property)
    for owner in {id(owner): owner for owner in owners if owner is not None}.values():
        _resize(owner, FACTORS.get(_profile(config), 1.0))
    yield
    items.sort(key=lambda item: not _starts_clusters(item.path))


def pytest_collection_finish() -> None:
    """Collect garbage less often, and not among the objects of all modules that were just imported.

    With Python's defaults, collections took a tenth of the suite's CPU time.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """With `--durations`, print the seconds that the tests of each folder took, of all processes together."""
    if not terminalreporter.config.getoption("durations"):
        return
    spent = Counter[str]()
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            spent[str(Path(report.location[0]).parent)] += report.duration
    terminalreporter.section("seconds by folder")
    for folder, seconds in spent.most_common():
        terminalreporter.write_line(f"{seconds:8.1f}  {folder}")


@functools.cache
def _starts_clusters(path: Path) -> bool:
    """Whether the file's tests start clusters. Searches its text, because xdist's scheduler cannot see markers."""
    return path.is_file() and "pytest.mark.cluster" in path.read_text(encoding="utf-8")


def _owner_of_settings(item: pytest.Item) -> Any:
    """The object that holds a property test's settings: its state machine class or its function; None for others."""
    case = getattr(item, "cls", None)
    if isinstance(getattr(case, "settings", None), settings):
        return case
    function = getattr(item, "obj", None)
    return function if getattr(function, "is_hypothesis_test", False) else None


def _resize(owner: Any, factor: float) -> None:
    """Scale the examples of a property test that sets their number itself; other tests use the profile's number."""
    name = "settings" if isinstance(owner, type) else "_hypothesis_internal_use_settings"
    own = getattr(owner, name, None)
    if own is not None and own.max_examples != settings.default.max_examples and factor != 1.0:
        setattr(owner, name, settings(own, max_examples=max(1, int(own.max_examples * factor))))


@pytest.fixture
def scale(request: pytest.FixtureRequest) -> float:
    """Factor for tests that count their own examples: multiply the default number by it."""
    return FACTORS.get(_profile(request.config), 1.0)


@pytest.fixture(autouse=True)
def _log_level_lasts_one_test() -> Iterator[None]:
    """Objects that usually own their process set the level of homing's messages when they start."""
    logger = logging.getLogger("homing")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def _tokenizers_are_read_once() -> Iterator[None]:
    """Load each tokenizer once: loading starts a transformers process (two seconds of CPU). Failures are not cached."""
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
    """Like pytest's `tmp_path`, with a shorter name: a socket path has at most 103 bytes, and xdist adds a folder."""
    return tmp_path_factory.mktemp(re.sub(r"\W", "_", request.node.name)[:16])


@functools.cache
def _shares_the_cluster(path: Path) -> bool:
    """Whether the file's tests use the cluster of tests/e2e/conftest.py, of which each worker starts its own."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return "(cluster: Serving" in text and "def cluster(" not in text


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> "LoadFileScheduling | None":
    """With `--dist loadfile`: run all files that share the cluster on one worker, and files that start clusters first.

    (`xdist_group` would be simpler, but has no effect with xdist 3.8 and pytest 9.2.)
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class SharedClusterAndFiles(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path: str = super()._split_scope(nodeid)
            return "shared cluster" if _shares_the_cluster(config.rootpath / path) else path

    config.option.loadscopereorder = False  # keep our order instead of sorting files by number of tests
    return SharedClusterAndFiles(config, log)
