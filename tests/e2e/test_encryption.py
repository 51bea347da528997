"""A cluster whose sockets are encrypted: it serves, `homing watch` with the keys follows, and without them is told."""

import subprocess
from pathlib import Path

import pytest

from homing.events import load_pair

from .running import HOMING, PATIENCE_S, environment, homing, serving, until

pytestmark = pytest.mark.cluster


def watched(state: Path, url: str, *words: str, until_seen: str) -> str:
    """What `homing watch` printed up to a word."""
    with subprocess.Popen(
        [*HOMING, "watch", url, *words], env=environment(state), stdout=subprocess.PIPE, text=True
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


def test_an_encrypted_cluster_serves_and_tells_its_events_only_to_who_has_keys(tmp_path: Path) -> None:
    """Settings, controller, membership, both kinds of connection and the command line, all at once."""
    keys = tmp_path / "keys"
    assert homing(tmp_path, "keys", str(keys)).returncode == 0
    with serving(tmp_path, "--replicas", "1", "--events-curve-keys", str(keys)) as running:
        answer = running.post("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 4})
        with_keys = watched(tmp_path, running.url, "--events-curve-keys", str(keys), until_seen="live")
        without = watched(tmp_path, running.url, until_seen="refused")
        endpoints = running.replicas()["r0"]["event_endpoints"]
        words = " ".join(" ".join(process.cmdline()) for process in running.family())
        until(lambda: True if running.idle() else None, "idle")

    secrets = {load_pair(path).secret.decode() for path in keys.glob("*.key_secret")}
    assert answer["usage"]["completion_tokens"] == 4
    assert endpoints["curve_key"] in (keys / "server.key").read_text()
    assert "refused" not in with_keys
    assert "does not know our key" in without
    assert len(secrets) == 2
    assert not [secret for secret in secrets if secret in words + "".join(running.output)]
