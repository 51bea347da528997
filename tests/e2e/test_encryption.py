"""A cluster of two ranks with encrypted sockets: what it answers, to whom, what others can read, what it leaves."""

import contextlib
import os
import signal
import stat
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from homing.cluster.host import DEFAULT_TOKEN
from homing.cluster.local_ray import RAY_ENVIRONMENT
from homing.events import load_pair

from .parent_death import end_with_us
from .running import HOMING, PATIENCE_S, Serving, environment, homing, leaves_nothing, ready_note, until

pytestmark = pytest.mark.cluster


def watched(state: Path, url: str, *words: str, until_seen: str) -> str:
    """The output of `homing watch` up to the line that contains `until_seen`."""
    with subprocess.Popen(
        [*HOMING, "watch", "--url", url, *words], env=environment(state), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if until_seen in line:
                break
        process.terminate()
        process.wait(PATIENCE_S)
    return "".join(lines)


API_KEY = "sk-nobody-may-read-this-anywhere"
WRONG_KEY = "sk-a-typo-of-a-key-is-nearly-a-key"

#: Reads Ray's own table of actors, which Ray's dashboard and state commands show.
ASK_ACTORS = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print(ray._private.state.actors())
"""


def told(running: Serving) -> dict[str, str]:
    """Everything about the cluster that others on this machine could read, by where it is found."""
    found = {"output": "".join(running.output)}
    for process in running.family():
        with contextlib.suppress(psutil.Error):
            found[f"command line of {process.pid}"] = " ".join(process.cmdline())
            found[f"environment of {process.pid}"] = str(process.environ())
    for folder in (Path(running.note()["run_dir"]), running.state):
        files = [path for path in folder.rglob("*") if path.is_file() and "keys" not in path.parts]
        found |= {str(path): path.read_text(errors="replace") for path in files}
    loopback = environment(running.state) | RAY_ENVIRONMENT | {"RAY_AUTH_MODE": "token"}
    command = [sys.executable, "-P", "-c", ASK_ACTORS, running.note()["ray_address"]]
    found["Ray's actors"] = subprocess.run(command, env=loopback, capture_output=True, text=True, check=True).stdout
    return found


def reachable(running: Serving) -> set[str]:
    """Addresses on which the cluster's processes listen."""
    found = set()
    for process in running.family():
        with contextlib.suppress(psutil.Error):
            listening = [each for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN]
            found |= {each.laddr.ip.removeprefix("::ffff:") for each in listening}
    return found


def openings(running: Serving) -> dict[str, str]:
    """Permissions of group and others on the run folder and on Ray's token, as in `ls -l`."""
    paths = [Path(running.note()["run_dir"]), DEFAULT_TOKEN]
    return {str(path): stat.filemode(path.stat().st_mode)[4:] for path in paths}


STORY = {"prompt": "Tell me a story about a fox.", "max_tokens": 60, "temperature": 0}


def hear_hangups() -> None:
    """`preexec_fn` that resets SIGHUP: a child of tests run under `nohup` would otherwise ignore it."""
    end_with_us()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_an_encrypted_cluster_of_two_ranks_answers_keeps_its_secrets_and_leaves_nothing(
    cluster: Serving, tmp_path: Path
) -> None:
    """Covers settings, controller, membership, both kinds of connection and the command line together.

    Tensor parallelism must not change a greedy answer, and events go only to clients with keys. No secret may be
    readable by others: not in logs, command lines, environments or Ray's state. No socket listens on another interface
    than loopback, and other local users cannot reach Ray's sockets.

    `timeout`, supervisors and shells signal groups; a closing terminal sends SIGHUP and stops reading the output. The
    stopped server must leave no process or file behind.
    """
    keys, state = tmp_path / "keys", tmp_path / "state"
    assert homing(tmp_path, "keys", str(keys)).returncode == 0
    tenants = keys / "tenants.yaml"
    tenants.write_text(f"keys: [{{key_sha256: {sha256(API_KEY.encode()).hexdigest()}, tenant: ann}}]")
    flags = ["--events-curve-keys", str(keys), "--api-keys-file", str(tenants), "--log-level", "debug"]
    flags += ["--replicas", "1", "--tensor-parallel-size", "2", "--access-log", str(tmp_path / "access.log")]
    with (
        (tmp_path / "stderr").open("w") as stderr,
        subprocess.Popen(
            [*HOMING, "serve", "--port", "0", *flags],
            env=environment(state),
            stdout=subprocess.PIPE,
            stderr=stderr,
            process_group=0,
            preexec_fn=hear_hangups,
        ) as process,
    ):
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        output: list[str] = []

        def ready() -> dict[str, Any] | None:
            output.append((process.stdout.read() or b"").decode())
            return ready_note(state, process)

        note = until(ready, "it serves")
        running = Serving(state, note["url"], process.pid, output=output)
        family, folder = running.family(), Path(note["run_dir"])
        assert folder.is_dir()
        (replica,) = running.replicas().values()
        answer, refused = asked(running, API_KEY), asked(running, WRONG_KEY)
        with_keys = watched(state, running.url, "--events-curve-keys", str(keys), until_seen="live")
        without = watched(state, running.url, until_seen="refused")
        until(lambda: True if running.idle() else None, "idle")
        ready()
        said, addresses, opened = told(running), reachable(running), openings(running)
        access = (tmp_path / "access.log").read_text()
        said["stderr"] = (tmp_path / "stderr").read_text()
        priorities = {psutil.Process(pid).nice() for pid in (process.pid, *replica["pids"])}
        shared = [each for each in family[1:] if os.getpgid(each.pid) == process.pid]
        agents = [words for each in family if "Agent" in (words := " ".join(each.cmdline()[:1]))]
        process.stdout.close()
        os.killpg(process.pid, signal.SIGHUP)
        process.wait(PATIENCE_S)

    leaves_nothing(state, family, folder)
    assert "Traceback" not in said["output"] + said["stderr"]
    secrets = {load_pair(path).secret.decode() for path in keys.glob("*.key_secret")}
    assert len(secrets) == 2
    secrets |= {API_KEY, WRONG_KEY, DEFAULT_TOKEN.read_text().strip()}
    assert addresses == {"127.0.0.1"}
    assert set(opened.values()) == {"------"}
    assert (answer.status_code, refused.status_code) == (200, 401)
    assert answer.json()["choices"] == cluster.post("/v1/completions", STORY)["choices"]
    assert replica["event_endpoints"]["curve_key"] in (keys / "server.key").read_text()
    assert "refused" not in with_keys
    assert "does not know our key" in without
    assert "Controller" in said["Ray's actors"]
    assert [where for where, text in (said | {"access": access}).items() if any(each in text for each in secrets)] == []
    assert "ann" in access
    assert len(replica["pids"]) == 2
    assert len(priorities) == 1  # Ray's default niceness would let every other process run first
    assert shared == []
    assert agents == []  # the death of one of Ray's agents ends the raylet, and so the cluster
    assert "replica_ready replica=r0" in homing(state, "logs", "controller").stdout


def asked(running: Serving, key: str) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{running.url}/v1/completions", json=STORY, headers=headers, timeout=60, trust_env=False)
