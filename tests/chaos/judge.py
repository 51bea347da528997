"""Turns what clients saw into findings. Pure: logs in, verdicts out; knows nothing of how a fault was made.

What is required of every accepted request: its right answer, token for token, or a clear error in OpenAI's shape,
before its deadline. A connection may only be cut by the router that was killed.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from statistics import median
from typing import Any

from .log import Answer, Books, Census, Reading, Seen, Sighting, Struck

#: Between the deadline that the router holds and the time when its client has read that.
GRACE_S = 2.0
#: Blocks of a pool that are never free: the null block.
NULL_BLOCKS = 1
#: Tokens that were on their way when the fault came still arrive.
AT_ONCE_S = 0.02
#: A soak is read in so many parts.
PARTS = 6
#: What a number may gain in the second half of a soak without being said to creep, and the share of it.
SPARE = {"KiB": 16 * 1024, "files": 8, "sockets": 8, "threads": 4, "processes": 4}
SPARE_SHARE = 0.03
#: Descriptors that a process may gain without being said to leak: ZeroMQ and Ray open some late.
SPARE_FILES = 8


class Outcome(Enum):
    """What became of a request."""

    RIGHT = "right"
    FAILED = "failed"  #: a clear error
    CUT = "cut"  #: by the router that was killed
    UNSERVED = "unserved"  #: its router was dead: it was never accepted
    WRONG = "wrong"
    UNCLEAR = "unclear"  #: no end, or an error that OpenAI's clients do not understand
    LATE = "late"


BAD = (Outcome.WRONG, Outcome.UNCLEAR, Outcome.LATE)


@dataclass(slots=True, frozen=True)
class Verdict:
    """One request, judged."""

    outcome: Outcome
    words: str = ""  #: the error's code, or what is wrong


def judge(seen: Seen, right: Answer, *, timeout_s: float, struck: Struck | None = None) -> Verdict:
    """`timeout_s` is what the request asked for itself."""
    if seen.refused or seen.trouble:
        return _broken(seen, right, struck)
    if seen.ended_s - seen.began_s > timeout_s + GRACE_S:
        return Verdict(Outcome.LATE, f"ended after {seen.ended_s - seen.began_s:.1f} s")
    if seen.error is not None:
        return _failed(seen, right)
    if not seen.whole or seen.status != 200:
        return Verdict(Outcome.UNCLEAR, f"status {seen.status}, and neither an end nor an error")
    words = difference(right.tokens, seen.tokens) or _mismatch(seen, right)
    return Verdict(Outcome.WRONG, words) if words else Verdict(Outcome.RIGHT)


def difference(right: Sequence[str], seen: Sequence[str]) -> str:
    """In what two rows of tokens differ; empty: in nothing."""
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
    """Whether OpenAI's clients understand it."""
    inner = error.get("error") if isinstance(error, dict) else None
    if not isinstance(inner, dict) or not {"message", "type", "param", "code"} <= inner.keys():
        return False
    return bool(inner["message"]) and bool(inner["type"]) and isinstance(inner["message"], str)


def _broken(seen: Seen, right: Answer, struck: Struck | None) -> Verdict:
    """The connection ended before the answer did: excused where its router was killed just then, or is not back yet."""
    killed = struck is not None and struck.url == seen.url and seen.ended_s >= struck.at_s
    carried = killed and struck is not None and seen.began_s <= struck.at_s
    if killed and not carried and seen.status is None:
        return Verdict(Outcome.UNSERVED, "nobody took it")
    if seen.refused:
        return Verdict(Outcome.UNCLEAR, "nobody listens")
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
    """The tokens are right: is what is said of them?"""
    if seen.text != right.text:
        return "the tokens are right, the text is not"
    if seen.usage_tokens != len(right.tokens):
        return f"usage counts {seen.usage_tokens} of {len(right.tokens)} tokens"
    if seen.finish_reason != right.finish_reason:
        return f"it finished for {seen.finish_reason!r} instead of {right.finish_reason!r}"
    return ""


# Times


def gaps(log: Sequence[Seen]) -> list[tuple[float, float]]:
    """When two tokens of one stream came that follow each other."""
    return [gap for seen in log for gap in pairwise(seen.token_times_s)]


def longest_gap_s(log: Sequence[Seen]) -> float:
    """Between two tokens of one stream."""
    return max((later - earlier for earlier, later in gaps(log)), default=0.0)


def gap_before_s(log: Sequence[Seen], at_s: float) -> float:
    """The longest one that was over by then: what this machine does without a fault."""
    return max((later - earlier for earlier, later in gaps(log) if later <= at_s), default=0.0)


def gap_at_s(log: Sequence[Seen], at_s: float) -> float:
    """The longest one that the fault fell into, or that followed it at once."""
    return max((later - earlier for earlier, later in gaps(log) if earlier <= at_s + AT_ONCE_S <= later), default=0.0)


def longest_first_s(log: Sequence[Seen]) -> float:
    """From a streamed request to its first token."""
    return max((seen.token_times_s[0] - seen.began_s for seen in log if seen.token_times_s), default=0.0)


def out_of_routing_s(sightings: Sequence[Sighting], struck: Struck) -> float | None:
    """From the fault until the router sends its victim nothing; None: never."""
    by_time: dict[float, bool] = {}
    for sighting in sightings:
        if sighting.at_s >= struck.at_s:
            mine = (sighting.replica, sighting.epoch) == (struck.replica, struck.epoch)
            by_time[sighting.at_s] = by_time.get(sighting.at_s, False) or (mine and sighting.state == "serving")
    return next((at - struck.at_s for at, serves in sorted(by_time.items()) if not serves), None)


def rebuilt_s(sightings: Sequence[Sighting], struck: Struck) -> float | None:
    """From the fault until the victim serves again with events that can be trusted; None: never.

    The same process counts only after it was out: before that it is not back, it has not left.
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
    """From its death until the killed router takes a request again; None: never."""
    taken = (seen.began_s for seen in log if seen.url == struck.url and seen.whole and seen.began_s > struck.at_s)
    first = min(taken, default=None)
    return None if first is None else first - struck.at_s


def serves(sighting: Sighting) -> bool:
    """Whether this replica is in full use."""
    return sighting.state == "serving" and sighting.feed == "live"


# What is left behind


def book_faults(books: Sequence[Books]) -> list[str]:
    """Blocks that nobody uses and that are not free, and an index that is not what replicas hold."""
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
    """Processes that there are more of, and descriptors that the same process has more of."""
    more = Counter(each.title for each in after) - Counter(each.title for each in before)
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
    """What became of one number in a soak: medians of the first sixth of the time, of the fourth, and of the last."""

    subject: str
    metric: str
    first: float
    middle: float
    last: float


def courses(readings: Sequence[Reading]) -> list[Course]:
    """Of all that was there from the first look to the last one, as most of a soak's processes are."""
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
    """Numbers that were still growing in the second half. Caches and pools fill in the first."""
    return [
        f"{each.subject}: {each.metric} grew from {each.middle:.0f} to {each.last:.0f} in the second half"
        for each in found
        if each.metric in SPARE and each.last - each.middle > max(SPARE[each.metric], SPARE_SHARE * each.middle)
    ]


# All of one round


@dataclass(slots=True, frozen=True)
class Round:
    """One fault under load, as it was seen."""

    fault: str
    log: tuple[Seen, ...]
    sightings: tuple[Sighting, ...]
    struck: Struck
    books: tuple[Books, ...] = ()
    trouble: tuple[str, ...] = ()  #: what the harness could not do, or wait for


@dataclass(slots=True, frozen=True)
class Row:
    """One line of the table."""

    fault: str
    requests: int
    outcomes: Mapping[Outcome, int]
    errors: Mapping[str, int]  #: by code
    gap_before_s: float
    gap_at_s: float
    longest_gap_s: float
    longest_first_s: float
    out_s: float | None
    rebuilt_s: float | None
    violations: tuple[str, ...]


def row(found: Round, oracle: Mapping[int, Answer], *, timeout_s: float) -> Row:
    """Judge a round."""
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
