"""Tests of the judge: correct records are broken in one way at a time, and the judge must notice."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .judge import (
    NULL_BLOCKS,
    SPARE_FILES,
    Course,
    Outcome,
    Round,
    book_faults,
    courses,
    creeps,
    difference,
    gap_at_s,
    gap_before_s,
    judge,
    leaks,
    longest_first_s,
    longest_gap_s,
    out_of_routing_s,
    rebuilt_s,
    router_back_s,
    row,
)
from .log import SPARE_PROCESS, Answer, Books, Census, Reading, Seen, Sighting, Struck
from .report import summary, table, violations

ROUTER = "http://127.0.0.1:1"
TIMEOUT_S = 10.0
RIGHT = Answer(tokens=("a", "b", "c", "d", "e"), text="abcde", finish_reason="length")
GOOD = Seen(
    question=0,
    streamed=True,
    url=ROUTER,
    began_s=100.0,
    ended_s=101.0,
    status=200,
    tokens=RIGHT.tokens,
    token_times_s=(100.1, 100.2, 100.3, 100.7, 100.8),
    text=RIGHT.text,
    finish_reason="length",
    usage_tokens=5,
    whole=True,
)
ERROR = {"error": {"message": "replica r0 was lost", "type": "server_error", "param": None, "code": "replica_lost"}}
FAILED = replace(GOOD, tokens=("a", "b"), text="ab", whole=False, error=ERROR, finish_reason=None, usage_tokens=None)
KILLED = Struck(at_s=100.5, mended_s=100.5, url=ROUTER)


def outcome(seen: Seen, struck: Struck | None = None) -> Outcome:
    return judge(seen, RIGHT, timeout_s=TIMEOUT_S, struck=struck).outcome


def test_a_right_answer_and_a_clear_error_pass() -> None:
    """The cluster promises one of these two outcomes for every request."""
    assert outcome(GOOD) is Outcome.RIGHT
    assert outcome(FAILED) is Outcome.FAILED
    assert judge(FAILED, RIGHT, timeout_s=TIMEOUT_S).words == "replica_lost"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"tokens": ("a", "b", "c", "c", "d", "e")}, Outcome.WRONG),
        ({"tokens": ("a", "b", "d", "e")}, Outcome.WRONG),
        ({"tokens": ("a", "b", "c")}, Outcome.WRONG),
        ({"tokens": ("a", "b", "x", "d", "e")}, Outcome.WRONG),
        ({"tokens": (*RIGHT.tokens, "f")}, Outcome.WRONG),
        ({"text": "abcd"}, Outcome.WRONG),
        ({"usage_tokens": 6}, Outcome.WRONG),
        ({"finish_reason": "stop"}, Outcome.WRONG),
        ({"ended_s": 100.0 + TIMEOUT_S + 3}, Outcome.LATE),
        ({"whole": False}, Outcome.UNCLEAR),
        ({"status": 500}, Outcome.UNCLEAR),
        ({"trouble": "IncompleteReadError"}, Outcome.UNCLEAR),
        ({"refused": True}, Outcome.UNCLEAR),
    ],
)
def test_a_broken_log_is_caught(change: dict[str, Any], expected: Outcome) -> None:
    """Each change is a way in which a cluster can fail its client."""
    assert outcome(replace(GOOD, **change)) is expected


@pytest.mark.parametrize(
    "error",
    [
        "Internal Server Error",
        {"detail": "no"},
        {"error": "no"},
        {"error": {"message": "no"}},
        {"error": {"message": "", "type": "server_error", "param": None, "code": None}},
    ],
)
def test_an_error_that_is_not_in_openais_shape_is_caught(error: Any) -> None:
    """OpenAI's clients need all four fields of an error."""
    assert outcome(replace(FAILED, error=error)) is Outcome.UNCLEAR


def test_a_stream_that_failed_must_not_end_as_if_it_were_whole() -> None:
    """A client that only looks for [DONE] would take half an answer for a whole one."""
    assert outcome(replace(FAILED, whole=True)) is Outcome.UNCLEAR


def test_what_came_before_an_error_must_be_right_too() -> None:
    """The client has already shown those tokens to a user."""
    assert outcome(replace(FAILED, tokens=("a", "x"))) is Outcome.WRONG


def test_only_the_router_that_was_killed_may_cut_and_only_what_it_carried() -> None:
    """A killed router may cut its own connections, and no others."""
    cut = replace(GOOD, tokens=("a", "b"), whole=False, trouble="reset")

    assert outcome(cut, KILLED) is Outcome.CUT
    assert outcome(replace(cut, url="http://127.0.0.1:2"), KILLED) is Outcome.UNCLEAR
    assert outcome(replace(cut, ended_s=100.2), KILLED) is Outcome.UNCLEAR
    assert outcome(replace(cut, tokens=("b",)), KILLED) is Outcome.WRONG
    later = replace(cut, began_s=100.6, status=None, tokens=())
    assert outcome(later, KILLED) is Outcome.UNSERVED
    assert outcome(replace(later, refused=True), KILLED) is Outcome.UNSERVED
    assert outcome(replace(later, status=200), KILLED) is Outcome.UNCLEAR
    assert outcome(replace(cut, refused=True, url="http://127.0.0.1:2"), KILLED) is Outcome.UNCLEAR


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        ("abcde", ""),
        ("abcbcde", "2 tokens before 3 came twice"),
        ("ade", "2 tokens from 1 on are lost"),
        ("abc", "2 tokens are missing at the end"),
        ("abcdef", "1 tokens are too many"),
        ("abxde", "token 2 is 'x' instead of 'c'"),
    ],
)
def test_a_difference_is_described_by_its_kind(seen: str, words: str) -> None:
    """Repeated, lost and wrong tokens point at different bugs."""
    assert difference("abcde", seen) == words


@given(st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), max_size=8))
def test_every_difference_is_described(right: list[int], seen: list[int]) -> None:
    """No kind of difference may go unnoticed."""
    words = difference([str(token) for token in right], [str(token) for token in seen])

    assert (words == "") == (right == seen)


def test_gaps_are_between_tokens_of_one_stream() -> None:
    """The pauses that a reader sees. Tokens of another stream must not hide them."""
    late = replace(GOOD, token_times_s=(100.65, 100.75))

    assert longest_gap_s([GOOD, late]) == pytest.approx(0.4)
    assert longest_gap_s([]) == 0.0
    assert gap_before_s([GOOD], 100.5) == pytest.approx(0.1)
    assert gap_at_s([GOOD], 100.5) == pytest.approx(0.4)
    assert gap_at_s([GOOD], 100.75) == pytest.approx(0.1)
    assert longest_first_s([GOOD]) == pytest.approx(0.1)


def looks(*rows: tuple[float, int, str, str]) -> list[Sighting]:
    """Sightings of replica r0 (none where epoch is 0), each with one of r1, which shows that the router answered."""
    found = [Sighting(at, "r0", epoch, state, feed) for at, epoch, state, feed in rows if epoch]
    return found + [Sighting(row[0], "r1", 9, "serving", "live") for row in rows]


HIT = Struck(at_s=10.0, mended_s=10.0, replica="r0", epoch=1)


def test_the_way_out_of_routing_and_back_is_timed() -> None:
    """It is out when this process no longer serves, and back when another one serves with a live feed."""
    seen = looks(
        (9.9, 1, "serving", "live"),
        (10.1, 1, "serving", "live"),
        (10.4, 0, "", ""),
        (15.0, 2, "joining", "syncing"),
        (16.0, 2, "serving", "syncing"),
        (17.0, 2, "serving", "live"),
    )

    assert out_of_routing_s(seen, HIT) == pytest.approx(0.4)
    assert rebuilt_s(seen, HIT) == pytest.approx(7.0)


def test_a_killed_router_is_back_with_the_first_request_that_it_takes() -> None:
    """A refused request does not count, nor one at another router."""
    tried = replace(GOOD, began_s=101.0, refused=True, whole=False)
    elsewhere = replace(GOOD, url="http://127.0.0.1:2", began_s=101.0)
    taken = replace(GOOD, began_s=104.5)

    assert router_back_s([tried, elsewhere], KILLED) is None
    assert router_back_s([tried, elsewhere, taken], KILLED) == pytest.approx(4.0)


def test_a_replica_that_never_left_has_not_come_back() -> None:
    """A frozen replica that stays in routing is exactly the failure to be detected."""
    seen = looks((10.1, 1, "serving", "live"), (20.0, 1, "serving", "live"))

    assert out_of_routing_s(seen, HIT) is None
    assert rebuilt_s(seen, HIT) is None


def test_a_process_that_is_back_must_be_exact_before_it_counts() -> None:
    """After a freeze, the index is outdated until the feed is live again."""
    seen = looks((11.0, 0, "", ""), (20.0, 1, "serving", "syncing"), (20.3, 1, "serving", "live"))

    assert rebuilt_s(seen, HIT) == pytest.approx(10.3)


def test_lost_blocks_and_an_index_that_lies_are_found() -> None:
    """While idle, all blocks but the null block must be free, and the index must match the replica."""
    fine = Books("r0", free_blocks=100 - NULL_BLOCKS, num_blocks=100, cached_blocks=7, indexed_blocks=7)

    assert book_faults([fine]) == []
    assert book_faults([replace(fine, free_blocks=98)]) == ["r0: 1 blocks are not free"]
    assert book_faults([replace(fine, indexed_blocks=8)]) == ["r0: the index has 8 of its blocks, it holds 7"]


def test_more_processes_and_more_files_are_leaks_and_another_process_is_none() -> None:
    """A rebuilt replica is a new process with its own number of files."""
    router, rank = Census(1, "ray::RouterProcess", 60, 1000), Census(2, "ray::ReplicaRank", 60, 1000)

    assert leaks([router, rank], [router, replace(rank, pid=3, files=90)]) == []
    spare = replace(rank, title=SPARE_PROCESS, files=20)
    assert leaks([rank, spare], [replace(rank, pid=spare.pid), replace(spare, pid=5)]) == []
    assert leaks([spare], [spare] * 2) == []
    assert leaks([spare], [spare] * 3) == [f"2 more processes {SPARE_PROCESS!r}"]
    assert leaks([router], [router, router]) == ["1 more processes 'ray::RouterProcess'"]
    assert len(leaks([router], [replace(router, files=60 + SPARE_FILES + 1)])) == 1


def course(*values: int, metric: str = "KiB", subject: str = "rank 1") -> list[Reading]:
    return [Reading(30.0 * look, subject, metric, value) for look, value in enumerate(values)]


def test_a_course_has_the_medians_of_the_first_the_fourth_and_the_last_sixth() -> None:
    """Medians, because a single reading during a busy moment must not look like a leak."""
    readings = course(*(10, 11, 12), *(20,) * 6, *(30, 31, 99), *(40,) * 3, *(50, 51, 52))

    assert courses(readings) == [Course("rank 1", "KiB", 11.0, 31.0, 51.0)]


def test_only_what_lived_all_the_time_has_a_course() -> None:
    """A rebuilt replica's numbers start from zero."""
    lived, came = course(*range(12)), course(*range(12), subject="rank 2")[3:]

    assert [each.subject for each in courses(lived + came)] == ["rank 1"]
    assert courses(course(1, 2, 3)) == []


@pytest.mark.parametrize(
    ("metric", "middle", "last", "creeps_up"),
    [
        ("KiB", 100_000, 140_000, True),
        ("KiB", 100_000, 110_000, False),
        ("KiB", 1_000_000, 1_020_000, False),
        ("files", 60, 64, False),
        ("files", 60, 80, True),
        ("threads", 30, 40, True),
        ("free_blocks", 10, 500, False),
    ],
)
def test_what_still_grows_in_the_second_half_creeps(metric: str, middle: int, last: int, creeps_up: bool) -> None:
    """Caches fill at first; numbers that are constant afterwards are no leak."""
    found = creeps([Course("rank 1", metric, 0.0, middle, last)])

    assert bool(found) == creeps_up


def test_a_row_says_what_is_violated_and_the_table_shows_it() -> None:
    """The exit code depends on these texts."""
    broken = replace(GOOD, tokens=("a", "b", "d", "e"))
    found = Round("kill", (GOOD, FAILED, broken), (), HIT, trouble=("never within 1 s: peace",))

    line = row(found, {0: RIGHT}, timeout_s=TIMEOUT_S)

    assert line.errors == {"replica_lost": 1}
    assert line.outcomes == {Outcome.RIGHT: 1, Outcome.FAILED: 1, Outcome.WRONG: 1}
    assert violations([line]).splitlines() == [
        "kill: question 0 (stream): wrong: 1 tokens from 2 on are lost",
        "kill: never within 1 s: peace",
    ]
    assert "1 replica_lost" in table([line])


def test_a_summary_adds_up_all_seeds_and_names_the_slowest() -> None:
    """It is what remains of three runs that took an hour."""
    line = row(Round("kill", (GOOD, FAILED), (), HIT), {0: RIGHT}, timeout_s=TIMEOUT_S)
    lines = [replace(line, rebuilt_s=seconds) for seconds in (1.0, 2.5, None)]

    _, _, kill, _, total = summary([*lines, replace(line, fault="slow")]).splitlines()

    assert [cell.strip() for cell in kill.split("|")] == ["kill", "3", "6", "0", "3", "0", "400 ms", "2.50 s"]
    assert [cell.strip() for cell in total.split("|")][:3] == ["all", "4", "8"]


def test_a_round_in_which_nothing_was_answered_has_tested_nothing() -> None:
    """Otherwise a cluster that answers every request with an error would pass."""
    line = row(Round("kill", (FAILED,), (), HIT), {0: RIGHT}, timeout_s=TIMEOUT_S)

    assert "nothing was tested" in violations([line])
