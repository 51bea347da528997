"""`homing doctor`: every problem of machine, settings or cluster is a finding with a remedy."""

import io
import json
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from homing import __version__
from homing.cluster.cli.doctor import (
    Finding,
    examine_failure,
    examine_host,
    examine_settings,
    examine_upgrade,
    examine_view,
    render,
)
from homing.cluster.cli.main import run
from homing.cluster.config import load_settings
from homing.cluster.host import PACKAGES, DiskInfo, MachineInfo
from homing.cluster.output import plain
from homing.cluster.registry import own_entry
from homing.replica.demo import demo_model_path

GIB = 1 << 30
WELL = MachineInfo(
    python=(3, 11),
    packages=dict.fromkeys(PACKAGES, "1.0"),
    memory_bytes=32 * GIB,
    gpus_seen=0,
    gpu_bytes=(),
    gpu_capability=None,
    gpus_usable=0,
    launcher_problem=None,
    cpu_kernels=("prompt attention: torch",),
    disks=(DiskInfo("notes", "/notes", 100 * GIB),),
    shared_memory_bytes=GIB,
    open_files=65536,
    clock_synchronized=True,
    token_mode=0o600,
)


def faults(host: MachineInfo, **flags: str) -> list[Finding]:
    findings = examine_host(host, load_settings(flags, {}))
    return [finding for finding in findings if finding.level != "ok"]


def test_a_machine_in_order_has_no_fault() -> None:
    """Each check reports that it ran."""
    findings = examine_host(WELL, load_settings({}, {}))

    assert {finding.level for finding in findings} == {"ok"}
    assert {
        "environment",
        "gpus",
        "gpu memory",
        "cpu kernels",
        "compiler",
        "memory",
        "shared memory",
        "file limits",
        "clock",
        "auth",
        "disk",
    } == {finding.check for finding in findings}


@pytest.mark.parametrize(
    ("fault", "flags", "check", "level", "words"),
    [
        ({"python": (3, 10)}, {}, "environment", "error", "Python 3.10 is too old"),
        ({"packages": dict.fromkeys(PACKAGES, "1") | {"ray": None}}, {}, "environment", "error", "not installed: ray"),
        ({"gpus_seen": 2}, {}, "gpus", "error", "the driver reports 2 GPUs, but torch finds none"),
        ({}, {"gpus_per_rank": "0.5", "replicas": "2"}, "gpus", "error", "2 ranks need 1 GPUs, this machine has 0"),
        ({"gpus_seen": 2, "gpus_usable": 2}, {"replicas": "3"}, "gpus", "error", "3 ranks need 3 GPUs, this machine"),
        (
            {"gpus_seen": 2, "gpus_usable": 2, "launcher_problem": "there is no C compiler on the PATH"},
            {"gpus_per_rank": "1"},
            "compiler",
            "error",
            "no C compiler",
        ),
        (
            {"gpus_seen": 2, "gpus_usable": 2, "gpu_bytes": (1 << 18, 1 << 18)},
            {},
            "gpu memory",
            "error",
            "tensor_parallel_size 1: each rank's weights take at least",
        ),
        (
            {"memory_bytes": GIB // 2},
            {"kv_cache_bytes": str(GIB // 2)},
            "memory",
            "error",
            "2 ranks need 1.0 GiB for KV and 0.0 for weights, 0.5 GiB",
        ),
        (
            {},
            {"host_kv_memory": str(20 * GIB)},
            "memory",
            "error",
            "2 ranks need 0.0 GiB for KV and 0.0 for weights and 40.0 for evicted blocks, 32.0 GiB",
        ),
        ({"shared_memory_bytes": 64 << 20}, {}, "shared memory", "warning", "/dev/shm has 64 MiB"),
        ({"shared_memory_bytes": None}, {}, "shared memory", "warning", "no /dev/shm"),
        ({"open_files": 1024}, {}, "file limits", "warning", "1024 files"),
        ({"clock_synchronized": False}, {}, "clock", "warning", "not synchronised"),
        ({"token_mode": 0o644}, {}, "auth", "warning", "mode 644"),
        ({"token_mode": None}, {"ray_address": "head:6379"}, "auth", "warning", "no token here"),
        ({"disks": (DiskInfo("notes", "/n", GIB),)}, {}, "disk", "warning", "1.0 GiB free for notes in /n"),
        ({"disks": (DiskInfo("notes", "/n", 1),)}, {}, "disk", "error", "0.0 GiB"),
    ],
)
def test_each_fault_is_found_and_has_a_remedy(
    fault: dict[str, object], flags: dict[str, str], check: str, level: str, words: str
) -> None:
    """No other check reports a problem."""
    (found,) = faults(replace(WELL, **fault), **flags)

    assert (found.check, found.level) == (check, level)
    assert words in found.message
    assert found.remedy


def test_settings_that_would_be_refused_are_errors(tmp_path: Path) -> None:
    """An incomplete model, and a router that is open to everyone without keys."""
    settings = load_settings({"model": str(tmp_path), "host": "0.0.0.0", "port": "0"}, {})

    values, port, model, keys = examine_settings(settings, None)

    assert (values.level, port.level) == ("ok", "ok")
    assert (model.level, "no config.json" in model.message) == ("error", True)
    assert model.remedy
    assert keys.level == "warning"
    assert "--api-keys-file" in keys.remedy


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"autoscale": "2:4", "replicas": "5"}, "replicas: 5 is outside autoscale 2:4"),
        ({"autoscale": "4:2"}, "autoscale: '4:2' is not MIN:MAX"),
        ({"chat_template": "/nowhere/chat.jinja"}, "chat_template: no such file"),
        ({"disk_kv": "/nowhere/kv", "disk_kv_size": "1"}, "disk_kv /nowhere/kv: /nowhere is not a folder"),
        ({"disk_kv": "/"}, "disk_kv_size 0: set the bytes"),
        ({"response_store": "/nowhere/responses"}, "response_store: folder /nowhere does not exist"),
        ({"api_keys_file": "/nowhere/keys.yaml"}, "api_keys_file: "),
    ],
)
def test_what_serve_refuses_is_found_before(flags: dict[str, str], words: str) -> None:
    """Otherwise `homing doctor` is content and `homing serve` does not start."""
    (found,) = [each for each in examine_settings(load_settings(flags | {"port": "0"}, {}), None) if each.level != "ok"]

    assert (found.check, found.level) == ("settings", "error")
    assert words in found.message
    assert found.remedy


def test_the_models_of_a_running_cluster_are_checked(tmp_path: Path) -> None:
    """Not the demo model, which is only the default of a new cluster. A named model is checked instead of them."""
    broken = shutil.copytree(demo_model_path(), tmp_path / "model")
    (broken / "chat_template.jinja").write_text("{% for m in messages %}")
    entry = msgspec.structs.replace(
        own_entry("own", "a, b", None), url="http://127.0.0.1:1", sources=(("a", "demo"), ("b", str(broken)))
    )

    running = [each for each in examine_settings(load_settings({}, {}), entry) if each.check == "model"]
    named = [
        each for each in examine_settings(load_settings({"model": str(broken)}, {}), entry) if each.check == "model"
    ]

    assert [each.level for each in running] == ["ok", "error"]
    assert "chat_template.jinja" in running[1].message
    assert [each.level for each in named] == ["error"]


def test_what_a_template_refuses_is_a_warning(tmp_path: Path) -> None:
    """The model can be served, but every agent with a system prompt would get an error."""
    folder = shutil.copytree(demo_model_path(), tmp_path / "model")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"
    )

    (found,) = [
        each
        for each in examine_settings(load_settings({"model": str(folder), "port": "0"}, {}), None)
        if each.level != "ok"
    ]

    assert (found.check, found.level) == ("template", "warning")
    assert "no system" in found.message


def test_what_a_running_cluster_tells_is_told_on() -> None:
    """Refused replicas, missing replicas, and replicas whose events cannot be trusted."""
    row = {"replica_id": "r0", "state": "serving", "feed": "stale", "node": "n"}
    view = {
        "refused": [{"replica_id": "r1", "message": "another tokenizer"}],
        "absent": [{"replica_id": "r2", "reason": "no room"}],
        "replicas": [row, row | {"replica_id": "r3", "feed": "live"}],
        "models": [{"name": "fox", "serving": 2}, {"name": "owl", "serving": 0}],
    }

    found = [(finding.check, finding.level) for finding in examine_view(view)]

    assert found == [
        ("parity", "error"),
        ("replicas", "error"),
        ("replicas", "warning"),
        ("replicas", "ok"),
        ("replicas", "error"),
    ]


def row(state: str, feed: str) -> dict[str, str]:
    return {"replica_id": "r1", "state": state, "feed": feed}


@pytest.mark.parametrize(
    ("changes", "version", "level", "words"),
    [
        ({}, __version__, "ok", "5 run now"),
        ({}, "0.0.1", "ok", "the cluster runs 0.0.1"),
        ({"models": [{"name": "fox", "serving": 1}]}, __version__, "warning", "fox has one replica"),
        ({"replicas": [row("draining", "live")]}, __version__, "warning", "not now: r1"),
        ({"replicas": [row("serving", "stale")]}, __version__, "warning", "not now: r1"),
        ({"absent": [{"replica_id": "r3"}]}, __version__, "warning", "not now: r3"),
    ],
)
def test_whether_an_upgrade_is_safe(changes: dict[str, Any], version: str, level: str, words: str) -> None:
    """A replica is replaced while all others serve."""
    view = {"absent": [], "refused": [], "replicas": [], "models": [{"name": "fox", "serving": 2}]}

    found = examine_upgrade(view | {"in_flight": 3, "waiting": 2} | changes, version, 1)

    assert (found.check, found.level) == ("upgrade", level)
    assert words in found.message


@pytest.mark.parametrize(
    ("serving", "routers", "level", "words"),
    [
        (2, 1, "ok", "breaks all streams"),
        (2, 3, "ok", "breaks the streams of its clients"),
        (1, 3, "warning", "fox has one replica"),
    ],
)
def test_what_happens_if_a_process_is_killed(serving: int, routers: int, level: str, words: str) -> None:
    """An operator asks before touching anything."""
    found = examine_failure({"models": [{"name": "fox", "serving": serving}]}, routers)

    assert (found.check, found.level) == ("failure", level)
    assert words in found.message


def test_a_cluster_in_which_nothing_serves_is_an_error_with_its_remedy() -> None:
    """The remedy is separate from the problem, also for a port in use."""
    *_, replicas = examine_view({"refused": [], "absent": [], "replicas": [], "models": []})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        _, port, *_ = examine_settings(load_settings({"port": str(taken.getsockname()[1])}, {}), None)

    assert (replicas.level, port.level) == ("error", "error")
    assert "homing status" in replicas.remedy
    assert port.remedy.startswith("choose another port")


def test_a_finding_is_a_line_with_its_remedy_below() -> None:
    """This format is for people; programs get JSON."""
    told = plain(render([Finding("clock", "warning", "it is wrong", "mend it"), Finding("gpus", "ok", "none")]))

    assert told.splitlines() == [
        "!   clock  it is wrong",
        "           → mend it",
        "ok  gpus   none",
    ]


def test_the_command_looks_at_this_machine(tmp_path: Path) -> None:
    """All checks really run; findings depend on the machine, and the exit code on the findings."""
    out = io.StringIO()
    code = run(["doctor", "--json", "--port", "0", "--state-dir", str(tmp_path)], out)
    findings = json.loads(out.getvalue())

    assert code == int(any(finding["level"] == "error" for finding in findings))
    assert {"environment", "ports", "model", "keys", "clock", "cluster"} <= {finding["check"] for finding in findings}
    assert all(finding["remedy"] for finding in findings if finding["level"] == "warning")


def test_the_remedy_for_a_missing_package_can_be_followed() -> None:
    """Packages of the extra come with the extra; homing itself is on no package index."""
    (extra,) = faults(replace(WELL, packages=dict.fromkeys(PACKAGES, "1") | {"ray": None}))
    (other,) = faults(replace(WELL, packages=dict.fromkeys(PACKAGES, "1") | {"pyzmq": None}))

    assert extra.remedy == "pip install 'homing[serve]'"
    assert other.remedy == "make setup in a checkout, else: pip install pyzmq"


def test_a_router_in_front_of_engines_needs_no_extra() -> None:
    """Its users have no torch, and doctor must not send them to install it."""
    host = replace(WELL, packages=dict.fromkeys(PACKAGES, "1") | {"ray": None, "torch": None, "numba": None})

    assert not faults(host, backend="http://127.0.0.1:8000")
