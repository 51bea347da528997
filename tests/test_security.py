"""Checks SECURITY.md against the source: its statements about sockets and pickles, and the files it names."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "SECURITY.md").read_text()
ROOMS = ("cluster", "events", "kvcache", "replica", "router")
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
#: Modules that deserialize arbitrary objects, and below them calls of other libraries that use pickle inside.
PICKLES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
IMPORTS_PICKLES = re.compile(rf"^\s*(?:import|from)\b.*\b(?:{'|'.join(PICKLES)})\b", re.MULTILINE)
PICKLING = re.compile(r"\b(send_pyobj|recv_pyobj|\w+_object_list|all_gather_object|gather_object|torch\.load)\(")
MAKES_A_SOCKET = re.compile(r"\.socket\((zmq\.[A-Z]+|kind)")
BOUNDED = re.compile(r"maxmsgsize = |zmq\.MAXMSGSIZE")
#: Modules whose only socket is inproc: libzmq's own authentication (ZAP) socket.
WITHIN_THE_PROCESS = {"events/security/curve_authenticator.py"}


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def with_sockets() -> list[Path]:
    return [
        path for path in SOURCES if MAKES_A_SOCKET.search(path.read_text()) and name(path) not in WITHIN_THE_PROCESS
    ]


def test_nothing_of_ours_reads_or_writes_pickles() -> None:
    """Loading a pickle runs its sender's code. Ray's actor calls use pickle, behind Ray's token, as the page says."""
    texts = {name(path): path.read_text() for path in SOURCES}
    found = [f"{file}: {line}" for file, text in texts.items() for line in IMPORTS_PICKLES.findall(text)]
    found.remove("replica/models/hf.py: from pickle")  # the error of a refused pytorch_model.bin
    found += [f"{file}: {call}" for file, text in texts.items() for call in PICKLING.findall(text)]

    assert found == []
    assert "actor calls are pickles" in PAGE


def test_the_page_lists_every_file_with_a_zeromq_socket() -> None:
    """A new socket is an attack surface: it must come with a size limit, fuzzing and an entry in the page."""
    listed = set(
        re.findall(r"`((?:cluster|events|replica|router)/[\w/]+\.py)`", PAGE.split("## Sockets")[1].split("## ")[0])
    )

    assert listed == {name(path) for path in with_sockets()}


@pytest.mark.parametrize("path", with_sockets(), ids=name)
def test_every_socket_has_a_largest_frame(path: Path) -> None:
    """libzmq closes the connection of a peer that sends a longer frame, before the frame fills the memory."""
    assert BOUNDED.search(path.read_text())


def test_the_tests_that_the_page_names_are_there() -> None:
    """The page cites tests as evidence, so they must exist."""
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", PAGE))

    assert len(named) >= 8
    assert [path for path in sorted(named) if not (ROOT / path).is_file()] == []
