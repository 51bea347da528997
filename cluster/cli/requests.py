"""`homing requests`: lists the requests in progress, or those that are over, and ends one."""

import json
import sys
import time
from typing import Annotated, Any, Literal

from ..client import delete_json, post_json, read_key, router_urls
from ..errors import SettingsError
from ..flags import NOTHING, FindCluster, Out, ServedModel, Url, option, settings_of
from ..output import show
from ..request_records import find_request, many, one

State = Literal["running", "finished", "refused", "failed", "gone"]


def requests(
    *,
    flags: FindCluster = NOTHING,
    out: Out,
    state: Annotated[
        State | None,
        option("running; or, of those that are over, finished, refused, failed or gone (the client left)"),
    ] = None,
    past: Annotated[bool, option("all that are over, newest first")] = False,
    slowest: Annotated[bool, option("those that are over and waited longest for their first token")] = False,
    tenant: Annotated[str | None, option("only of this tenant", metavar="NAME")] = None,
    asked_model: ServedModel = None,
    limit: Annotated[str | None, option("only those that this limit refused or ended", metavar="NAME")] = None,
    most: Annotated[int, option("print at most N", "--most", metavar="N")] = 30,
    end: Annotated[str | None, option("end this request, which gets an error", metavar="ID")] = None,
    api_key_file: Annotated[
        str, option("file with an admin's API key (-: standard input)", metavar="FILE", allow_leading_hyphen=True)
    ] = "",
    url: Url = None,
    as_json: Annotated[bool, option("print the records, for programs", "--json")] = False,
) -> int:
    """Print requests, by default those in progress, oldest first. Raises NotRunning and ClusterError."""
    if not 1 <= most <= 1000:
        raise SettingsError(f"requests: --most {most}: give a number from 1 to 1000")
    api_key = read_key(api_key_file, "--api-key-file", sys.stdin)
    urls = router_urls(settings_of(flags), url)
    if end is not None:
        record = find_request(urls, end, api_key, delete_json)
        show(out, *([json.dumps(record, indent=2)] if as_json else [*one(record), "", "ended"]))
        return 0
    if state is None and not (past or slowest or limit):
        state = "running"
    query = {"state": state, "tenant": tenant, "model": asked_model, "limit": limit, "slowest": slowest, "most": most}
    found = [
        record
        for each in urls[1:] or urls
        for record in post_json(f"{each}/requests", query, api_key=api_key)["requests"]
    ]
    # Routers that share a history each return all of it.
    distinct = list({(record["id"], record["at"]): record for record in found}.values())
    records = sorted(distinct, key=lambda each: _place(each, state, slowest=slowest))[:most]
    if as_json:
        print(json.dumps(records, indent=2), file=out)
    else:
        show(out, *many(records, time.time()))
    return 0


def _place(record: dict[str, Any], state: State | None, *, slowest: bool) -> float:
    if slowest:
        return -float(record["ttft_s"] or 0.0)
    return float(record["at"] if state == "running" else -record["at"])
