"""A cluster with encrypted sockets: it serves, and `homing watch` follows it with the keys and is refused without."""

import contextlib
import signal
import stat
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import httpx
import psutil
import pytest

from homing.cluster.host import DEFAULT_TOKEN
from homing.cluster.local_ray import RAY_ENVIRONMENT
from homing.cluster.registry import wait_gone
from homing.events import load_pair

from .running import HOMING, PATIENCE_S, Serving, environment, homing, serving, until

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


def test_an_encrypted_cluster_serves_and_sends_events_only_to_clients_with_keys(tmp_path: Path) -> None:
    """Covers settings, controller, membership, both kinds of connection and the command line together.

    No secret may be readable by others: not in logs, command lines, environments or Ray's state. No socket listens on
    another interface than loopback, and other local users cannot reach Ray's sockets. Ctrl-C ends all of it.
    """
    keys = tmp_path / "keys"
    assert homing(tmp_path, "keys", str(keys)).returncode == 0
    tenants = keys / "tenants.yaml"
    tenants.write_text(f"keys: [{{key_sha256: {sha256(API_KEY.encode()).hexdigest()}, tenant: ann}}]")
    flags = ["--events-curve-keys", str(keys), "--api-keys-file", str(tenants), "--log-level", "debug"]
    with serving(tmp_path, "--replicas", "1", "--access-log", str(tmp_path / "access.log"), *flags) as running:
        answer, refused = asked(running, API_KEY), asked(running, WRONG_KEY)
        with_keys = watched(tmp_path, running.url, "--events-curve-keys", str(keys), until_seen="live")
        without = watched(tmp_path, running.url, until_seen="refused")
        endpoints = running.replicas()["r0"]["event_endpoints"]
        until(lambda: True if running.idle() else None, "idle")
        said, addresses, opened = told(running), reachable(running), openings(running)
        family, folder = running.family(), Path(running.note()["run_dir"])
        assert running.process is not None
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(60) == 0

    assert "Traceback" not in "".join(running.output)
    assert wait_gone(family, 0) == []
    assert not folder.exists()
    secrets = {load_pair(path).secret.decode() for path in keys.glob("*.key_secret")}
    assert len(secrets) == 2
    secrets |= {API_KEY, WRONG_KEY, DEFAULT_TOKEN.read_text().strip()}
    assert addresses == {"127.0.0.1"}
    assert set(opened.values()) == {"------"}
    assert (answer.status_code, refused.status_code) == (200, 401)
    assert endpoints["curve_key"] in (keys / "server.key").read_text()
    assert "refused" not in with_keys
    assert "does not know our key" in without
    assert "Controller" in said["Ray's actors"]
    assert [where for where, text in said.items() if any(each in text for each in secrets)] == []
    assert "ann" in said[str(tmp_path / "access.log")]


def asked(running: Serving, key: str) -> httpx.Response:
    body = {"prompt": "Once upon a time", "max_tokens": 4}
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{running.url}/v1/completions", json=body, headers=headers, timeout=60, trust_env=False)
