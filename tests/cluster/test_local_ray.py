"""Starting and joining Ray: early errors, private folders and tokens."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from homing.cluster.config import load_settings
from homing.cluster.errors import ClusterError, StartFailed
from homing.cluster.local_ray import (
    _last_lines,
    join,
    make_token_private,
    patient_start,
    run_folder,
    set_local_environment,
    sockets_folder,
)


def test_an_address_where_nothing_listens_is_reported_at_once_with_the_remedy() -> None:
    """Ray itself retries for over a minute and then blames its control store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"

        with pytest.raises(ClusterError, match=f"no Ray cluster answers at {address}.*ray start --head"):
            join(load_settings({"ray_address": address}, environ={}))


def test_nobody_else_may_enter_the_run_folder_or_read_the_token(tmp_path: Path) -> None:
    """Ray makes its folder, sockets and token accessible to all users, which would let them run code."""
    folder, token = run_folder(), tmp_path / "auth_token"
    mode = folder.stat().st_mode & 0o777
    folder.rmdir()
    token.write_text("secret")
    token.chmod(0o644)
    make_token_private(token)
    make_token_private(tmp_path / "none")

    assert mode == 0o700
    assert token.stat().st_mode & 0o777 == 0o600


def test_the_folder_for_sockets_is_there_before_any_process_uses_it(tmp_path: Path) -> None:
    """Routers keep a file in it and often start before the first replica; a second start must find it."""
    folder = sockets_folder(tmp_path)

    assert folder.stat().st_mode & 0o777 == 0o700
    assert sockets_folder(tmp_path) == folder


def test_what_ray_does_to_memory_and_priority_is_ours_unless_the_operator_wants_it() -> None:
    """Ray's monitor first kills restartable actors: controller and supervisor, 50 MB each, and so the cluster."""
    ours: dict[str, str] = {}
    set_local_environment(ours)
    own = {"RAY_memory_monitor_refresh_ms": "250", "RAY_worker_niceness": "5", "RAY_USAGE_STATS_ENABLED": "1"}
    set_local_environment(own)

    assert (ours["RAY_memory_monitor_refresh_ms"], ours["RAY_worker_oom_score_adjustment"]) == ("0", "0")
    assert ours["RAY_worker_niceness"] == "0"
    assert (own["RAY_memory_monitor_refresh_ms"], own["RAY_worker_niceness"]) == ("250", "5")
    assert own["RAY_USAGE_STATS_ENABLED"] == "0"


def test_a_raylet_that_starts_slowly_is_waited_for_and_one_that_never_does_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray waits a fixed 30 s, too short on a busy machine, and then fails with a traceback."""
    from ray._private import services

    answers = iter([RuntimeError("not yet"), RuntimeError("not yet"), {"labels": {}}])

    def get_node(gcs_address: str, node_id: str) -> dict[str, object]:
        answer = next(answers, RuntimeError("never"))
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    monkeypatch.setattr(services, "get_node", get_node)
    with patient_start():
        assert services.get_node("127.0.0.1:1", "node") == {"labels": {}}
    with pytest.raises(StartFailed, match="did not start within 0 s"), patient_start(timeout_s=0):
        services.get_node("127.0.0.1:1", "node")
    with subprocess.Popen(["/bin/false"]) as ended:
        pass
    with pytest.raises(StartFailed, match="Ray's false exited with code 1"), patient_start([ended]):
        services.get_node("127.0.0.1:1", "node")

    assert services.get_node is get_node


def test_a_raylet_s_stack_trace_does_not_hide_the_cause(tmp_path: Path) -> None:
    """Nobody who starts a cluster can read frames of C++; the line before them says what failed."""
    log = tmp_path / "raylet.out"
    cause = "[2026-11-25 10:00:00,000 C 7 7] (raylet) main.cc:1: Check failed: port is in use"
    log.write_text(
        "\n".join(["one", "two", cause, "*** StackTrace Information ***", "raylet(+0x1) [0x2] ray::Log", "", ""])
    )

    assert _last_lines(log) == f"one | two | {cause}"
    assert _last_lines(tmp_path / "none") == "no raylet log: No such file or directory"


FAILING = """
import sys, ray
from pathlib import Path
from homing.cluster import local_ray
from homing.cluster.config import load_settings
from homing.cluster.errors import StartFailed

def init(**_options):
    answers.append("start")
    if len(answers) < int(sys.argv[1]):
        raise StartFailed("no raylet")

answers = []
ray.init, ray.cluster_resources = init, dict
try:
    local_ray.start_local(load_settings({}, {}), Path(sys.argv[2]))
except StartFailed as error:
    answers.append(str(error))
print(answers)
"""


@pytest.mark.parametrize(
    ("succeeds", "expected"),
    [(2, ["start", "start"]), (3, ["start", "start", "no raylet; no raylet log: No such file or directory"])],
)
def test_a_start_that_fails_is_repeated_once(succeeds: int, expected: list[str], tmp_path: Path) -> None:
    """Raylets sometimes failed to register in test runs."""
    command = [sys.executable, "-c", FAILING, str(succeeds), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)

    assert done.stdout == f"{expected}\n"


NOISE = """
import os, sys
from homing.cluster.local_ray import silence_native_stderr
print("before", file=sys.stderr)
silence_native_stderr()
os.write(2, b"noise of a library\\n")
print("after", file=sys.stderr)
"""


def test_lines_of_rays_own_at_the_end_are_discarded_and_ours_are_not() -> None:
    """They look like errors, but concern calls whose results are not needed."""
    done = subprocess.run([sys.executable, "-c", NOISE], capture_output=True, text=True, timeout=60, check=True)

    assert done.stderr == "before\nafter\n"


def test_orphans_that_have_ended_do_not_stay_as_zombies(tmp_path: Path) -> None:
    """Children that Ray's own code waits for are left alone, because it needs their exit status."""
    code = """
import os, subprocess, sys
from homing.cluster.local_ray import reap_orphans
waited_for = subprocess.Popen(["true"])
os.waitid(os.P_PID, waited_for.pid, os.WEXITED | os.WNOWAIT)
reap_orphans({waited_for.pid})
kept = waited_for.wait()
orphan = os.fork() or os._exit(3)
os.waitid(os.P_PID, orphan, os.WEXITED | os.WNOWAIT)
running = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
reap_orphans(set())
print(kept, os.path.exists(f"/proc/{orphan}"), running.poll())
running.communicate()
reap_orphans(set())
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)

    assert (done.stdout, done.stderr) == ("0 False None\n", "")
