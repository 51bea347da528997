"""One engine under its reaper process, without Ray; a program that speaks like vLLM is the engine."""

import ctypes
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from homing.cluster.config import load_settings
from homing.cluster.control.control_messages import ClusterModel, RankSpec, Rendezvous
from homing.cluster.control.engines.process import EngineServer, error_summary, start_engine
from homing.cluster.errors import EngineLost, StartFailed
from homing.replica.demo import demo_model_path
from homing.router.errors import ParityMismatch

from ...engine_program import engine_python

pytestmark = pytest.mark.cluster

#: Only catches hangs.
PATIENCE_S = 120.0
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37


def rank_spec(folder: Path, engine_args: str = "", **flags: str) -> RankSpec:
    """A replica of the demo model on a fake engine, with its sockets in this folder."""
    given = {
        "engine": "vllm",
        "engine_python": str(engine_python(folder)),
        "engine_args": engine_args,
        "served_model_name": "demo",
        "replicas": "1",
        "max_running_requests": "8",
        "max_batched_tokens": "512",
    }
    settings = load_settings(given | flags, {})
    model = ClusterModel(settings=settings, seed=7, model_dir=None, run_dir=str(folder), host="127.0.0.1")
    return RankSpec(model, "r0", 1, 0, 1, Rendezvous("127.0.0.1", 1, b""))


def started(folder: Path, engine_args: str = "", **flags: str) -> EngineServer:
    server = start_engine(rank_spec(folder, engine_args, **flags), demo_model_path(), folder, "127.0.0.1")
    server.interval_s = 0.05
    return server


def until(met: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not met():
        assert time.monotonic() < deadline, f"timed out waiting for: {what}"
        time.sleep(0.02)


def below(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def engine_process() -> psutil.Process:
    """The engine's own process; its reaper's command line contains the program as a later argument."""
    living = [each for each in ours() if each.status() != psutil.STATUS_ZOMBIE]
    (engine,) = [each for each in living if Path(each.cmdline()[2]).name == "engine_program.py"]
    return engine


#: Children of this process from before the test, such as a cluster that several files share.
OTHERS: set[psutil.Process] = set()


def ours() -> list[psutil.Process]:
    """The processes that the test started, with all their descendants."""
    children = [each for each in psutil.Process().children() if each not in OTHERS]
    return [*children, *(process for each in children for process in below(each.pid))]


@contextmanager
def running(server: EngineServer) -> Iterator[list[BaseException | None]]:
    """Run the server in a thread until it ends; the list then holds its exception, or None."""
    outcome: list[BaseException | None] = []

    def run() -> None:
        try:
            server.run()
        except Exception as error:
            outcome.append(error)
        else:
            outcome.append(None)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield outcome
    finally:
        server.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the server did not end"


@pytest.fixture(autouse=True)
def orphans_go_to_init() -> Iterator[None]:
    """A test that starts Ray in this process makes it adopt orphans, which would stay as zombies."""
    libc, adopts = ctypes.CDLL(None), ctypes.c_int()
    libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(adopts), 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    yield
    libc.prctl(PR_SET_CHILD_SUBREAPER, adopts.value, 0, 0, 0)


@pytest.fixture(autouse=True)
def no_process_left(orphans_go_to_init: None) -> Iterator[None]:
    """No process of an engine may remain in any case, not even a zombie."""
    OTHERS.clear()
    OTHERS.update(psutil.Process().children())
    yield
    until(lambda: not ours(), "its processes have ended")


def test_an_engine_is_described_watched_and_ended_with_all_its_children(tmp_path: Path) -> None:
    """The hard case is a child that ignores signals and has left its session; vLLM's workers are children as well."""
    server = started(tmp_path, "--fake-child --fake-token-s 0.01")
    about = server.description
    family = ours()

    with running(server) as outcome:
        assert (about.external, about.model.name, about.model.max_model_len) == (True, "demo", 8192)
        assert about.event_endpoints.events == f"ipc://{tmp_path}/events"
        assert about.num_blocks == 500
        assert len(family) == 4  # two reapers, the engine and its child
        server.stop()
        until(lambda: outcome, "it ends")

    assert outcome == [None]
    assert [each for each in family if each.is_running()] == []


def test_an_engine_on_a_cluster_of_several_nodes_is_reached_by_the_address_of_its_own(tmp_path: Path) -> None:
    """Routers may run on another node. The arrival of events is checked before the engine is described."""
    server = start_engine(rank_spec(tmp_path), demo_model_path(), None, "10.0.0.1")
    with running(server):
        ends = server.description.event_endpoints

    assert server.description.request_endpoint.startswith("http://127.0.0.1:")  # the setting takes precedence
    assert {each.rpartition(":")[0] for each in (ends.events, ends.replay)} == {"tcp://127.0.0.1"}
    assert ends.events != ends.replay


def test_an_engine_that_is_killed_is_lost_with_its_children(tmp_path: Path) -> None:
    """The controller then starts a new engine; survivors of the old one would keep its memory."""
    server = started(tmp_path, "--fake-child")
    engine = engine_process()

    with running(server) as outcome:
        engine.send_signal(signal.SIGKILL)
        until(lambda: outcome, "its end is noticed")

    assert isinstance(outcome[0], EngineLost)
    assert "was killed by SIGKILL" in str(outcome[0])


def test_an_engine_that_hangs_is_lost(tmp_path: Path) -> None:
    """A process that exists but does not answer is useless."""
    server = started(tmp_path, health_timeout_s="0.1")
    engine = engine_process()

    with running(server) as outcome:
        engine.suspend()
        until(lambda: outcome, "its silence is noticed")

    assert isinstance(outcome[0], EngineLost)
    assert "/health does not return 200" in str(outcome[0])


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("exit", StartFailed, "vllm exited during startup: ValueError: no such attention"),
        ("never-ready", StartFailed, "vllm is not ready after 1.8 s: "),
        ("other-blocks", ParityMismatch, "--block-size 32"),
    ],
)
def test_an_engine_that_cannot_serve_is_refused_in_its_own_words(
    tmp_path: Path, fault: str, error: type[Exception], words: str
) -> None:
    """The user sees this line, not the engine's log."""
    with pytest.raises(error, match=words):
        started(tmp_path, f"--fake-fault {fault}", start_timeout_s="2" if fault == "never-ready" else "600")


def test_an_engine_whose_python_is_missing_is_refused(tmp_path: Path) -> None:
    """The path may be wrong on another node."""
    spec = rank_spec(tmp_path, engine_python=str(tmp_path / "nowhere"))

    with pytest.raises(StartFailed, match=r"nowhere cannot be started: .*No such file"):
        start_engine(spec, demo_model_path(), tmp_path, "127.0.0.1")


def test_an_engine_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Even if that process is killed: on a shared Ray cluster, nothing else would stop the engine and free its GPU."""
    starter = textwrap.dedent("""
        import os, sys, time
        from pathlib import Path
        from homing.cluster.control.engines.process import EngineProcess
        process = EngineProcess([sys.executable, "-c", sys.argv[1]], os.environ, "fake")
        while not process.lines:
            time.sleep(0.02)
        print(process.lines[0], flush=True)
        time.sleep(3600)
    """)
    engine = "import os, subprocess; subprocess.Popen(['sleep', '3600']); print(os.getpid(), flush=True); os.wait()"
    with subprocess.Popen([sys.executable, "-P", "-c", starter, engine], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        family = [psutil.Process(pid), *below(pid)]
        direct = psutil.Process(process.pid).children()
        process.kill()
        for each in direct:  # as Ray kills an actor's children
            each.kill()

        until(lambda: not any(each.is_running() for each in family), "the engine has ended")

    assert len(family) == 2


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "it wrote nothing"),
        (["a", "", "b", "c", "d"], "b | c | d"),
        (["INFO a", "killed", "INFO b"], "killed"),
        (["INFO a", "INFO b"], "INFO a | INFO b"),
        (
            ["ValueError: root", "x", "RuntimeError: see above", "y"],
            "ValueError: root | x | RuntimeError: see above | y",
        ),
    ],
)
def test_the_last_words_have_the_first_error(lines: list[str], words: str) -> None:
    """vLLM's last line is only "see the root cause above"."""
    assert error_summary(lines) == words
