"""Presents an analysis as text, as JSON and as charts. Only formats: computes no new results."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..plots import Line, LineChart, Page, Table
from .capacity import KvCapacity
from .log_analysis import HEADROOM, USEFUL_SHARE, LogReport
from .order import OrderFinding
from .reuse_stack import HitCurve

_USEFUL = f"{100 * USEFUL_SHARE:.0f} %"
ESTIMATE = "estimates: no queues, no concurrency; affine: as homing routes, round-robin: without regard to caches"
NO_TEXT = "this log has no text: advice on prompt order needs requests with messages or prompts"


@dataclass(slots=True, frozen=True)
class Findings:
    source: str
    log_format: str
    tokenizer: str | None  #: which one was used; None: the log already has ids
    log: LogReport
    sizes: Sequence[int]
    advice: Sequence[OrderFinding] | None  #: None: the log has no text
    sampled: int  #: number of requests that the advice is based on
    skipped: int  #: number of lines and requests that could not be read
    capacity: KvCapacity | None = None
    prefill_rate: float | None = None  #: tokens per second
    show_snippets: bool = True


def text(found: Findings) -> str:
    """The report for a terminal."""
    sections = [_head(found), _windows(found), _recommendation(found), _sizes(found), _breaks(found), _advice(found)]
    return "\n\n".join("\n".join(section) for section in sections if section)


def _head(found: Findings) -> list[str]:
    log = found.log
    span = f" in {_duration(log.span_s)}" if log.span_s is not None else ""
    mean = log.prompt_tokens / max(1, log.requests)
    saved = f"{log.saved_tokens():,} prompt tokens ({_percent(log.share(log.curve.endless))}) if nothing is evicted"
    if found.prefill_rate:
        saved += f", {_duration(log.saved_tokens() / found.prefill_rate)} of prefill"
    rows = [
        ("requests", f"{log.requests:,}{span}"),
        ("prompt tokens", f"{log.prompt_tokens:,}, mean {mean:,.0f}"),
        ("full blocks", f"{log.full_blocks:,}, distinct {log.distinct_blocks:,}"),
        ("shared blocks", f"{log.shared_blocks:,} distinct blocks are in two or more requests"),
        ("sharing requests", f"{log.sharing_requests:,} ({_percent(log.sharing_requests / max(1, log.requests))})"),
        (
            "mean shared prefix",
            f"{log.mean_shared_tokens:,.0f} tokens ({_percent(log.mean_shared_tokens / max(1, mean))})",
        ),
        ("potential savings", saved),
    ]
    if found.tokenizer:
        rows.append(("tokenizer", found.tokenizer))
    if found.skipped:
        rows.append(("left out", f"{found.skipped:,} lines or requests that could not be read"))
    if log.late_requests:
        rows.append(("out of order", f"{log.late_requests:,} requests are older than the line before; order kept"))
    lines = [f"{name:<20} {value}" for name, value in rows]
    return [f"{found.source} · {found.log_format} · blocks of {log.block_size} tokens", "", *lines]


def _windows(found: Findings) -> list[str]:
    log = found.log
    rows = [[_duration(row.window_s), f"{row.peak_blocks:,}", f"{row.mean_blocks:,.0f}"] for row in log.windows]
    rows.append(["whole log", f"{log.distinct_blocks:,}", ""])
    return ["working set: distinct blocks used within", *columns([["", "peak", "mean"], *rows])]


def _recommendation(found: Findings) -> list[str]:
    log, room = found.log, found.capacity
    blocks = log.recommended_blocks
    base = max(log.useful_blocks, log.largest_prompt_blocks)
    reason = f"{_USEFUL} of what an endless cache finds" if base == log.useful_blocks else "the largest prompt"
    lines = [
        f"recommended: {blocks:,} blocks = {base:,} ({reason}) + {100 * (HEADROOM - 1):.0f} % headroom; "
        f"saves {_percent(log.share(log.curve.hits(blocks)))} of prompt tokens"
    ]
    if room is not None:
        lines.append(f"{'':<13}{room.gib(blocks):,.2f} GiB at {room.block_bytes:,} bytes per block")
    if room is not None and room.gpu_bytes is not None:
        gpus = room.gpus(blocks) or 0
        lines.append(
            f"{'':<13}{gpus:,} GPU{'s' if gpus != 1 else ''} with {room.gpu_bytes:,} bytes for KV, "
            f"{room.gpu_blocks:,} blocks each ({(room.gpu_blocks or 0) + 1:,} with the null block)"
        )
    return lines


def _sizes(found: Findings) -> list[str]:
    return [
        "prompt tokens found in caches (LRU), by blocks of one replica",
        *columns([_size_header(found), *_size_rows(found)]),
        f"({ESTIMATE})" if found.log.replicas else "",
    ]


def _size_header(found: Findings) -> list[str]:
    memory = ["GiB"] if found.capacity else []
    return ["blocks", *memory, "1 replica", *(f"{row.replicas} {row.rule}" for row in found.log.replicas)]


def _size_rows(found: Findings) -> list[list[str]]:
    log = found.log
    curves = [log.curve, *(row.curve for row in log.replicas)]
    no_memory = [""] if found.capacity else []
    rows: list[list[str]] = []
    for size in found.sizes:
        memory = [f"{found.capacity.gib(size):,.2f}"] if found.capacity else []
        note = " *" if size < log.largest_prompt_blocks else ""
        rows.append([f"{size:,}{note}", *memory, *(_percent(log.share(curve.hits(size))) for curve in curves)])
    rows.append(["endless", *no_memory, *(_percent(log.share(curve.endless)) for curve in curves)])
    rows.append([f"for {_USEFUL}", *no_memory, *(f"{curve.size_for(USEFUL_SHARE):,}" for curve in curves)])
    return rows


def _breaks(found: Findings) -> list[str]:
    log = found.log
    rows = []
    for row in log.breaks:
        last = f" to {row.to_blocks:,}" if row.to_blocks > row.from_blocks else ""
        rows.append([f"{row.from_blocks:,}{last}", f"{row.requests:,}", _percent(row.requests / log.requests)])
    if log.known_entirely:
        rows.append(["all of them", f"{log.known_entirely:,}", _percent(log.known_entirely / log.requests)])
    lines = ["where sharing ends: known blocks at the head of a prompt", *columns([["blocks", "requests", ""], *rows])]
    if any(size < log.largest_prompt_blocks for size in found.sizes):
        return ["* less than the largest prompt, which could not run", "", *lines]
    return lines


def _advice(found: Findings) -> list[str]:
    if found.advice is None:
        return [f"prompt order: {NO_TEXT}"]
    what = "what" if found.advice else "nothing found that"
    lines = [f"prompt order: {what} varies early and breaks sharing ({found.sampled:,} requests examined)"]
    for number, finding in enumerate(found.advice, 1):
        shown = ", ".join(f"“{snippet}”" for snippet in finding.snippets) if found.show_snippets else "not shown"
        texts = f", {finding.groups} different texts" if finding.groups > 1 else ""
        lines += [
            "",
            f"{number}. {finding.part}, character {finding.character:,}: {_WORDS[finding.kind]} ({shown})",
            f"   It is followed by about {finding.common_tokens:,} tokens that most of {finding.requests:,} requests "
            f"have in common{texts}.",
            f"   Such a request shares {finding.now_tokens:,.0f} tokens; it would share {finding.then_tokens:,.0f}: "
            f"{_percent(_saved_share(found, finding))} of all prompt tokens saved.",
            f"   {finding.advice}",
        ]
    return lines


_WORDS = {
    "time": "a date or time differs",
    "id": "an id differs",
    "order": "the order of equal texts differs",
    "text": "the text differs",
}


def _saved_share(found: Findings, finding: OrderFinding) -> float:
    """Share of the whole log's prompt tokens that a finding would save, extrapolated from the sample."""
    scale = found.log.requests / max(1, found.sampled)
    return min(1.0, finding.saved_tokens * scale / max(1, found.log.prompt_tokens))


def as_json(found: Findings) -> dict[str, Any]:
    """All results, for programs. Shares are of all prompt tokens."""
    log, room = found.log, found.capacity
    return {
        "log": found.source,
        "format": found.log_format,
        "block_size": log.block_size,
        "requests": log.requests,
        "skipped": found.skipped,
        "out_of_order": log.late_requests,
        "span_s": log.span_s,
        "prompt_tokens": log.prompt_tokens,
        "full_blocks": log.full_blocks,
        "distinct_blocks": log.distinct_blocks,
        "shared_blocks": log.shared_blocks,
        "sharing_requests": log.sharing_requests,
        "largest_prompt_blocks": log.largest_prompt_blocks,
        "mean_shared_tokens": log.mean_shared_tokens,
        "potential_saved_tokens": log.saved_tokens(),
        "potential_saved_share": log.share(log.curve.endless),
        "potential_saved_s": log.saved_tokens() / found.prefill_rate if found.prefill_rate else None,
        "working_set": [asdict(row) for row in log.windows],
        "useful_blocks": log.useful_blocks,
        "recommended_blocks": log.recommended_blocks,
        "recommended_share": log.share(log.curve.hits(log.recommended_blocks)),
        "bytes_per_block": room.block_bytes if room else None,
        "recommended_bytes": log.recommended_blocks * room.block_bytes if room else None,
        "gpu_blocks": room.gpu_blocks if room else None,
        "recommended_gpus": room.gpus(log.recommended_blocks) if room else None,
        "sizes": [
            {
                "blocks": size,
                "share": log.share(log.curve.hits(size)),
                "replicas": [
                    {"replicas": row.replicas, "rule": row.rule, "share": log.share(row.curve.hits(size))}
                    for row in log.replicas
                ],
            }
            for size in found.sizes
        ],
        "sharing_ends": [asdict(row) for row in log.breaks],
        "known_entirely": log.known_entirely,
        "advice": None if found.advice is None else [_finding_json(found, each) for each in found.advice],
        "advice_requests": found.sampled,
    }


def _finding_json(found: Findings, finding: OrderFinding) -> dict[str, Any]:
    fields = asdict(finding)
    del fields["saved_tokens"]
    if not found.show_snippets:
        fields["snippets"] = None
    return {**fields, "saved_share": _saved_share(found, finding), "advice": finding.advice}


def page(found: Findings) -> Page:
    """The curves, with working set and recommendation marked; in HTML, tables and advice follow."""
    log = found.log
    grid, last = [max(1, min(found.sizes))], max(*found.sizes, log.recommended_blocks)
    while grid[-1] < last:  # a smooth curve: four sizes per doubling
        grid.append(min(last, max(grid[-1] + 1, round(grid[-1] * 2**0.25))))
    marks: dict[str, float] = {}
    if log.useful_blocks:
        marks[f"{_USEFUL} of what can be found: {log.useful_blocks:,}"] = log.useful_blocks
    marks[f"recommended: {log.recommended_blocks:,}"] = log.recommended_blocks
    if log.windows:
        widest = log.windows[-1]
        marks[f"working set of {_duration(widest.window_s)}: {widest.peak_blocks:,}"] = widest.peak_blocks
    families = {count: family for family, count in enumerate(dict.fromkeys(row.replicas for row in log.replicas), 1)}

    def shares(name: str, curve: HitCurve, family: int, *, dashed: bool = False) -> Line:
        return Line(name, grid, [log.share(curve.hits(size)) for size in grid], dashed, family)

    lines = [shares("1 replica", log.curve, 0)]
    for row in log.replicas:
        dashed = row.rule != "affine"
        lines.append(shares(f"{row.replicas} {row.rule}", row.curve, families[row.replicas], dashed=dashed))
    chart = LineChart(
        f"Prompt tokens found in caches: {found.source}",
        f"blocks of {log.block_size} tokens in the cache of one replica",
        "share of prompt tokens",
        lines,
        marks,
        log_x=True,
        percent=True,
    )
    sizes = Table("Prompt tokens found, by blocks of one replica", _size_header(found), _size_rows(found))
    notes = ["\n".join(section) for section in (_head(found), _windows(found), _recommendation(found), _advice(found))]
    return Page(f"homing analyze {found.source}", [chart], [sizes], notes)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:,.0f} s" if seconds >= 10 else f"{seconds:,.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:,.0f} min"
    return f"{seconds / 3600:,.1f} h"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with right-aligned columns of minimum width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
