"""`homing top`: a router's stream, shown as lines or drawn by rich."""

import asyncio
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
from rich.console import Console

from homing.cluster.cli.main import run
from homing.cluster.cli.top import LiveView, _renderables, reconnecting
from homing.cluster.errors import ClusterError
from homing.cluster.output import plain
from homing.router.config import RouterSettings
from homing.router.http.live.feed import LiveFeed
from homing.router.http.live.view import frame, items_of
from homing.router.server import RouterServer

from ...router.http.fakes import FakeBackend
from ...router.http.live.situations import activity, situation


@pytest.fixture
def backend() -> FakeBackend:
    made = FakeBackend(None, lambda _: ())
    made.activities = [activity()]
    return made


def shown(backend: FakeBackend, **changes: object) -> LiveView:
    """The view of the small cluster after one frame."""
    view = LiveView()
    view.apply(msgspec.json.decode(frame({}, items_of(situation(backend, **changes)), 2000.0)[6:]))
    return view


@contextmanager
def router(backend: FakeBackend, **settings: str) -> Iterator[str]:
    """The address of a router over the backend, in its own thread, that sends frames without a pause."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = RouterServer(RouterSettings(access_log="", **settings), backend, grace_s=60.0)
    server.front.live = LiveFeed(lambda: items_of(server.front.live_snapshot()), pause=lambda cost_s: 0.001)
    try:
        port = asyncio.run_coroutine_threadsafe(server.start("127.0.0.1", 0), loop).result()
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_without_a_terminal_it_prints_once(backend: FakeBackend, tmp_path) -> None:
    """Output to a script is plain lines and ends, with or without `--once`."""
    out = io.StringIO()
    with router(backend) as url:
        assert run(["top", "--url", url, "--state-dir", str(tmp_path)], out) == 0

    lines = out.getvalue().splitlines()
    assert lines[0].startswith("homing ")
    assert any("because" in line and "r0" in line for line in lines)


def test_a_key_that_may_not_see_it_is_refused_in_the_routers_words(backend: FakeBackend, tmp_path) -> None:
    """The operator must learn what is missing."""
    with router(backend, api_key="right") as url:
        with pytest.raises(ClusterError, match="401 this server requires an API key"):
            run(["top", "--url", url, "--state-dir", str(tmp_path)], io.StringIO())
        key = tmp_path / "key"
        key.write_text("right\n")
        assert run(["top", "--url", url, "--state-dir", str(tmp_path), "--api-key-file", str(key)], io.StringIO()) == 0


def test_replicas_prefixes_decisions_and_errors_are_shown(backend: FakeBackend) -> None:
    """The page's essential contents."""
    text = plain(*_renderables(shown(backend)))

    assert (
        "r0       serving  live          2        1          30      10      20    40       50%  ab0000000000" in text
    )
    assert "3      32  ab0000000000  r0" in text
    assert "9999.00 s  10.0 ms  streaming  because" in text
    assert "502     replica r1 was lost" in text


def test_what_others_wrote_moves_no_cursor_and_is_no_markup(backend: FakeBackend) -> None:
    """An error's text may come from an untrusted source."""
    hostile = activity()
    hostile = msgspec.structs.replace(
        hostile, failed=[msgspec.structs.replace(hostile.failed[0], reason="\x1b[2J[red]gone[/red]")]
    )
    view = shown(backend, activities=[hostile])
    console = Console(file=io.StringIO(), width=200)

    console.print(*_renderables(view))

    for text in (plain(*_renderables(view)), console.file.getvalue()):
        assert "?[2J[red]gone[/red]" in text
        assert "\x1b" not in text


def test_a_cluster_without_replicas_is_shown(backend: FakeBackend) -> None:
    """This is the case while the first replica starts, or after the last one died."""
    cluster = msgspec.structs.replace(situation(backend).cluster, replicas=[])

    assert "no replica yet" in plain(*_renderables(shown(backend, cluster=cluster, activities=[]))).splitlines()


def test_rates_are_those_of_the_last_minute_from_the_first_frame_on(backend: FakeBackend) -> None:
    """Totals since the start would hide current changes, and `--once` would otherwise see a second or two."""
    view = shown(backend)
    old, minute, new = (
        [at, requests, 0, 0, 0, 0, 0, 0, [0] * 19] for at, requests in ((0, 0), (1941, 700), (1999, 990))
    )
    view.documents |= {"trend/1": old, "trend/2": minute, "trend/3": new}
    view.documents["model/m"] = {
        "requests": 995,
        "failed": 0,
        "prompt_tokens": 100,
        "cached_tokens": 25,
        "serving": 2,
        "ttft": [0] * 5 + [98] + [0] * 12 + [2],
    }

    line = plain(*_renderables(view)).splitlines()[1]

    assert line.startswith("5.0 requests/s · first token 30.2 ms (99%: 160.00 s) · 25% of prompts")


def test_at_80_columns_replicas_are_named_in_full_and_streams_are_shown(backend: FakeBackend) -> None:
    """With several models the names are long, and what is stuck is the first question."""
    view, name = shown(backend), "qwen3-coder-30b-a3b-r12"
    view.documents[f"replica/{name}"] = view.documents["replica/r0"]
    narrow = Console(file=io.StringIO(), width=80)

    narrow.print(*_renderables(view, 80), sep="\n")

    lines = narrow.file.getvalue().splitlines()
    assert any(line.startswith(f"{name}  serving") for line in lines)
    assert "running, oldest first" in lines
    assert max(map(len, lines)) <= 80


def test_a_stream_that_breaks_is_opened_again() -> None:
    """A restarted router comes back; meanwhile, the view shows the error."""

    def frames(*numbers: int) -> Iterator[dict[str, int]]:
        yield from ({"now": number} for number in numbers)
        raise ClusterError("it has ended")

    pauses: list[float] = []
    again = reconnecting(frames(1), lambda: frames(2), pauses.append)

    seen = [next(again) for _ in range(4)]

    assert [seen[0], seen[2]] == [{"now": 1}, {"now": 2}]
    assert [str(seen[1]), str(seen[3])] == ["it has ended"] * 2
    assert len(pauses) == 1
