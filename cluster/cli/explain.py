"""`homing explain PROMPT`: which replica a request would be sent to now, and why, as a table. Generates nothing."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from ..client import post_json, router_urls
from ..config import Settings
from ..errors import ClusterError, SettingsError
from .status import by_name, table
from .words import count

NUMBERS = ("held", "expected", "to compute", "queued", "running", "waiting", "first token")
COLUMNS = ("", "replica", "events", *NUMBERS, "why")


def explain(
    settings: Settings, out: TextIO, body: Mapping[str, Any], *, url: str | None, api_key: str, as_json: bool
) -> int:
    """Print the routing decision for `body`, a chat or completion request. Raises NotRunning and ClusterError.

    `api_key` selects the tenant: tenants share no cached blocks.
    """
    try:
        found = post_json(f"{router_urls(settings, url)[0]}/explain", body, api_key=api_key)
    except ClusterError as error:
        if "model" in body or "field 'model'" not in str(error):
            raise
        raise SettingsError(f"{error}; name one with --served-model-name") from error
    print(json.dumps(found, indent=2) if as_json else render(found), file=out)
    return 0


def request_body(prompt: str | None, file: str | None, model: str | None, *, raw: bool) -> dict[str, Any]:
    """The request to explain: a prompt, as one user message or `raw`, or the body in a file. `model` overrides it."""
    if (prompt is None) == (file is None):
        raise SettingsError("explain: give a prompt, or --body FILE with the JSON of a request")
    named = {} if model is None else {"model": model}
    if file is None:
        return named | ({"prompt": prompt} if raw else {"messages": [{"role": "user", "content": prompt}]})
    try:
        body = json.loads(Path(file).read_text())
    except OSError as error:
        raise SettingsError(f"--body {file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise SettingsError(f"--body {file} is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise SettingsError(f"--body {file}: a request is a JSON object")
    return body | named


def render(found: Mapping[str, Any]) -> str:
    chosen = found["chosen"]
    where = f"{chosen}: {found['why']}" if chosen else f"no replica yet, {found['why']}"
    blocks = count(found["prompt_blocks"], "full block")
    lines = [f"{found['prompt_tokens']} tokens in {blocks} · policy {found['policy']}"]
    lines += ["", *table(COLUMNS, [_row(score) for score in sorted(found["replicas"], key=by_name)], right=NUMBERS)]
    return "\n".join([*lines, "", f"→ {where}"])


def _row(score: Mapping[str, Any]) -> tuple[str, ...]:
    seconds = score["expected_ttft_s"]
    numbers = ("held_blocks", "expected_blocks", "uncached_tokens", "queued_prefill_tokens", "running", "waiting")
    return (
        "→" if score["chosen"] else "",
        score["replica_id"],
        score["feed"],
        *(str(score[name]) for name in numbers),
        "-" if seconds is None else f"{seconds * 1000:.1f} ms",
        score["why"],
    )
