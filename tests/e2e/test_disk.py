"""Replicas with blocks on disk are killed, and their cluster is stopped and started again: they find their blocks."""

import signal
from pathlib import Path

import psutil
import pytest

from homing.replica.disk.file_format import PAGE_BYTES, Layout, decode_header, decode_record

from .running import LONG_PROMPTS, Serving, serving, until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def hits(running: Serving) -> int:
    """The cached tokens of all prompts."""
    asked = [{"prompt": prompt, "max_tokens": 4, "temperature": 0} for prompt in LONG_PROMPTS]
    answers = [running.post("/v1/completions", each) for each in asked]
    return sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)


def blocks_on_disk(folder: Path) -> int:
    count = 0
    for path in folder.glob("*.kv"):
        raw = path.read_bytes()
        header = decode_header(raw[:PAGE_BYTES])
        assert header is not None
        layout = Layout(header.identity.block_size, header.identity.block_bytes, header.slots)
        for slot in range(layout.slots):
            at = layout.record_at(slot)
            count += decode_record(layout, header.drawn, slot, raw[at : at + layout.record_bytes]) is not None
    return count


def test_replicas_that_are_killed_or_stopped_keep_their_hits(tmp_path: Path) -> None:
    """Two replicas share the folder; each takes whichever file is free, and the router knows what it then has."""
    folder = tmp_path / "kv"
    flags = ["--replicas", "2", "--disk-kv", str(folder), "--disk-kv-size", "200000000"]
    with serving(tmp_path / "state", *flags) as running:
        cold, warm = hits(running), hits(running)
        assert cold < 0.1 * warm
        replicas = running.serving(2)
        blocks = sum(each["indexed_blocks"] for each in replicas.values())
        until(lambda: blocks_on_disk(folder) >= blocks or None, "all blocks are on disk")
        for each in replicas.values():
            psutil.Process(each["pids"][0]).send_signal(signal.SIGKILL)
        until(lambda: {*running.replicas()}.isdisjoint(replicas) or None, "the replicas are missed")
        running.serving(2)
        assert hits(running) >= 0.9 * warm

    with serving(tmp_path / "state", *flags) as running:
        assert hits(running) >= 0.9 * warm
        failures = [
            line for line in running.http.get(f"{running.url}/metrics").text.splitlines() if "tier_fail" in line
        ]
        assert [line for line in failures if not line.startswith("#")] == []
