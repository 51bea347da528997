"""Shows what became of requests, as routers record it: one in full, or several as a table."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from rich.console import RenderableType

from .client import get_json
from .errors import NotFoundByRouter
from .output import count, name_order, table

NUMBERS = ("held", "expected", "to compute", "queued", "running", "waiting", "first token")
CANDIDATES = ("", "replica", "events", *NUMBERS, "why")
COLUMNS = (
    *("request", "state", "age", "silent", "tenant", "model", "replica", "prompt", "cached", "output", "first token"),
    *("time", "why"),
)
PHASES = ("receive", "queue", "wait", "prefill", "decode", "blocked")


def find_request(urls: Sequence[str], request_id: str, api_key: str, ask: Callable[..., Any] = get_json) -> Any:
    """The record of a request, from the router that has it. Raises NotFoundByRouter and ClusterError.

    `urls`: as `router_urls` returns them. `ask`: also `delete_json`, which ends it.
    """
    missing: NotFoundByRouter | None = None
    for url in urls[1:] or urls:
        try:
            return ask(f"{url}/requests/{quote(request_id, safe='')}", api_key=api_key)
        except NotFoundByRouter as error:
            missing = error
    assert missing is not None, "no router was asked"
    raise missing


def many(records: Sequence[Mapping[str, Any]], now: float) -> list[RenderableType]:
    """Several requests as a table. `now`: seconds since 1970."""
    if not records:
        return ["no request"]
    rows = [_row(record, now) for record in records]
    return [table(COLUMNS, rows, right={"age", "silent", "prompt", "cached", "output", "first token"})]


def _row(record: Mapping[str, Any], now: float) -> tuple[str, ...]:
    choices, error = record["choices"], record["error"]
    silent = [choice["silent_s"] for choice in choices if choice["silent_s"] is not None]
    waits = next((choice["waits_for"] for choice in choices if choice["waits_for"]), "")
    why = (error["limit"] or error["code"] or str(record["status"])) if error is not None else waits
    states = dict.fromkeys(choice["state"] for choice in choices)
    running = record["state"] == "running"
    return (
        printable(record["id"]),
        ", ".join(states) or "preparing" if running else record["state"],
        seconds(max(0.0, now - record["at"])),
        seconds(max(silent)) if silent else "-",
        printable(record["tenant"]) or "-",
        printable(record["model"]) or "-",
        ",".join(dict.fromkeys(choice["replica"] for choice in choices if choice["replica"])) or "-",
        str(record["prompt_tokens"]),
        str(record["cached_tokens"]),
        str(record["output_tokens"]),
        seconds(record["ttft_s"]),
        phases(record["times"]),
        printable(why) or "-",
    )


def candidates(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """The table of a decision's candidates."""
    shown = sorted(rows, key=lambda row: name_order(row["replica_id"]))
    return table(CANDIDATES, [_candidate(row) for row in shown], right=NUMBERS)


def _candidate(score: Mapping[str, Any]) -> tuple[str, ...]:
    names = ("held_blocks", "expected_blocks", "uncached_tokens", "queued_prefill_tokens", "running", "waiting")
    return (
        "→" if score["chosen"] else "",
        score["replica_id"],
        score["feed"],
        *(str(score[name]) for name in names),
        seconds(score["expected_ttft_s"]),
        score["why"],
    )


def one(record: Mapping[str, Any]) -> list[RenderableType]:
    """One request in full."""
    error = record["error"]
    status = "" if record["status"] is None else f" with {record['status']}"
    lines: list[RenderableType] = [
        f"request {printable(record['id'])} · {clock(record['at'])} · {record['method']} {printable(record['path'])} · "
        f"{record['state']}{status}",
        " · ".join([f"{name} {printable(record[name]) or '-'}" for name in ("tenant", "model")])
        + _conversation(record),
    ]
    if error is not None:
        limit = f" (limit: {error['limit']})" if error["limit"] else ""
        lines.append(f"{error['code'] or 'error'}{limit}: {printable(error['message'])}")
    lines.append(f"{seconds(record['times']['total_s'])} in all: {phases(record['times'])}")
    if record["choices"]:
        lines.append(
            f"{record['prompt_tokens']} prompt tokens, {record['cached_tokens']} cached "
            f"({record['predicted_tokens']} predicted), {count(record['output_tokens'], 'token')} generated · "
            f"first token after {seconds(record['ttft_s'])}, expected {seconds(record['expected_ttft_s'])}"
        )
    several = len(record["choices"]) > 1
    for number, choice in enumerate(record["choices"]):
        if several:
            lines += ["", f"choice {number}: {choice['state']} on {choice['replica'] or 'no replica'}"]
        if choice["waits_for"]:
            lines.append(f"waits: {printable(choice['waits_for'])}")
        if choice["silent_s"] is not None:
            lines.append(f"{choice['state']}; no token for {seconds(choice['silent_s'])}")
        for decision in choice["decisions"]:
            hidden = f", {count(decision['hidden'], 'candidate')} not shown" if decision["hidden"] else ""
            blocks = count(decision["prompt_blocks"], "full block")
            lines += [
                "",
                f"{clock(decision['at'])} · {decision['prompt_tokens']} tokens in {blocks} · policy "
                f"{decision['policy']}{hidden}",
                candidates(decision["replicas"]),
                f"→ {decision['chosen']} ({decision['reason']}): {decision['why']}",
            ]
        if choice["missing"] is not None:
            lines.append(missing(choice["missing"]))
    if record["departure"] is not None:
        token, part = record["departure"]
        lines.append(f"its session's prompts differ from token {token} on" + (f", in {part}" if part else ""))
    if record["hidden"]:
        lines.append(f"{count(record['hidden'], 'further choice')} not shown")
    return lines


def missing(found: Mapping[str, Any]) -> str:
    """Why no more of a prompt was cached."""
    role = "probably for" if found["reason"] == "evicted" else "for"
    named = f", {role} request {printable(found['request'])}" if found["request"] else ""
    at = f" at {clock(found['at'])}" if found["at"] is not None else ""
    tenant = f" (tenant {printable(found['tenant'])})" if found["tenant"] else ""
    return f"not cached from token {found['token']} on ({found['reason']}): {found['why']}{at}{named}{tenant}"


def _conversation(record: Mapping[str, Any]) -> str:
    named = [(name, record[name]) for name in ("session", "agent", "parent") if record[name]]
    return "".join(f" · {name} {printable(value)}" for name, value in named)


def phases(times: Mapping[str, Any]) -> str:
    """Where the time went; the network's parts only if they took a millisecond."""
    known = [(name, times.get(f"{name}_s")) for name in PHASES]
    shown = [(n, s) for n, s in known if s is not None and (n not in ("receive", "blocked") or s >= 0.001)]
    return ", ".join(f"{name} {seconds(value)}" for name, value in shown) or "-"


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def printable(text: str) -> str:
    """Replace unprintable characters, because foreign text must not move the cursor."""
    return "".join([each if each.isprintable() else "?" for each in text])
