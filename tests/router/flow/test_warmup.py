"""What a new replica is sent to fill its cache, one prefix after the other."""

from homing.kvcache.hashing import HASH_BYTES, TOKEN_BYTES, BlockHash
from homing.replica.messages import Refused, TokenBatch, TokenOutput
from homing.router.backend import RouterCounters, WarmUpProgress
from homing.router.flow.hot_prefixes import HotPrefix
from homing.router.flow.warmup import LAST_PRIORITY, WarmUps


def prefix(blocks: int) -> HotPrefix:
    return HotPrefix(BlockHash(bytes(16)), bytes(blocks * 16 * TOKEN_BYTES), bytes(blocks * HASH_BYTES), asked=2)


def done(wire_id: int, cached: int = 0) -> TokenBatch:
    output = TokenOutput(request_id=wire_id, index=0, token_ids=[1], finish_reason="length", cached_tokens=cached)
    return TokenBatch(step=0, outputs=[output])


def begun(*blocks: int) -> WarmUps:
    warm_ups = WarmUps(RouterCounters())
    warm_ups.begin("r1", [prefix(each) for each in blocks])
    return warm_ups


def test_each_prefix_is_asked_for_as_one_token_behind_everybody() -> None:
    """The token is thrown away: what it leaves behind is what counts."""
    warm_ups = begun(1, 2)

    request = warm_ups.next("r1", 7)

    assert request is not None
    assert (request.request_id, request.prompt_tokens, request.warm_up) == (7, 16, True)
    assert (request.sampling.max_tokens, request.priority) == (1, LAST_PRIORITY)
    assert warm_ups.answered("r1", done(7))
    assert warm_ups.progress("r1") == WarmUpProgress(done_tokens=16, planned_tokens=48)


def test_it_is_over_when_all_are_answered() -> None:
    """What a prefix shares with one before it was in the cache, and is no work."""
    warm_ups = begun(1, 2)
    for wire_id, cached in ((1, 0), (2, 16)):
        assert warm_ups.next("r1", wire_id) is not None
        assert warm_ups.answered("r1", done(wire_id, cached))

    assert warm_ups.next("r1", 3) is None
    assert "r1" not in warm_ups
    counters = warm_ups.counters
    assert (counters.warm_up_requests, counters.warm_up_tokens, counters.warm_ups_cut) == (2, 32, 0)


def test_only_the_answer_to_what_was_asked_goes_on() -> None:
    """Late words on other requests must not send two at once."""
    warm_ups = begun(1, 1)
    warm_ups.next("r1", 5)

    assert not warm_ups.answered("r1", done(4))
    assert not warm_ups.answered("r1", Refused(request_id=4, reason="draining", message="no"))
    assert warm_ups.answered("r1", Refused(request_id=5, reason="prompt_too_long", message="no"))
    assert warm_ups.progress("r1") == WarmUpProgress(done_tokens=0, planned_tokens=32)


def test_who_stops_it_learns_what_is_under_way() -> None:
    """To be aborted. What was not begun has nothing to be stopped."""
    warm_ups = begun(1)
    warm_ups.next("r1", 9)

    assert warm_ups.stop("r1") == 9
    assert warm_ups.stop("r1") is None
    assert warm_ups.progress("r1") is None
    assert warm_ups.counters.warm_ups_cut == 1
