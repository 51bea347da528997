"""The commands: their arguments and flags, which cyclopts takes from their parameters. Each returns the exit code.

Each imports what it needs when it is called. `main.COMMANDS` lists them, with their help.
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TextIO

import msgspec

from ... import __version__
from ..config import Settings
from ..errors import SettingsError
from ..flags import (
    LOOKUP,
    NOTHING,
    AllSettings,
    Changes,
    FindCluster,
    FollowEvents,
    NoWait,
    Out,
    ServedModel,
    Url,
    Words,
    option,
    settings_of,
    texts,
    with_model,
)

Detach = Annotated[bool, option("run in the background; return when it is ready")]
Quiet = Annotated[bool, option("do not print a line for each request (homing logs requests has them)")]
Background = Annotated[bool, option("what --detach starts", show=False)]


def serve(
    model: Annotated[
        str | None, option("Hugging Face name or local folder (default: the demo model that ships with the package)")
    ] = None,
    /,
    *,
    given: AllSettings = NOTHING,
    out: Out,
    words: Words,
    detach: Detach = False,
    quiet: Quiet = False,
    background: Background = False,
) -> int:
    settings = settings_of(given, model)
    in_front = settings.router.backend or settings.router.engines
    return _start(settings, out, words, detach=detach, quiet=quiet, background=background, in_front=bool(in_front))


def route(
    model: Annotated[str | None, option("the engines' model, if it is not found by the name that they tell")] = None,
    /,
    *,
    given: AllSettings = NOTHING,
    out: Out,
    words: Words,
    engine_url: Annotated[list[str] | None, option("the same as --backend; may be repeated", metavar="URL")] = None,
    detach: Detach = False,
    quiet: Quiet = False,
    background: Background = False,
) -> int:
    backends = [*given.get("backend", ()), *(engine_url or ())]
    settings = settings_of({**given, "backend": backends} if backends else given, model)
    return _start(settings, out, words, detach=detach, quiet=quiet, background=background, in_front=True)


def _start(
    settings: Settings,
    out: TextIO,
    words: Sequence[str],
    *,
    detach: bool,
    quiet: bool,
    background: bool,
    in_front: bool,
) -> int:
    """`in_front`: of engines that run already, not of replicas."""
    if detach:
        from .daemon import detach as start_in_background

        return start_in_background(settings, [word for word in words if word != "--detach"], out)
    if in_front:
        from .route import route as route_to

        if quiet and settings.router.access_log == "-":
            router = msgspec.structs.replace(settings.router, access_log="")
            settings = msgspec.structs.replace(settings, router=router)
        return route_to(settings, out, detached=background)
    from .serve import serve as serve_replicas

    return serve_replicas(settings, out, detached=background, quiet=quiet)


def stop(
    *,
    given: FindCluster = NOTHING,
    out: Out,
    force: Annotated[bool, option("kill it at once, without an orderly end")] = False,
) -> int:
    from .daemon import stop as end

    return end(settings_of(given), out, force=force)


def doctor(
    model: Annotated[str | None, option("the model to be served")] = None,
    /,
    *,
    given: AllSettings = NOTHING,
    out: Out,
    as_json: Annotated[bool, option("print a list of findings, for programs", "--json")] = False,
) -> int:
    from .doctor import doctor as examine

    return examine(settings_of(given, model), out, as_json=as_json)


def scale(
    *words: Annotated[str, option("number of replicas; before it the model's name, if several are served", "N")],
    given: FindCluster = NOTHING,
    out: Out,
    asked_model: ServedModel = None,
    no_wait: NoWait = False,
) -> int:
    from .control import scale as order

    if not 1 <= len(words) <= 2:
        raise SettingsError("scale: give the number of replicas (see: homing scale --help)")
    name, wanted = words[0] if words[1:] else None, words[-1]
    if not wanted.isdigit():
        raise SettingsError(f"scale: {wanted!r} is not a number of replicas")
    if name and asked_model and name != asked_model:
        raise SettingsError(f"the model is given twice: {name} and --served-model-name {asked_model}")
    return order(settings_of(given), out, model=name or asked_model, wanted=int(wanted), wait=not no_wait)


def drain(
    replica_id: Annotated[str, option("name of the replica, such as r0", "REPLICA")],
    /,
    *,
    given: FindCluster = NOTHING,
    out: Out,
    replace: Annotated[bool, option("start another replica in its place first")] = False,
    no_wait: NoWait = False,
) -> int:
    from .control import drain as order

    return order(settings_of(given), out, replica_id=replica_id, replace=replace, wait=not no_wait)


def update(
    model: Annotated[str | None, option("another model, or another version of it")] = None,
    /,
    *,
    given: Changes = NOTHING,
    out: Out,
    remove: Annotated[
        tuple[str, ...], option("stop serving this model; may be repeated", metavar="NAME", consume_multiple=False)
    ] = (),
    restart: Annotated[bool, option("replace every replica even if nothing changes")] = False,
    no_wait: NoWait = False,
) -> int:
    from .control import update as order

    # Only these settings say which cluster; the others and the file are changes.
    found = {name: values for name, values in given.items() if name in LOOKUP}
    flags = with_model({name: text for name, text in texts(given).items() if name not in LOOKUP}, model)
    changes: dict[str, Any] = {"flags": flags, "file": given.get("config"), "remove": remove, "restart": restart}
    return order(settings_of(found), out, wait=not no_wait, **changes)


def status(
    *,
    given: FindCluster = NOTHING,
    out: Out,
    url: Url = None,
    as_json: Annotated[bool, option("print the response of /cluster, for programs", "--json")] = False,
) -> int:
    from .status import status as show

    return show(settings_of(given), out, url=url, as_json=as_json)


def logs(
    part: Annotated[str | None, option("a replica such as r0, router, requests or controller (default: all)")] = None,
    /,
    *,
    given: FindCluster = NOTHING,
    out: Out,
    lines: Annotated[int, option("print only the last N; 0: all that is kept", metavar="N")] = 200,
    follow: Annotated[bool, option("also print what is added, until interrupted", "--follow", "-f")] = False,
) -> int:
    from .logs import logs as show

    return show(settings_of(given), out, part=part, lines=lines, follow=follow)


def explain(
    prompt: Annotated[str | None, option("sent as one user message; with --raw without a chat template")] = None,
    /,
    *,
    given: FindCluster = NOTHING,
    out: Out,
    raw: Annotated[bool, option("no chat template: the prompt of a completion")] = False,
    asked_model: ServedModel = None,
    body: Annotated[
        str | None, option("JSON body of a chat or completion request, instead of a prompt", metavar="FILE")
    ] = None,
    diff: Annotated[
        tuple[str, str] | None, option("two such files: where their prompts begin to differ", metavar="FILE")
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
    from ..client import read_key
    from .explain import diff as show_diff
    from .explain import explain as show
    from .explain import request_body

    # never on the command line, which everybody on the machine can read
    api_key = read_key(api_key_file, "--api-key-file", sys.stdin)
    where: dict[str, Any] = {"url": url, "api_key": api_key, "as_json": as_json}
    if diff:
        return show_diff(settings_of(given), out, diff, asked_model, **where)
    return show(settings_of(given), out, request_body(prompt, body, asked_model, raw=raw), **where)


def top(
    *,
    given: FindCluster = NOTHING,
    out: Out,
    url: Url = None,
    api_key_file: Annotated[
        str, option("file with an admin's API key (-: standard input)", metavar="FILE", allow_leading_hyphen=True)
    ] = "",
    once: Annotated[bool, option("print it once, as plain lines; also done where the output is no terminal")] = False,
) -> int:
    from .top import top as show

    return show(settings_of(given), out, url=url, api_key_file=api_key_file, once=once)


def watch(
    *,
    given: FollowEvents = NOTHING,
    out: Out,
    url: Url = None,
    replica: Annotated[tuple[str, ...], option("follow only this replica; may be repeated", metavar="ID")] = (),
    event: Annotated[tuple[str, ...], option("only events of this kind; may be repeated", metavar="KIND")] = (),
    hash_prefix: Annotated[
        str, option("only blocks whose hash begins with these hex digits", "--hash", metavar="PREFIX")
    ] = "",
    rates: Annotated[float | None, option("print rates every S seconds instead of events", metavar="S")] = None,
    record: Annotated[
        Path | None,
        option("append every event of the followed replicas to this file, shown or not", metavar="FILE"),
    ] = None,
    replay: Annotated[
        Path | None, option("print a recorded file instead of following a cluster", metavar="FILE")
    ] = None,
    as_json: Annotated[bool, option("print one JSON object per event, for programs", "--json")] = False,
) -> int:
    from .watch import EventFilter, WatchOptions
    from .watch import replay as show_recording
    from .watch import watch as follow

    if rates is not None and not 0 < rates < math.inf:
        raise SettingsError(f"--rates {rates:g}: give seconds above 0")
    shown = EventFilter.of(replica, event, hash_prefix)
    options = WatchOptions(shown=shown, as_json=as_json, rates_s=rates, record=record)
    if replay:
        return show_recording(replay, out, options)
    return follow(settings_of(given), out, options, url=url)


def keys(
    folder: Annotated[Path, option("folder for the keys, which is created", "DIR")],
    /,
    *,
    out: Out,
    client: Annotated[
        str | None, option("add keys for one more subscriber to an existing folder", metavar="NAME")
    ] = None,
) -> int:
    from ...events.errors import BadKeys
    from ...events.security.curve_keys import add_client, make_folder

    try:
        if client is None:
            make_folder(folder)
            print(f"keys are in {folder}; start replicas with: homing serve --events-curve-keys {folder}", file=out)
            return 0
        made = add_client(folder, client)
    except BadKeys as error:
        raise SettingsError(str(error)) from error
    print(f"move {made} to the client, which loads it with homing.events.load_pair", file=out)
    print(f"replicas accept it from now on; to revoke it: rm {folder / 'clients' / made.stem}.key", file=out)
    return 0


def version(*, out: Out) -> int:
    print(f"homing {__version__}", file=out)
    return 0
