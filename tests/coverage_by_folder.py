"""Print the test coverage of each folder, from the data of `pytest --cov`. Run by `make coverage`.

Only code run in the test processes is counted: not code compiled by numba, and not the processes of clusters.
"""

import sys
from collections import Counter
from io import StringIO
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory

import coverage
import msgspec


class Lines(msgspec.Struct):
    """Line counts of one file."""

    num_statements: int
    covered_lines: int


class File(msgspec.Struct):
    """One file's entry in the output of `coverage json`."""

    summary: Lines


class Report(msgspec.Struct):
    """The output of `coverage json`, without the fields that are not used here."""

    files: dict[str, File]


def read_report() -> Report:
    """Read each file's line counts from `.coverage`."""
    data = coverage.Coverage()
    data.load()
    with TemporaryDirectory() as folder:
        path = Path(folder, "coverage.json")
        data.json_report(outfile=str(path))
        return msgspec.json.decode(path.read_bytes(), type=Report)


def table(report: Report) -> str:
    """The table as text: one line per folder, then the total."""
    statements: Counter[str] = Counter()
    executed: Counter[str] = Counter()
    for name, file in report.files.items():
        for folder in (str(PurePath(name).parent), "total"):
            statements[folder] += file.summary.num_statements
            executed[folder] += file.summary.covered_lines
    out = StringIO()
    print(f"{'folder':<45}{'statements':>11}{'executed':>10}", file=out)
    for folder in [*sorted(statements.keys() - {"total"}), "total"]:
        share = executed[folder] / max(1, statements[folder])
        print(f"{folder:<45}{statements[folder]:>11}{share:>10.0%}", file=out)
    return out.getvalue()


if __name__ == "__main__":
    sys.stdout.write(table(read_report()))
