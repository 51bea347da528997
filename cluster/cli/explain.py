"""`homing explain PROMPT`: shows as a table which replica a request would go to now, and why. Generates nothing.

`homing explain --request ID`: shows the same for a request that was sent, and what became of it.
`homing explain --diff A B`: shows where the prompts of two requests differ.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from rich.console import RenderableType

from ..client import post_json, read_key, router_urls
from ..errors import ClusterError, SettingsError
from ..flags import NOTHING, FindCluster, Out, ServedModel, Url, option, settings_of
from ..output import count, show
from ..request_records import candidates, find_request, missing, one


def explain(
    prompt: Annotated[str | None, option("sent as one user message; with --raw without a chat template")] = None,
    /,
    *,
    flags: FindCluster = NOTHING,
    out: Out,
    raw: Annotated[bool, option("no chat template: the prompt of a completion")] = False,
    asked_model: ServedModel = None,
    body: Annotated[
        str | None, option("JSON body of a request (of any API), instead of a prompt", metavar="FILE")
    ] = None,
    request: Annotated[
        str | None,
        option("id (x-request-id) of a request that was sent, instead of a prompt; needs an admin's key", metavar="ID"),
    ] = None,
    diff: Annotated[
        tuple[str, str] | None, option("two such files: show where their prompts start to differ", metavar="FILE")
    ] = None,
    api_key_file: Annotated[
        str,
        option(
            "file with the tenant's API key (-: standard input); tenants share no cached blocks",
            metavar="FILE",
            allow_leading_hyphen=True,
        ),
    ] = "",
    url: Url = None,
    as_json: Annotated[bool, option("print the response of /explain, for programs", "--json")] = False,
) -> int:
    """Print the routing decision for a request, or where two differ. Raises NotRunning and ClusterError."""
    # never given on the command line, which every user of the machine can read
    api_key = read_key(api_key_file, "--api-key-file", sys.stdin)
    if request is not None:
        if prompt is not None or body or diff or raw:
            raise SettingsError("explain: --request names a request that was sent; give no prompt, --body or --diff")
        found = find_request(router_urls(settings_of(flags), url), request, api_key)
        if as_json:
            print(json.dumps(found, indent=2), file=out)
        else:
            show(out, *one(found))
        return 0
    named = {} if asked_model is None else {"model": asked_model}
    if diff:
        path, asked = "explain/diff", {key: _body(file, "--diff") | named for key, file in zip("ab", diff, strict=True)}
    else:
        path, asked = "explain", request_body(prompt, body, raw=raw) | named
    try:
        found = post_json(f"{router_urls(settings_of(flags), url)[0]}/{path}", asked, api_key=api_key)
    except ClusterError as error:
        if diff or "model" in asked or "field 'model'" not in str(error):
            raise
        raise SettingsError(f"{error}; name one with --served-model-name") from error
    if as_json:
        print(json.dumps(found, indent=2), file=out)
    elif diff:
        print(render_diff(found), file=out)
    else:
        show(out, *render(found))
    return 0


def render_diff(found: Mapping[str, Any]) -> str:
    one, other = found["tokens"]
    head = f"{one} and {other} tokens, the first {found['common_tokens']} of them in common"
    return "\n".join([head, *_departure_lines(found["departure"])])


def _departure_lines(departure: Mapping[str, Any] | None) -> list[str]:
    if departure is None:
        return []
    place = "" if departure["at"] is None else f", in {departure['at']}"
    exact = "token" if departure["exact"] else "the block of token"
    lines = ["", f"departs at {exact} {departure['token']}{place}: {departure['text']!r}"]
    return lines if departure["instead_of"] is None else [*lines, f"instead of: {departure['instead_of']!r}"]


def request_body(prompt: str | None, file: str | None, *, raw: bool) -> dict[str, Any]:
    """The body of the request to explain: a prompt, as one user message or `raw`, or the JSON in a file."""
    if (prompt is None) == (file is None):
        raise SettingsError("explain: give a prompt, or --body FILE with the JSON of a request")
    if file is None:
        return {"prompt": prompt} if raw else {"messages": [{"role": "user", "content": prompt}]}
    return _body(file, "--body")


def _body(file: str, flag: str) -> dict[str, Any]:
    """Read a request from a file. Raises SettingsError."""
    try:
        body = json.loads(Path(file).read_text())
    except OSError as error:
        raise SettingsError(f"{flag} {file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise SettingsError(f"{flag} {file} is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise SettingsError(f"{flag} {file}: a request is a JSON object")
    return body


def render(found: Mapping[str, Any]) -> list[RenderableType]:
    chosen = found["chosen"]
    where = f"{chosen} ({found['reason']}): {found['why']}" if chosen else f"no replica yet, {found['why']}"
    blocks = count(found["prompt_blocks"], "full block")
    head = f"{found['prompt_tokens']} tokens in {blocks} · policy {found['policy']}"
    missed = [missing(found["missing"])] if found.get("missing") else []
    return [
        head,
        "",
        candidates(found["replicas"]),
        *missed,
        *_departure_lines(found.get("departure")),
        "",
        f"→ {where}",
    ]
