"""Formats a run's results as text."""

from collections.abc import Sequence

from .judge import Course, Outcome, Row

HEADER = (
    *("fault", "requests", "wrong", "errors", "cut"),
    *("gap before", "gap at fault", "longest gap", "first token", "out of routing", "rebuilt"),
)


def table(rows: Sequence[Row]) -> str:
    """The rows as a text table. Times depend on the machine and its other load."""
    lines = [HEADER, *(cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    padded = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([padded[0], "-|-".join("-" * width for width in widths), *padded[1:]])


def cells(row: Row) -> tuple[str, ...]:
    """One row's cells as text."""
    bad = sum(row.outcomes.get(outcome, 0) for outcome in (Outcome.WRONG, Outcome.UNCLEAR, Outcome.LATE))
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
