"""How busy an engine is, as a report of ours."""

import pytest

from homing.kvcache.hashing import token_bytes
from homing.replica.messages import Generate, SamplingParams
from homing.router.replicas.external.engine_metrics import Numbers
from homing.router.replicas.external.load import UNKNOWN_BLOCKS, ForeignLoad
from homing.router.replicas.external.request import ForeignRequest

from ...fakes import description_of


class Nobody:
    """Takes what a request brings, and does nothing."""

    def brought(self, request, output) -> None: ...
    def turned_down(self, request, refusal) -> None: ...


def request_at(number: int, *, ahead: int = 100) -> ForeignRequest:
    """A request of a hundred tokens, sent at time 0."""
    generate = Generate(
        request_id=number,
        token_ids=token_bytes(range(100)),
        prompt_tokens=100,
        root=bytes(16),
        block_hashes=b"",
        sampling=SamplingParams(max_tokens=8),
    )
    return ForeignRequest(generate, Nobody(), eos_token_ids=frozenset(), tokens_ahead=ahead, clock=lambda: 0.0)


@pytest.fixture
def load() -> ForeignLoad:
    load = ForeignLoad(description_of("b0"))
    load.begin(Numbers(num_blocks=500))
    return load


def test_requests_count_as_running_from_their_first_token_on(load: ForeignLoad) -> None:
    """Before that the router counts them itself; both would be twice."""
    request = request_at(1)
    load.sent(request)
    assert load.report(0.0, cached_blocks=0).running == 0

    assert load.heard(request, 0.5)
    assert not load.heard(request, 0.6)
    assert load.report(0.6, cached_blocks=0).running == 1
    load.ended(request)
    load.ended(request)

    report = load.report(1.0, cached_blocks=0)
    assert (report.running, report.counters.query_tokens) == (0, 100)
    assert round(report.prefill_tokens_per_s) == 200


def test_other_clients_requests_are_those_beyond_ours(load: ForeignLoad) -> None:
    """The engine counts all of them."""
    load.sent(request_at(1))

    load.look(Numbers(running=3, waiting=2, kv_usage=0.5))

    assert load.report(0.0, cached_blocks=0).running == 4


def test_blocks_come_from_usage_as_far_as_it_is_told(load: ForeignLoad) -> None:
    """Cached blocks beyond the used ones are free and still hold something."""
    load.look(Numbers(kv_usage=0.2))

    report = load.report(0.0, cached_blocks=150)

    assert (report.total_blocks, report.free_blocks, report.cached_free_blocks) == (500, 400, 50)


def test_an_engine_that_tells_nothing_has_room() -> None:
    """Its own queue is then the only bound."""
    load = ForeignLoad(description_of("b0"))
    load.begin(Numbers())

    assert load.report(0.0, cached_blocks=3).free_blocks == UNKNOWN_BLOCKS
