"""`homing top`: shows the essentials of the router's live page in a terminal, from the same stream (router/http/live).

On a terminal, it redraws with every frame; elsewhere, or with `--once`, it prints the view once as plain lines.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Annotated, Any, NoReturn, TextIO

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from ..client import follow_events, read_key, router_urls
from ..errors import ClusterError
from ..flags import NOTHING, FindCluster, Out, Url, option, settings_of
from ..output import LINE, console, count, name_order, plain, table
from ..request_records import clock, printable, seconds

#: Length in seconds of the window over which rates are averaged, by the router's samples.
RATE_S = 60.0
RETRY_S = 2.0
MAX_PREFIXES = 8
MAX_DECISIONS = 8
MAX_FAILURES = 4
MAX_STREAMS = 8
#: Below this width, the table of replicas leaves out what is on the live page.
WIDE = 120
BLOCK_STATES = ("referenced", "pinned", "cached", "free")
COLUMNS = ("replica", "state", "events", "running", "waiting", *BLOCK_STATES, "hit rate", "evicted next")
NARROW = ("replica", "state", "running", "waiting", "kv used", "hit rate")
NUMBERS = frozenset(
    {"running", "waiting", *BLOCK_STATES, "kv used", "hit rate", "requests", "tokens", "expected", "took", "age"}
    | {"prompt", "generated"}
)
#: Columns that are never cut.
WHOLE = frozenset({"replica", "to", "on"})
#: Fields of a sample in the documents `trend/N` (router/http/live/trends.py).
SAMPLE = ("at", "requests", "failed", "refused", "prompt_tokens", "cached_tokens", "running", "waiting", "ttft")


@dataclass(slots=True, frozen=True)
class Section:
    """A table of the view; if it has no rows, only its title is shown."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(slots=True)
class LiveView:
    """The stream's documents as of the last frame."""

    documents: dict[str, Any] = field(default_factory=dict)
    now: float = 0.0  #: seconds since 1970
    problem: str = ""  #: why no frames arrive; empty if they do

    def apply(self, frame: Mapping[str, Any]) -> None:
        if frame["all"]:
            self.documents.clear()
        self.documents.update(frame["set"])
        for name in frame["gone"]:
            self.documents.pop(name, None)
        self.problem, self.now = "", frame["now"]

    def before(self) -> dict[str, Any] | None:
        """The router's totals about RATE_S seconds ago, or when it started; None: there are none."""
        samples = [dict(zip(SAMPLE, each, strict=True)) for each in self.of("trend").values()]
        recent = [each for each in samples if self.now - RATE_S <= each["at"] <= self.now]
        return min(recent or samples, key=lambda each: float(each["at"]), default=None)

    def of(self, kind: str) -> dict[str, Any]:
        """Documents of one kind, by their names without the kind."""
        return {name[len(kind) + 1 :]: each for name, each in self.documents.items() if name.startswith(f"{kind}/")}


def top(
    *,
    flags: FindCluster = NOTHING,
    out: Out,
    url: Url = None,
    api_key_file: Annotated[
        str, option("file with an admin's API key (-: standard input)", metavar="FILE", allow_leading_hyphen=True)
    ] = "",
    once: Annotated[bool, option("print it once as plain lines; automatic if the output is not a terminal")] = False,
) -> int:
    """Show the live view until interrupted. Raises NotRunning and ClusterError."""
    address = f"{router_urls(settings_of(flags), url)[0]}/live"
    key = read_key(api_key_file, "--api-key-file", sys.stdin)
    frames, view = follow_events(address, key), LiveView()
    view.apply(next(frames))
    if not once and out.isatty():
        _show(view, out, reconnecting(frames, lambda: follow_events(address, key)))
    view.apply(next(frames))  # the second has the replicas' next evictions
    print(plain(*_renderables(view)), file=out)
    return 0


def reconnecting(
    frames: Iterator[dict[str, Any]],
    connect: Callable[[], Iterator[dict[str, Any]]],
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[dict[str, Any] | ClusterError]:
    """Yield frames forever; when the stream breaks, yield the error and connect again after RETRY_S."""
    while True:
        try:
            yield from frames
        except ClusterError as error:
            yield error
        pause(RETRY_S)
        frames = connect()


def _show(view: LiveView, out: TextIO, frames: Iterable[dict[str, Any] | ClusterError]) -> NoReturn:
    """Redraw the whole terminal with each frame until interrupted."""
    terminal = console(out)
    with Live(Group(*_renderables(view, terminal.width)), console=terminal, screen=True, auto_refresh=False) as live:
        for frame in frames:
            if isinstance(frame, ClusterError):
                view.problem = f"{frame}; trying again"
            else:
                view.apply(frame)
            live.update(Group(*_renderables(view, terminal.width)), refresh=True)
    raise AssertionError("the frames have ended")


def _renderables(view: LiveView, width: int = LINE) -> list[RenderableType]:
    """The view as rich renderables for this many columns. Text from the router is never parsed as markup."""
    parts: list[RenderableType] = [
        Text(line, style="bold" if place == 0 else "") for place, line in enumerate(_head(view))
    ]
    if view.problem:
        parts.append(Text(printable(view.problem), style="bold red"))
    for section in _sections(view, wide=width >= WIDE):
        parts += [Text(), Text(section.title, style="bold")]
        if section.rows:
            made = table(section.columns, [[Text(cell) for cell in row] for row in section.rows], right=NUMBERS)
            for column in made.columns:
                column.no_wrap = column.header != "why"
                if column.header in WHOLE:
                    column.min_width = max(len(row[section.columns.index(str(column.header))]) for row in section.rows)
            parts.append(made)
    return parts


def _head(view: LiveView) -> list[str]:
    router, models = view.documents["router"], view.of("model")
    served = ", ".join(f"{name} on {count(each['serving'], 'replica')}" for name, each in models.items())
    sums = _sums(models.values())
    before = view.before() or {"at": view.now, **sums}
    new = {name: sums[name] - before[name] for name in ("requests", "prompt_tokens", "cached_tokens")}
    rate = new["requests"] / (view.now - before["at"]) if view.now > before["at"] else 0.0
    cached = f"{new['cached_tokens'] / new['prompt_tokens']:.0%}" if new["prompt_tokens"] > 0 else "-"
    ttft = [now - then for now, then in zip_longest(sums["ttft"], before["ttft"], fillvalue=0)]
    median, high = (seconds(quantile(router["buckets"], ttft, share)) for share in (0.5, 0.99))
    refused = sum(number for _, _, number in router["refusals"])
    about = f"homing {router['version']} · router {router['id']} · {served or 'no model yet'} · {router['policy']}"
    return [
        printable(about),
        f"{rate:.1f} requests/s · first token {median} (99%: {high}) · {cached} of prompts from cache",
        f"{router['in_flight']} running · {router['waiting']} waiting · {sums['failed']} failed · {refused} refused",
    ]


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """A quantile of values that are counted in buckets, interpolated; None without values."""
    total, before = sum(counts), 0
    for place, number in enumerate(counts):
        if number > 0 and before + number >= share * total:
            low, high = bounds[place - 1] if place else 0.0, bounds[min(place, len(bounds) - 1)]
            return low + (high - low) * (share * total - before) / number
        before += number
    return None


def _sections(view: LiveView, *, wide: bool) -> list[Section]:
    router, replicas = view.documents["router"], view.of("replica")
    evictions = {name.partition("/")[2]: hashes for name, hashes in view.of("evictions").items()}
    columns: tuple[str, ...] = COLUMNS if wide else NARROW
    rows = [
        _replica(name, replicas[name], evictions.get(name, ())) if wide else _narrow_replica(name, replicas[name])
        for name in sorted(replicas, key=name_order)
    ]
    rows += [(each["replica_id"], each["state"], *["-"] * (len(columns) - 2)) for each in router["absent"]]
    sections = [Section("replicas and their KV blocks" if rows else "no replica yet", columns, rows)]
    streams = [each for listed in view.of("running").values() for each in listed]
    streams = sorted(streams, key=lambda each: float(each["since"]))[:MAX_STREAMS]
    if streams:
        columns = ("age", "state", "on", "prompt", "generated", "request")
        sections.append(Section("running, oldest first", columns, [_stream(each, view.now) for each in streams]))
    if prefixes := [row for tree in view.of("tree").values() for row in _prefixes(tree)]:
        sections.append(Section("hottest prefixes", ("requests", "tokens", "prefix", "held by"), prefixes))
    decisions = sorted(view.of("decision").values(), key=lambda each: each["at"], reverse=True)[:MAX_DECISIONS]
    if decisions:
        columns = ("at", "to", "tokens", "cached", "expected", "took", "state", "why")
        sections.append(Section("latest decisions", columns, [_decision(each) for each in decisions]))
    failures = sorted(view.of("failure").values(), key=lambda each: each["at"], reverse=True)[:MAX_FAILURES]
    if failures:
        failed = [(clock(each["at"]), str(each["status"]), printable(each["reason"])) for each in failures]
        sections.append(Section("errors", ("at", "status", "why"), failed))
    return sections


def _replica(name: str, each: Mapping[str, Any], evictions: Sequence[str]) -> tuple[str, ...]:
    blocks = each["blocks"] or {}
    rate = f"{each['hit_tokens'] / each['query_tokens']:.0%}" if each["query_tokens"] else "-"
    counts = [str(blocks.get(state, "-")) for state in BLOCK_STATES]
    upcoming = f"{evictions[0]} +{len(evictions) - 1}" if evictions else "-"
    return name, each["state"], each["events"], str(each["running"]), str(each["waiting"]), *counts, rate, upcoming


def _narrow_replica(name: str, each: Mapping[str, Any]) -> tuple[str, ...]:
    row = dict(zip(COLUMNS, _replica(name, each, ()), strict=True))
    blocks = each["blocks"]
    used = f"{(blocks['referenced'] + blocks['pinned']) / max(1, sum(blocks.values())):.0%}" if blocks else "-"
    state = row["state"] if row["events"] == "live" else f"{row['state']}, events {row['events']}"
    return name, state, row["running"], row["waiting"], used, row["hit rate"]


def _stream(each: Mapping[str, Any], now: float) -> tuple[str, ...]:
    where = each["waits_for"] or each["replica"] or "-"
    numbers = str(each["prompt_tokens"]), str(each["generated_tokens"])
    return seconds(max(0.0, now - each["since"])), each["state"], printable(where), *numbers, printable(each["id"])


def _prefixes(tree: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            str(node["requests"]),
            str(node["start"] + node["tokens"]),
            node["hash"],
            " ".join(name for name, held in sorted(node["held"].items()) if held == node["blocks"]) or "-",
        )
        for node in tree["nodes"][:MAX_PREFIXES]
    ]


def _decision(each: Mapping[str, Any]) -> tuple[str, ...]:
    row = next((row for row in each["candidates"] if row["chosen"]), None)
    cached = each["cached_tokens"]
    return (
        clock(each["at"]),
        str(each["chosen"]),
        str(each["prompt_tokens"]),
        "-" if cached is None else str(cached),
        seconds(row["ttft_s"] if row else None),
        seconds(each["ttft_s"]),
        each["state"],
        printable(each["why"]),
    )


def _sums(models: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    known = list(models)
    names = ("requests", "failed", "prompt_tokens", "cached_tokens")
    ttft = [sum(each) for each in zip(*(model["ttft"] for model in known), strict=True)]
    return {name: sum(model[name] for model in known) for name in names} | {"ttft": ttft}
