"""Reports of benchmarks: a table for people and, with `--out FILE`, JSON for programs.

Each row holds one figure; lower is better unless the row says otherwise. `goal` is the target of the issue that asked
for the figure; `peer` is another project's figure from the same run, None if that project is not installed.
"""

import argparse
import json
import platform
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from os import cpu_count
from pathlib import Path


@dataclass(slots=True, frozen=True)
class Row:
    """One figure."""

    name: str
    unit: str
    ours: float
    goal: float | None = None
    peer: float | None = None
    peer_name: str = ""
    higher_is_better: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without a goal."""
        if self.goal is None:
            return None
        return self.ours >= self.goal if self.higher_is_better else self.ours <= self.goal


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with the option that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    return parser


def publish(rows: Sequence[Row], out: Path | None, packages: Iterable[str]) -> None:
    """Print the table; if `out` is given, write JSON there, including the versions of these packages."""
    print(table(rows))
    if out is not None:
        found = [{**asdict(row), "met": row.met} for row in rows]
        report = {"machine": machine(), "versions": versions(packages), "command": shlex.join(sys.argv), "rows": found}
        out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def table(rows: Sequence[Row]) -> str:
    """A Markdown table."""
    peers = sorted({row.peer_name for row in rows if row.peer is not None})
    lines = [["", "unit", "ours", "goal", "met", *peers]]
    lines += [_cells(row, peers) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in (lines[0], rule, *lines[1:])
    )


def _cells(row: Row, peers: Sequence[str]) -> list[str]:
    met = {None: "", True: "yes", False: "no"}[row.met]
    theirs = [_number(row.peer) if name == row.peer_name else "" for name in peers]
    return [row.name, row.unit, _number(row.ours), _number(row.goal), met, *theirs]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def machine() -> str:
    """Processor and number of cores, as far as the system reports them."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {cpu_count()} cores"


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of Python and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
