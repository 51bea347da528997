"""The fleet of engines: what was discovered about each, and the replicas that it gives a router."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from homing.router.errors import BackendsInvalid, EngineNotFound
from homing.router.replicas.external.discovery import EngineAddress, EngineInfo
from homing.router.replicas.external.fleet import EngineFleet
from homing.router.replicas.external.http_client import Address
from homing.router.replicas.external.probe import Card
from homing.router.replicas.external.sources import EngineDnsName, EngineFile


def found(address: EngineAddress, *ranks: int, events: str = "tcp://h:5557") -> EngineInfo:
    return EngineInfo(
        address=address,
        kind="vllm",
        version="0.33",
        cards=(Card("m", "org/m", 4096),),
        model_path="",
        block_size=16,
        ranks=ranks,
        events=events,
        replay="",
    )


def test_each_rank_is_a_replica_with_event_sockets_of_its_own() -> None:
    """Ranks share no cache; vLLM adds the rank to the port."""
    fleet = EngineFleet()
    one, many = (fleet.add(EngineAddress(url), "flags") for url in ("http://a", "http://b"))
    assert not list(fleet.replica_addresses())

    one.info, many.info = found(one.address), found(many.address, 0, 1)

    assert [(each.replica_id, each.events, each.rank) for each in fleet.replica_addresses()] == [
        ("b0", "tcp://h:5557", None),
        ("b1.0", "tcp://h:5557", 0),
        ("b1.1", "tcp://h:5558", 1),
    ]


def test_what_is_missing_is_said_with_its_remedy() -> None:
    """Without events the router guesses; the message contains the flags that fix it."""
    lines = list(found(EngineAddress("http://a"), events="").missing())

    assert len(lines) == 1
    assert "approximate" in lines[0]
    assert "--kv-events-config" in lines[0]


def test_a_source_replaces_its_own_engines_alone() -> None:
    """An engine that stays keeps its name and what was discovered about it."""
    fleet = EngineFleet()
    fleet.add(EngineAddress("http://a"), "flags")
    assert fleet.replace([EngineAddress("http://b"), EngineAddress("http://c")], "file")
    kept = fleet.engines["b2"]

    assert fleet.replace([EngineAddress("http://c"), EngineAddress("http://d"), EngineAddress("http://a")], "file")
    assert not fleet.replace([EngineAddress("http://c"), EngineAddress("http://d")], "file")

    assert {name: each.address.url for name, each in fleet.engines.items()} == {
        "b0": "http://a",
        "b2": "http://c",
        "b3": "http://d",
    }
    assert fleet.engines["b2"] is kept


def test_mistakes_are_refused_by_name() -> None:
    fleet = EngineFleet()
    fleet.add(EngineAddress("http://a/v1"), "flags")

    with pytest.raises(BackendsInvalid, match="named twice"):
        fleet.add(EngineAddress("http://a"), "api")
    with pytest.raises(BackendsInvalid, match=r"name its host instead of \*"):
        fleet.add(EngineAddress("http://b", events="tcp://*:1"), "api")
    with pytest.raises(EngineNotFound):
        fleet.remove("http://b")
    assert fleet.remove("http://a/").name == "b0"


def test_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    """URLs and maps may be mixed in the list; an error names the file."""
    path = tmp_path / "engines.yaml"
    path.write_text("- http://a\n- {url: http://b, events: tcp://b:1}\n")
    source = EngineFile(path)

    assert source.read() == [EngineAddress("http://a"), EngineAddress("http://b", "tcp://b:1")]
    assert source.read() is None
    path.write_text("- {url: http://b, port: 1}\n")
    with pytest.raises(BackendsInvalid, match=r"engines\.yaml.*port"):
        source.read()
    path.write_text("- {url: http://b, url: http://c}\n")
    with pytest.raises(BackendsInvalid, match=r"engines\.yaml: 'url' occurs twice"):
        source.read()
    path.write_text("")
    assert source.read() == []


def test_a_name_stands_for_its_addresses() -> None:
    """The name resolves as that of a headless Service does."""
    source = EngineDnsName(Address.of("dns+http://127.0.0.1:81"), "tcp://127.0.0.1:5557", "")

    assert source.read() == [EngineAddress("http://127.0.0.1:81", "tcp://127.0.0.1:5557")]
    assert source.read() is None


def test_engines_follow_the_addresses_of_their_name() -> None:
    """Pods come and go. Each is an engine with its own event sockets; an engine that stays keeps its name."""
    known = [{"10.0.0.1", "10.0.0.2"}, {"fd00::3", "10.0.0.2"}, set[str]()]
    answers = iter(known)
    name = Address.of("dns+http://vllm.default.svc:8000")
    source = EngineDnsName(name, "tcp://vllm.default.svc:5557", "", lambda host, port: next(answers))
    fleet, seen = EngineFleet(), []
    for _ in known:
        fleet.replace(source.read() or [], source.name)
        seen.append({engine.name: (engine.address.url, engine.address.events) for engine in fleet.engines.values()})

    second = ("http://10.0.0.2:8000", "tcp://10.0.0.2:5557")
    assert seen == [
        {"b0": ("http://10.0.0.1:8000", "tcp://10.0.0.1:5557"), "b1": second},
        {"b1": second, "b2": ("http://[fd00::3]:8000", "tcp://[fd00::3]:5557")},
        {},
    ]


def test_engines_stay_while_no_name_server_answers() -> None:
    """Only a server that says so removes them: CoreDNS restarts, and that must not take every engine out of routing."""

    def unreachable(host: str, port: int) -> set[str]:
        raise OSError(-3, "Temporary failure in name resolution")

    source = EngineDnsName(Address.of("dns+http://vllm.default.svc:8000"), "", "", unreachable)

    with pytest.raises(BackendsInvalid, match="cannot be resolved: Temporary failure"):
        source.read()


IN_NAMESPACES = ["unshare", "-rmn"]


@pytest.mark.slow
def test_a_headless_service_is_read_from_its_name_server() -> None:
    """A name server answers as Kubernetes specifies: ready pods, none, too many for a datagram, or not at all."""
    program = Path(__file__).with_name("dns_program.py")
    try:
        subprocess.run([*IN_NAMESPACES, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("namespaces cannot be made here")

    ran = subprocess.run([*IN_NAMESPACES, sys.executable, "-P", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    two, restarting, silent, many, none, one = (json.loads(line) for line in ran.stdout.splitlines())

    second = ["http://10.0.0.2:8000", "tcp://10.0.0.2:5557"]
    assert two == [["http://10.0.0.1:8000", "tcp://10.0.0.1:5557"], second]
    assert restarting == silent == "vllm.default.svc cannot be resolved: Temporary failure in name resolution"
    assert len(many) == 60
    assert (none, one) == ([], [second])
