"""The output of commands: columns, colours and progress on a terminal, plain lines elsewhere."""

import io
import select
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from rich.console import Console, RenderableType
from rich.table import Table

if TYPE_CHECKING:
    from rich.live import Live

#: Line width in characters when the output is not a terminal: wide enough never to wrap.
LINE = 1000

SHOW_EVERY_S = 0.1

#: Shows the progress of an activity, called with its name, the total and the number done.
ShowProgress = Callable[[str, int, int], None]


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def name_order(name: str) -> tuple[str, int, str]:
    """Sort key for replica names: groups them by model, r9 before r10."""
    return name.rstrip("0123456789"), len(name), name


def can_write(out: TextIO) -> bool:
    """Return whether a line can be written without blocking: False for a pipe that is full or has no reader."""
    try:
        writable = select.poll()
        writable.register(out.fileno(), select.POLLOUT)
    except OSError:  # an in-memory stream
        return True
    return [events for _, events in writable.poll(0)] == [select.POLLOUT]


def console(out: TextIO) -> Console:
    """Return a console that prints text as it is, without interpreting markup or highlighting numbers."""
    width = None if out.isatty() else LINE
    return Console(file=out, width=width, markup=False, highlight=False, emoji=False)


def table(columns: Sequence[str], rows: Sequence[Sequence[RenderableType]], *, right: Collection[str] = ()) -> Table:
    """Return a table of aligned columns, right-aligned if in `right`. It has no header if all names are empty."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(columns), header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left")
    for row in rows:
        made.add_row(*row)
    return made


def show(out: TextIO, *parts: RenderableType) -> None:
    if not out.isatty():
        print(plain(*parts), file=out)
        return
    terminal = console(out)
    for part in parts:
        terminal.print(part)


def plain(*parts: RenderableType) -> str:
    """Render as lines without colours or trailing spaces."""
    out = io.StringIO()
    lines = console(out)
    for part in parts:
        lines.print(part, soft_wrap=isinstance(part, str))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


@contextmanager
def progress(err: TextIO) -> Iterator[ShowProgress]:
    """Show progress bars on a terminal, removed at the end; nothing elsewhere."""
    if not err.isatty():
        yield lambda *_: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(err), transient=True) as bars:
        tasks: dict[str, TaskID] = {}
        shown_s = 0.0

        def show_progress(what: str, total: int, done: int) -> None:
            nonlocal shown_s
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total or None)
            elif done != total and time.monotonic() - shown_s < SHOW_EVERY_S:
                return
            shown_s = time.monotonic()
            bars.update(tasks[what], completed=done, visible=not total or done < total)

        yield show_progress


class Waiting:
    """Shows the pending parts, each on a line with a spinner below the terminal's output; nothing elsewhere."""

    def __init__(self, out: TextIO) -> None:
        self._console = console(out)
        self._live: Live | None = None
        self._shown: Mapping[str, str] = {}

    def show(self, parts: Mapping[str, str]) -> None:
        """Show the state of each pending part. An empty mapping means that none is pending."""
        if not self._console.is_terminal or parts == self._shown:
            return
        from rich.live import Live
        from rich.spinner import Spinner

        self._shown = dict(parts)
        if not parts:
            self.close()
            return
        if self._live is None:
            self._live = Live(console=self._console, transient=True, redirect_stdout=False, redirect_stderr=False)
            self._live.start()
        lines = Table.grid(padding=(0, 2))
        for part, state in parts.items():
            lines.add_row(Spinner("dots"), part, state)
        self._live.update(lines)

    def line(self, text: str) -> None:
        """Print a line above the spinners."""
        if self._live is not None:
            self._console.print(text, soft_wrap=True)
        else:
            print(text, file=self._console.file, flush=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live, self._shown = None, {}
