"""The output of `homing requests`."""

import io
import json

import pytest

from homing.cluster.cli.main import run
from homing.cluster.errors import SettingsError
from homing.cluster.output import plain
from homing.cluster.request_records import many

from .test_explain import RECORD, answering

CHOICE = {
    "replica": None,
    "state": "waiting",
    "waits_for": "held: saturated: r0",
    "silent_s": 7.0,
    "missing": None,
    "decisions": [],
}
STUCK = RECORD | {"id": "stuck", "state": "running", "status": None, "ttft_s": None, "choices": [CHOICE]}


def test_a_stuck_request_shows_its_age_and_what_it_waits_for() -> None:
    """Both questions before it is ended."""
    header, row = plain(*many([STUCK], 60.0)).splitlines()

    assert header.split()[:4] == ["request", "state", "age", "silent"]
    assert row.split()[:6] == ["stuck", "waiting", "60.00", "s", "7.00", "s"]
    assert row.endswith("held: saturated: r0")
    assert plain(*many([], 0.0)) == "no request"


def test_the_flags_become_the_query_and_routers_that_share_a_history_count_once() -> None:
    """By default it lists what is running."""
    asked: list[object] = []
    refused = RECORD | {
        "state": "refused",
        "error": {"code": "c", "message": "m", "limit": "max_running"},
        "choices": [],
    }

    def answer(_path: str, body: object) -> tuple[int, object]:
        asked.append(body)
        return 200, {"requests": [refused, refused]}

    with answering(answer) as url:
        out = io.StringIO()
        assert run(["requests", "--url", url, "--limit", "max_running", "--tenant", "a", "--json"], out) == 0
        assert run(["requests", "--url", url], io.StringIO()) == 0

    assert json.loads(out.getvalue()) == [refused]
    common = {"model": None, "slowest": False, "most": 30}
    assert asked[0] == common | {"state": None, "tenant": "a", "limit": "max_running"}
    assert asked[1] == common | {"state": "running", "tenant": None, "limit": None}


def test_one_is_ended() -> None:
    """It prints what had become of the request."""
    out = io.StringIO()
    with answering(lambda _path, _body: (200, STUCK)) as url:
        assert run(["requests", "--url", url, "--end", "stuck"], out) == 0

    assert out.getvalue().splitlines()[-1] == "ended"


def test_a_number_out_of_range_is_refused() -> None:
    """The router would refuse it with the name of its field."""
    with pytest.raises(SettingsError, match="--most 0"):
        run(["requests", "--most", "0"], io.StringIO())
