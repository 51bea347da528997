"""Command output at a terminal and elsewhere."""

import contextlib
import io
import os

import pytest

from homing.cluster.output import Waiting, can_write, plain, progress, show, table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def a_terminal_with_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


ROWS = table(("", "replica", "running"), [("→", "r0", "12"), ("", "r[1]", "3")], right=("running",))


def test_tables_are_aligned_lines_without_a_terminal() -> None:
    """Scripts split the lines into words."""
    out = io.StringIO()

    show(out, "two replicas", "", ROWS)

    assert out.getvalue().splitlines() == [
        "two replicas",
        "",
        "   replica  running",
        "→  r0            12",
        "   r[1]           3",
    ]


def test_a_long_line_is_not_wrapped_without_a_terminal() -> None:
    """A path or an address must not be broken over lines."""
    assert plain("word " * 300, table(("", ""), [("r0", "word " * 100)])).count("\n") == 1


def test_a_terminal_gets_the_same_words_with_colours() -> None:
    out = Terminal()

    show(out, ROWS)

    assert "\x1b[1m" in out.getvalue()
    assert all(word in out.getvalue() for word in ("replica", "r0", "r[1]"))


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_on_a_terminal_only(terminal: bool) -> None:
    """A file with a hundred thousand carriage returns is useless."""
    err = Terminal() if terminal else io.StringIO()

    with progress(err) as show_progress:
        for done in range(1, 4):
            show_progress("requests", 3, done)
        show_progress("of unknown length", 0, 7)

    assert ("requests" in err.getvalue(), "7/?" in err.getvalue()) == (terminal, terminal)


@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_waited_for_stands_below_what_has_happened(terminal: bool) -> None:
    """It disappears once everything is ready. Logs get no spinner."""
    out = Terminal() if terminal else io.StringIO()
    waiting = Waiting(out)

    waiting.show({"r0": "reading the weights, 40 %"})
    waiting.line("r1 is ready")
    waiting.show({})
    waiting.line("all are ready")

    assert ("40 %" in out.getvalue()) == terminal
    assert "r1 is ready\n" in out.getvalue()
    assert out.getvalue().endswith("all are ready\n")


def test_a_pipe_that_nobody_reads_has_no_room_and_one_that_is_read_has() -> None:
    """`homing serve` must keep supervising its replicas when its output is not read."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as out:
        empty = can_write(out)
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * 4096)
        full = can_write(out)
        os.close(reader)
        broken = can_write(out)

    assert (empty, full, broken, can_write(io.StringIO())) == (True, False, False, True)
