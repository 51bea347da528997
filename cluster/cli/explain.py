"""`homing explain PROMPT`: where a request would go now, and why, as a table. Asks the router; generates nothing."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from ..config import Settings
from ..errors import SettingsError
from .client import cluster_url, post_json
from .status import by_name, table

NUMBERS = ("held", "expected", "to compute", "queued", "running", "waiting", "first token")
COLUMNS = ("", "replica", "events", *NUMBERS, "why")


def explain(
    settings: Settings, out: TextIO, body: Mapping[str, Any], *, url: str | None, api_key: str | None, as_json: bool
) -> int:
    """Print the decision that `body`, a chat or a completion, would meet now. Raises NotRunning and ClusterError.

    `api_key` says whose cached blocks count: tenants do not see each other's.
    """
    found = post_json(f"{cluster_url(settings, url)}/explain", body, api_key=api_key)
    print(json.dumps(found, indent=2) if as_json else render(found), file=out)
    return 0


def request_body(prompt: str | None, file: str | None, model: str | None, *, raw: bool) -> dict[str, Any]:
    """What is asked about: a prompt, sent as one user message or `raw`, or the request body in a file.

    `model`: whatever the file says.
    """
    if (prompt is None) == (file is None):
        raise SettingsError("explain: give a prompt, or --body FILE with the JSON of a request")
    named = {} if model is None else {"model": model}
    if file is not None:
        return _read(Path(file)) | named
    return named | ({"prompt": prompt} if raw else {"messages": [{"role": "user", "content": prompt}]})


def read_key(file: str | None, standard_input: TextIO) -> str | None:
    """The key in a file (`-`: standard input); never on the command line, which everybody on the machine can read."""
    if file is None:
        return None
    try:
        text = standard_input.read() if file == "-" else Path(file).read_text()
    except OSError as error:
        raise SettingsError(f"--api-key-file {file} cannot be read: {error.strerror}") from error
    return text.strip()


def _read(file: Path) -> dict[str, Any]:
    try:
        body = json.loads(file.read_text())
    except OSError as error:
        raise SettingsError(f"--body {file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise SettingsError(f"--body {file} holds no JSON: {error}") from error
    if not isinstance(body, dict):
        raise SettingsError(f"--body {file}: a request is a JSON object")
    return body


def render(found: Mapping[str, Any]) -> str:
    """The whole page."""
    chosen = found["chosen"]
    where = f"{chosen}: {found['why']}" if chosen else f"nowhere yet, {found['why']}"
    blocks = f"{found['prompt_blocks']} full block{'' if found['prompt_blocks'] == 1 else 's'}"
    lines = [f"{found['prompt_tokens']} tokens in {blocks} · policy {found['policy']}"]
    lines += ["", *table(COLUMNS, [_row(score) for score in sorted(found["replicas"], key=by_name)], right=NUMBERS)]
    return "\n".join([*lines, "", f"→ {where}"])


def _row(score: Mapping[str, Any]) -> tuple[str, ...]:
    seconds = score["expected_ttft_s"]
    return (
        "→" if score["chosen"] else "",
        score["replica_id"],
        score["feed"],
        str(score["held_blocks"]),
        str(score["expected_blocks"]),
        str(score["uncached_tokens"]),
        str(score["queued_prefill_tokens"]),
        str(score["running"]),
        str(score["waiting"]),
        "-" if seconds is None else f"{seconds * 1000:.1f} ms",
        score["why"],
    )
