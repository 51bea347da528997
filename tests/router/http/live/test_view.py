"""The live page's frames: the first one is complete, later ones hold only changes, and all are bounded in size."""

import json
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from homing.router.http.live.trends import KEPT, Sample, Trends
from homing.router.http.live.view import MAX_CANDIDATES, MAX_REPLICAS, Items, frame, items_of

from ..fakes import FakeBackend, replica_view
from .situations import HOSTILE, activity, situation

documents = st.dictionaries(
    st.sampled_from("abcde"), st.integers(0, 2).map(lambda number: b'{"n":%d}' % number), max_size=5
)


def apply(shown: dict[str, Any], sent: bytes) -> dict[str, Any]:
    """The documents that a viewer has after applying a frame."""
    assert sent.startswith(b"data: ")
    assert sent.index(b"\n\n") == len(sent) - 2
    told = json.loads(sent[6:])
    kept = {} if told["all"] else {name: value for name, value in shown.items() if name not in told["gone"]}
    return kept | told["set"]


def shown(items: Items) -> dict[str, Any]:
    return {name: json.loads(value) for name, value in items.items()}


@given(moments=st.lists(documents.filter(bool), min_size=1), joined=st.integers(0, 10))
def test_a_viewer_that_applies_every_frame_has_what_is_shown(moments: list[Items], joined: int) -> None:
    """The first frame holds everything and later ones the differences, whenever the viewer joins."""
    joined = min(joined, len(moments) - 1)
    has = apply({"left over": 1}, frame({}, moments[joined], 0.0))

    for before, after in zip(moments[joined:], moments[joined + 1 :], strict=False):
        has = apply(has, frame(before, after, 0.0))

    assert has == shown(moments[-1])


def test_nothing_changes_with_time_alone(backend: FakeBackend) -> None:
    """The frames of an idle cluster contain no documents."""
    items = items_of(situation(backend))

    assert json.loads(frame(items, items_of(situation(backend)), 2.0)[6:]) == {
        "now": 2.0,
        "all": False,
        "set": {},
        "gone": [],
    }


def test_blocks_are_shown_by_state_and_add_up(backend: FakeBackend) -> None:
    """Of 100 blocks, 60 are free, 20 of them cached; of the 40 in use, 10 are pinned."""
    replica = shown(items_of(situation(backend)))["replica/r0"]

    assert replica["blocks"] == {"referenced": 30, "pinned": 10, "cached": 20, "free": 40}
    assert (replica["events"], replica["gaps"]) == ("live", 2)


def test_a_replica_that_has_not_reported_shows_no_blocks(backend: FakeBackend) -> None:
    """Its last report may date from before it was rebuilt."""
    silent = msgspec.structs.replace(replica_view("r0", "joining"), report_age_s=None)
    now = situation(backend)
    cluster = msgspec.structs.replace(now.cluster, replicas=[silent])

    assert shown(items_of(situation(backend, cluster=cluster)))["replica/r0"]["blocks"] is None


def test_a_decision_is_shown_with_its_table_and_what_came_of_it(backend: FakeBackend) -> None:
    """Times are absolute, and tenants are shown by name."""
    decision = shown(items_of(situation(backend)))["decision/0/7"]

    assert [row["replica"] for row in decision["candidates"]] == ["r1", "r0"]
    assert (decision["at"], decision["tenant"], decision["chosen"]) == (1010.0, "team", "r0")
    assert (decision["ttft_s"], decision["cached_tokens"]) == (0.01, 16)


def test_of_many_candidates_the_chosen_one_and_the_best_are_shown(backend: FakeBackend) -> None:
    """A table of 512 rows is unreadable, and it would be sent for every request."""
    many = situation(backend, activities=[activity(candidates=100)])
    decision = shown(items_of(many))["decision/0/7"]

    names = [row["replica"] for row in decision["candidates"]]
    assert names == ["r0", *(f"r{number}" for number in range(1, MAX_CANDIDATES))]
    assert decision["hidden"] == 100 - MAX_CANDIDATES


def test_of_very_many_replicas_some_are_left_out_and_counted(backend: FakeBackend) -> None:
    """A frame must stay below one MiB."""
    now = situation(backend)
    many = [replica_view(f"r{number}", "serving") for number in range(2 * MAX_REPLICAS)]
    items = items_of(situation(backend, cluster=msgspec.structs.replace(now.cluster, replicas=many)))

    assert sum(name.startswith("replica/") for name in items) == MAX_REPLICAS
    assert shown(items)["router"]["hidden_replicas"] == MAX_REPLICAS
    assert len(frame({}, items, 0.0)) < 1024 * 1024


def test_the_last_quarter_of_an_hour_is_kept(backend: FakeBackend) -> None:
    """The page draws it when it is opened; old samples leave as new ones come."""
    trends = Trends()
    for number in range(2 * KEPT):
        trends.add(Sample(float(number), 0, 0, 0, 0, 0, 0, 0, [1]))
    before = items_of(situation(backend, trend=[*trends.items()]))
    trends.add(Sample(1e6, 0, 0, 0, 0, 0, 0, 0, [1]))

    sent = json.loads(frame(before, items_of(situation(backend, trend=[*trends.items()])), 0.0)[6:])

    assert len(trends) == KEPT
    assert sent["set"] == {f"trend/{2 * KEPT + 1}": [1e6, 0, 0, 0, 0, 0, 0, 0, [1]]}
    assert sent["gone"] == [f"trend/{KEPT + 1}"]


def test_who_was_refused_is_shown_by_limit(backend: FakeBackend) -> None:
    """The most frequent come last, so that a limited list keeps them."""
    refusals = {("team", f"limit{number}"): number for number in range(100)}

    rows = shown(items_of(situation(backend, refusals=refusals)))["router"]["refusals"]

    assert rows[-1] == ["team", "limit99", 99]
    assert len(rows) < 100


def test_text_that_clients_choose_stays_inside_a_json_string(backend: FakeBackend) -> None:
    """The page inserts it as text, and it must not be able to start another event in the stream."""
    sent = frame({}, items_of(situation(backend)), 0.0)

    assert apply({}, sent)["failure/0/1"]["id"] == HOSTILE
