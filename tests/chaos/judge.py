"""Turns the clients' records into findings. Pure: records in, verdicts out; independent of how faults are injected.

Every accepted request must end before its deadline, either with the right answer, token for token, or with a clear
error in OpenAI's format. A connection may be cut only if its router was killed.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from statistics import median
from typing import Any

from .log import SPARE_PROCESS, Answer, Books, Census, Reading, Seen, Sighting, Struck

#: Allowed delay between the deadline that the router enforces and the client's receipt of the response.
GRACE_S = 2.0
#: Blocks of a pool that are never free: the null block.
NULL_BLOCKS = 1
#: Tokens already on their way when the fault is injected still arrive for this long.
AT_ONCE_S = 0.02
#: Number of equal time spans into which a soak's readings are divided.
PARTS = 6
#: Allowed growth of a metric in the second half of a soak: this number, or SPARE_SHARE of its value if that is more.
SPARE = {"KiB": 16 * 1024, "files": 8, "sockets": 8, "threads": 4, "processes": 4}
SPARE_SHARE = 0.03
#: Number of descriptors a process may gain without being reported: ZeroMQ and Ray open some late.
SPARE_FILES = 8


class Outcome(Enum):
    """How a request ended."""

    RIGHT = "right"
    FAILED = "failed"  #: ended with a clear error
    CUT = "cut"  #: the connection was cut because its router was killed
    UNSERVED = "unserved"  #: never accepted, because its router was dead
    WRONG = "wrong"
    UNCLEAR = "unclear"  #: no proper end, or an error that OpenAI's clients do not understand
    LATE = "late"


BAD = (Outcome.WRONG, Outcome.UNCLEAR, Outcome.LATE)


@dataclass(slots=True, frozen=True)
class Verdict:
    """The judgement of one request."""

    outcome: Outcome
    words: str = ""  #: the error's code, or a description of the violation


def judge(seen: Seen, right: Answer, *, timeout_s: float, struck: Struck | None = None) -> Verdict:
    """Judge one request; `timeout_s` is the timeout that the request itself asked for."""
    if seen.refused or seen.trouble:
        return _broken(seen, right, struck)
    if seen.ended_s - seen.began_s > timeout_s + GRACE_S:
        return Verdict(Outcome.LATE, f"ended after {seen.ended_s - seen.began_s:.1f} s")
    if seen.error is not None:
        return _failed(seen, right)
    if not seen.whole or seen.status != 200:
        return Verdict(Outcome.UNCLEAR, f"status {seen.status}, but neither a proper end nor an error")
    words = difference(right.tokens, seen.tokens) or _mismatch(seen, right)
    return Verdict(Outcome.WRONG, words) if words else Verdict(Outcome.RIGHT)


def difference(right: Sequence[str], seen: Sequence[str]) -> str:
    """Describe how two token sequences differ; empty if they are equal."""
    if tuple(right) == tuple(seen):
        return ""
    same = next((at for at, pair in enumerate(zip(right, seen, strict=False)) if pair[0] != pair[1]), None)
    if same is None:
        many = len(seen) - len(right)
        return f"{many} tokens are too many" if many > 0 else f"{-many} tokens are missing at the end"
    for count in range(1, same + 1):
        if tuple(seen[same:]) == tuple(right[same - count :]):
            return f"{count} tokens before {same} came twice"
    for count in range(1, len(right) - same):
        if tuple(seen[same:]) == tuple(right[same + count :]):
            return f"{count} tokens from {same} on are lost"
    return f"token {same} is {seen[same]!r} instead of {right[same]!r}"


def is_openai_error(error: Any) -> bool:
    """Whether an error has the format that OpenAI's clients understand."""
    inner = error.get("error") if isinstance(error, dict) else None
    if not isinstance(inner, dict) or not {"message", "type", "param", "code"} <= inner.keys():
        return False
    return bool(inner["message"]) and bool(inner["type"]) and isinstance(inner["message"], str)


def _broken(seen: Seen, right: Answer, struck: Struck | None) -> Verdict:
    """Judge a connection that broke: excused if its router had been killed and had not come back yet."""
    killed = struck is not None and struck.url == seen.url and seen.ended_s >= struck.at_s
    carried = killed and struck is not None and seen.began_s <= struck.at_s
    if killed and not carried and seen.status is None:
        return Verdict(Outcome.UNSERVED, "its router was dead")
    if seen.refused:
        return Verdict(Outcome.UNCLEAR, "connection refused")
    words = _prefix_words(seen, right)
    if words:
        return Verdict(Outcome.WRONG, words)
    return Verdict(Outcome.CUT if carried else Outcome.UNCLEAR, f"the connection broke: {seen.trouble}")


def _failed(seen: Seen, right: Answer) -> Verdict:
    if not is_openai_error(seen.error):
        return Verdict(Outcome.UNCLEAR, f"an error that is not in OpenAI's shape: {seen.error}")
    if seen.whole and seen.streamed and seen.status == 200:
        return Verdict(Outcome.UNCLEAR, "a stream that failed ends as if it were whole")
    words = _prefix_words(seen, right)
    return Verdict(Outcome.WRONG, words) if words else Verdict(Outcome.FAILED, str(seen.error["error"]["code"]))


def _prefix_words(seen: Seen, right: Answer) -> str:
    words = difference(right.tokens[: len(seen.tokens)], seen.tokens)
    return f"before it broke, {words}" if words else ""


def _mismatch(seen: Seen, right: Answer) -> str:
    """The tokens are right: describe any mismatch in text, usage or finish reason; empty if there is none."""
    if seen.text != right.text:
        return "the tokens are right, but the text is not"
    if seen.usage_tokens != len(right.tokens):
        return f"usage counts {seen.usage_tokens} instead of {len(right.tokens)} tokens"
    if seen.finish_reason != right.finish_reason:
        return f"finish_reason is {seen.finish_reason!r} instead of {right.finish_reason!r}"
    return ""


# Times


def gaps(log: Sequence[Seen]) -> list[tuple[float, float]]:
    """Arrival times of each pair of consecutive tokens of one stream."""
    return [gap for seen in log for gap in pairwise(seen.token_times_s)]


def longest_gap_s(log: Sequence[Seen]) -> float:
    """The longest time between two consecutive tokens of one stream."""
    return max((later - earlier for earlier, later in gaps(log)), default=0.0)


def gap_before_s(log: Sequence[Seen], at_s: float) -> float:
    """The longest gap that ended before `at_s`: the machine's usual gaps, without a fault."""
    return max((later - earlier for earlier, later in gaps(log) if later <= at_s), default=0.0)


def gap_at_s(log: Sequence[Seen], at_s: float) -> float:
    """The longest gap during which the fault was injected, or that followed at once."""
    return max((later - earlier for earlier, later in gaps(log) if earlier <= at_s + AT_ONCE_S <= later), default=0.0)


def longest_first_s(log: Sequence[Seen]) -> float:
    """The longest time from a streamed request to its first token."""
    return max((seen.token_times_s[0] - seen.began_s for seen in log if seen.token_times_s), default=0.0)


def out_of_routing_s(sightings: Sequence[Sighting], struck: Struck) -> float | None:
    """Time from the fault until the router stops routing to its victim; None if it never did."""
    by_time: dict[float, bool] = {}
    for sighting in sightings:
        if sighting.at_s >= struck.at_s:
            mine = (sighting.replica, sighting.epoch) == (struck.replica, struck.epoch)
            by_time[sighting.at_s] = by_time.get(sighting.at_s, False) or (mine and sighting.state == "serving")
    return next((at - struck.at_s for at, serves in sorted(by_time.items()) if not serves), None)


def rebuilt_s(sightings: Sequence[Sighting], struck: Struck) -> float | None:
    """Time from the fault until the victim serves again with a live feed; None if it never did.

    A victim that never left routing has not come back, so only sightings after it left count.
    """
    out = out_of_routing_s(sightings, struck)
    if out is None:
        return None
    back = (
        sighting.at_s - struck.at_s
        for sighting in sorted(sightings, key=lambda each: each.at_s)
        if sighting.at_s > struck.at_s + out and sighting.replica == struck.replica and serves(sighting)
    )
    return next(back, None)


def router_back_s(log: Sequence[Seen], struck: Struck) -> float | None:
    """Time from its death until the killed router accepts a request again; None if it never did."""
    taken = (seen.began_s for seen in log if seen.url == struck.url and seen.whole and seen.began_s > struck.at_s)
    first = min(taken, default=None)
    return None if first is None else first - struck.at_s


def serves(sighting: Sighting) -> bool:
    """Whether the replica serves with a live feed."""
    return sighting.state == "serving" and sighting.feed == "live"


# Leftovers


def book_faults(books: Sequence[Books]) -> list[str]:
    """Blocks that an idle replica has not freed, and indexes that do not match the replica's cache."""
    lost = [
        f"{each.replica}: {each.num_blocks - NULL_BLOCKS - each.free_blocks} blocks are not free"
        for each in books
        if each.free_blocks != each.num_blocks - NULL_BLOCKS
    ]
    wrong = [
        f"{each.replica}: the index has {each.indexed_blocks} of its blocks, it holds {each.cached_blocks}"
        for each in books
        if each.indexed_blocks != each.cached_blocks
    ]
    return lost + wrong


def leaks(before: Sequence[Census], after: Sequence[Census]) -> list[str]:
    """Additional processes, and processes that gained more than SPARE_FILES descriptors.

    One more spare is none: Ray starts a process before it knows what for, and keeps some that are idle.
    """
    more = Counter(each.title for each in after) - Counter(each.title for each in before)
    if more[SPARE_PROCESS] == 1:
        del more[SPARE_PROCESS]
    found = [f"{count} more processes {title!r}" for title, count in more.items()]
    was = {each.pid: each for each in before}
    for each in after:
        old = was.get(each.pid)
        gained = each.files - old.files if old is not None and old.title == each.title else 0
        if gained > SPARE_FILES:
            found.append(f"{each.title} ({each.pid}) has {gained} more files open")
    return found


@dataclass(slots=True, frozen=True)
class Course:
    """One number's course during a soak: its median in the first, fourth and last sixth of the time."""

    subject: str
    metric: str
    first: float
    middle: float
    last: float


def courses(readings: Sequence[Reading]) -> list[Course]:
    """The courses of all numbers with readings from the first look to the last, which most processes have."""
    looks = sorted({each.at_s for each in readings})
    if len(looks) < PARTS:
        return []
    by_name: dict[tuple[str, str], list[Reading]] = defaultdict(list)
    for each in readings:
        by_name[each.subject, each.metric].append(each)
    part_s = (looks[-1] - looks[0]) / PARTS
    ends = [(looks[0] + part * part_s, looks[0] + (part + 1) * part_s) for part in (0, PARTS // 2, PARTS - 1)]
    return [
        Course(*name, *(median(each.value for each in found if since <= each.at_s <= till) for since, till in ends))
        for name, found in by_name.items()
        if (found[0].at_s, found[-1].at_s) == (looks[0], looks[-1])
        and all(any(since <= each.at_s <= till for each in found) for since, till in ends)
    ]


def creeps(found: Sequence[Course]) -> list[str]:
    """Numbers that kept growing in the second half of a soak; caches and pools fill in the first half."""
    return [
        f"{each.subject}: {each.metric} grew from {each.middle:.0f} to {each.last:.0f} in the second half"
        for each in found
        if each.metric in SPARE and each.last - each.middle > max(SPARE[each.metric], SPARE_SHARE * each.middle)
    ]


# A whole round


@dataclass(slots=True, frozen=True)
class Round:
    """The observations of one fault under load."""

    fault: str
    log: tuple[Seen, ...]
    sightings: tuple[Sighting, ...]
    struck: Struck
    books: tuple[Books, ...] = ()
    trouble: tuple[str, ...] = ()  #: conditions that the harness waited for in vain


@dataclass(slots=True, frozen=True)
class Row:
    """One row of the report."""

    fault: str
    requests: int
    outcomes: Mapping[Outcome, int]
    errors: Mapping[str, int]  #: counts by error code
    gap_before_s: float
    gap_at_s: float
    longest_gap_s: float
    longest_first_s: float
    out_s: float | None
    rebuilt_s: float | None
    violations: tuple[str, ...]


def row(found: Round, oracle: Mapping[int, Answer], *, timeout_s: float) -> Row:
    """Judge all requests of a round."""
    verdicts = [judge(seen, oracle[seen.question], timeout_s=timeout_s, struck=found.struck) for seen in found.log]
    hit = found.struck.replica is not None
    back_s = rebuilt_s(found.sightings, found.struck) if hit else router_back_s(found.log, found.struck)
    violations = [
        f"question {seen.question} ({'stream' if seen.streamed else 'plain'}): {verdict.outcome.value}: {verdict.words}"
        for seen, verdict in zip(found.log, verdicts, strict=True)
        if verdict.outcome in BAD
    ]
    if not any(verdict.outcome is Outcome.RIGHT for verdict in verdicts):
        violations.append("no request was answered: nothing was tested")
    return Row(
        fault=found.fault,
        requests=sum(verdict.outcome is not Outcome.UNSERVED for verdict in verdicts),
        outcomes=Counter(verdict.outcome for verdict in verdicts),
        errors=Counter(verdict.words for verdict in verdicts if verdict.outcome is Outcome.FAILED),
        gap_before_s=gap_before_s(found.log, found.struck.at_s),
        gap_at_s=gap_at_s(found.log, found.struck.at_s),
        longest_gap_s=longest_gap_s(found.log),
        longest_first_s=longest_first_s(found.log),
        out_s=out_of_routing_s(found.sightings, found.struck) if hit else None,
        rebuilt_s=back_s,
        violations=(*violations, *book_faults(found.books), *found.trouble),
    )
