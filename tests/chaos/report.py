"""Formats a run's results as text."""

from collections import defaultdict
from collections.abc import Sequence

from .judge import BAD, Course, Outcome, Row

HEADER = (
    *("fault", "requests", "wrong", "errors", "cut"),
    *("gap before", "gap at fault", "longest gap", "first token", "out of routing", "rebuilt"),
)


def table(rows: Sequence[Row]) -> str:
    """The rows as a text table. Times depend on the machine and its other load."""
    return _aligned([HEADER, *(cells(row) for row in rows)])


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    """A text table; the first line is its head."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    padded = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([padded[0], "-|-".join("-" * width for width in widths), *padded[1:]])


def summary(rows: Sequence[Row]) -> str:
    """One line per fault over all seeds, and one for all faults."""
    lines = [("fault", "times", "answers compared", "wrong", "errors", "cut", "longest gap", "slowest recovery")]
    by_fault: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_fault[row.fault].append(row)
    for name, group in [*sorted(by_fault.items()), ("all", list(rows))]:
        seconds = [row.rebuilt_s for row in group if row.rebuilt_s is not None]
        lines.append(
            (
                name,
                str(len(group)),
                str(sum(row.requests for row in group)),
                str(sum(row.outcomes.get(bad, 0) for row in group for bad in BAD)),
                str(sum(sum(row.errors.values()) for row in group)),
                str(sum(row.outcomes.get(Outcome.CUT, 0) for row in group)),
                f"{max((row.longest_gap_s for row in group), default=0.0) * 1000:.0f} ms",
                _seconds(max(seconds, default=None)),
            )
        )
    return _aligned(lines)


def cells(row: Row) -> tuple[str, ...]:
    """One row's cells as text."""
    bad = sum(row.outcomes.get(outcome, 0) for outcome in BAD)
    cut = row.outcomes.get(Outcome.CUT, 0)
    errors = ", ".join(f"{count} {code}" for code, count in sorted(row.errors.items())) or "0"
    return (
        row.fault,
        str(row.requests),
        str(bad),
        errors,
        str(cut),
        f"{row.gap_before_s * 1000:.0f} ms",
        f"{row.gap_at_s * 1000:.0f} ms",
        f"{row.longest_gap_s * 1000:.0f} ms",
        f"{row.longest_first_s * 1000:.0f} ms",
        _seconds(row.out_s),
        _seconds(row.rebuilt_s),
    )


def courses(found: Sequence[Course]) -> str:
    """One line per number of a soak that changed, and for all memory."""
    lines = [
        f"{each.subject}: {each.metric} {each.first:.0f} first, {each.middle:.0f} midway, {each.last:.0f} last"
        for each in found
        if each.metric == "KiB" or each.first != each.last
    ]
    return "\n".join(lines)


def violations(rows: Sequence[Row]) -> str:
    """One line per violated requirement; empty if there is none."""
    return "\n".join(f"{row.fault}: {words}" for row in rows for words in row.violations)


def _seconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.2f} s"
