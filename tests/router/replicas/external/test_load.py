"""An engine's load, expressed as one of our load reports."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.events.load_report import fit
from homing.kvcache.hashing import token_bytes
from homing.replica.messages import Generate, SamplingParams
from homing.router.replicas.external.load import (
    MAX_SAMPLES,
    MIN_PREFILL_TOKENS,
    UNKNOWN_BLOCKS,
    UNKNOWN_PREFILL_TOKENS_PER_S,
    EngineMetrics,
    EngineRates,
    ExternalLoad,
    metric_ranks,
    read_metrics,
)
from homing.router.replicas.external.request import ExternalRequest

from ...fakes import description_of


class Nobody:
    """Ignores a request's outputs and refusals."""

    def on_output(self, request, output) -> None: ...
    def on_refusal(self, request, refusal) -> None: ...


def request_at(number: int, *, uncached: int = 100, sent_at: float = 0.0) -> ExternalRequest:
    """Build a request with a prompt of 100 tokens."""
    generate = Generate(
        request_id=number,
        token_ids=token_bytes(range(100)),
        prompt_tokens=100,
        root=bytes(16),
        block_hashes=b"",
        sampling=SamplingParams(max_tokens=8),
    )
    return ExternalRequest(
        generate, Nobody(), eos_token_ids=frozenset(), vocab_size=4000, uncached_tokens=uncached, now=sent_at
    )


@pytest.fixture
def load() -> ExternalLoad:
    load = ExternalLoad(description_of("b0"))
    load.begin(EngineMetrics(num_blocks=500))
    return load


def test_requests_count_as_running_from_their_first_token_on(load: ExternalLoad) -> None:
    """Earlier, the router counts them itself, so they would be counted twice."""
    request = request_at(1)
    load.sent(request)
    assert load.report(0.0, cached_blocks=0).running == 0

    assert load.tokens_arrived(request, 0.5)
    assert not load.tokens_arrived(request, 0.6)
    assert load.report(0.6, cached_blocks=0).running == 1
    load.ended(request)
    load.ended(request)

    report = load.report(1.0, cached_blocks=0)
    assert (report.running, report.counters.query_tokens) == (0, 100)
    assert round(report.prefill_tokens_per_s) == 200


def test_a_request_that_another_engine_has_had_is_no_second_query(load: ExternalLoad) -> None:
    """Hit rates would fall with each engine that dies; what it computes here still counts."""
    request = request_at(1)
    request.generate = msgspec.structs.replace(request.generate, counted=True)
    load.sent(request)
    load.tokens_arrived(request, 0.5)
    load.ended(request)

    counted = load.report(1.0, cached_blocks=0).counters

    assert (counted.query_tokens, counted.hit_tokens, counted.prefilled_tokens) == (0, 0, 100)


def test_a_short_prompt_costs_more_than_its_length(load: ExternalLoad) -> None:
    """Routers fit the parts of the cost to the first-token times of all engines."""
    for number in range(40):
        request = request_at(number, uncached=50 if number % 2 else 2000)
        load.sent(request)
        load.tokens_arrived(request, 0.02 + request.uncached_tokens / 1000)
        load.ended(request)

    report = load.report(9.0, cached_blocks=0)

    assert report.prefill_sums is not None
    cost = fit(report.prefill_sums, report.prefill_tokens_per_s)
    assert cost.seconds(0, 50) == pytest.approx(0.07, rel=0.05)
    assert cost.seconds(0, 2000) == pytest.approx(2.02, rel=0.05)


def test_a_prompt_behind_another_one_is_not_measured_as_if_it_had_computed_both(load: ExternalLoad) -> None:
    """It arrives when the other prompt is almost computed: its own time would suggest a machine ten times as fast."""
    for number in range(0, 80, 2):
        at = 10.0 * number
        long, short = (
            request_at(number, uncached=2000, sent_at=at),
            request_at(number + 1, uncached=90, sent_at=at + 1.9),
        )
        load.sent(long)
        load.sent(short)
        load.tokens_arrived(long, at + 2.09)
        load.tokens_arrived(short, at + 2.09)
        load.ended(long)
        load.ended(short)

    report = load.report(900.0, cached_blocks=0)

    assert report.prefill_tokens_per_s == pytest.approx(1000)
    assert fit(report.prefill_sums or [], 1000.0).seconds(0, 2000) == pytest.approx(2.0, rel=0.05)


def test_a_request_that_leaves_before_its_first_token_spoils_no_measurement(load: ExternalLoad) -> None:
    """How much of it was computed is unknown. From the next request on, time is measured again."""
    gone, waiting, other = request_at(1, uncached=4000), request_at(2, uncached=500), request_at(3, uncached=500)
    for each in (gone, waiting, other):
        load.sent(each)
    load.ended(gone)

    load.tokens_arrived(waiting, 3.0)
    assert load.report(3.0, cached_blocks=0).prefill_tokens_per_s == UNKNOWN_PREFILL_TOKENS_PER_S
    load.tokens_arrived(other, 4.0)
    assert load.report(4.0, cached_blocks=0).prefill_tokens_per_s == 500


def test_an_engine_that_is_never_idle_is_measured_too(load: ExternalLoad) -> None:
    """It is measured over several prompts, of which the last ones are a small part."""
    for number in range(40):
        load.sent(request_at(number, sent_at=number / 10))
        if number:
            load.tokens_arrived(request_at(number - 1), number / 10)

    assert load.report(4.0, cached_blocks=0).prefill_tokens_per_s == pytest.approx(1000)


def test_other_clients_requests_are_those_beyond_ours(load: ExternalLoad) -> None:
    """The engine's metrics count all requests."""
    load.sent(request_at(1))

    load.update(EngineMetrics(running=3, waiting=2, kv_usage=0.5))

    assert load.report(0.0, cached_blocks=0).running == 4


def test_blocks_come_from_usage_as_far_as_it_is_told(load: ExternalLoad) -> None:
    """Cached blocks beyond the used ones are free and still hold KV."""
    load.update(EngineMetrics(kv_usage=0.2))

    report = load.report(0.0, cached_blocks=150)

    assert (report.total_blocks, report.free_blocks, report.cached_free_blocks) == (500, 400, 50)


def test_memory_is_free_when_a_request_ends_and_not_a_second_later(load: ExternalLoad) -> None:
    """Before the first token, engine and router both count a request's blocks; the report counts them once."""
    running, waiting = request_at(1), request_at(2)
    load.sent(running)
    load.tokens_arrived(running, 0.1)
    load.sent(waiting)
    blocks = -(-100 // load.description.parity.block_size)

    def used(now: float) -> int:
        return 500 - load.report(now, cached_blocks=0).free_blocks

    load.update(EngineMetrics(running=2, num_blocks=500, kv_usage=2 * blocks / 500))
    assert used(0.2) == blocks
    load.tokens_arrived(waiting, 0.3)
    assert used(0.3) == 2 * blocks
    load.ended(running)
    load.ended(waiting)
    load.sent(request_at(3))
    assert used(0.4) == 0


def test_what_ends_while_an_engine_is_asked_is_not_another_clients(load: ExternalLoad) -> None:
    """The engine's reply still counts the request and its memory: an idle engine would look busy for a second."""
    request = request_at(1)
    blocks = -(-100 // load.description.parity.block_size)
    load.sent(request)
    load.tokens_arrived(request, 0.1)

    load.query_started()
    load.ended(request)
    load.update(EngineMetrics(running=1, num_blocks=500, kv_usage=blocks / 500))

    report = load.report(0.2, cached_blocks=0)
    assert (report.running, report.free_blocks) == (0, 500)
    load.query_started()
    load.update(EngineMetrics(running=1))
    assert load.report(1.2, cached_blocks=0).running == 1


def test_steps_with_a_prefill_in_them_are_no_decode_steps(load: ExternalLoad) -> None:
    """An engine whose first answer ran next to a long prompt looked a hundred times as slow, and lost its prefixes."""
    decoding, waiting = request_at(1), request_at(2)
    load.sent(decoding)
    load.tokens_arrived(decoding, 0.1)
    decoding.last_token_at = 0.1
    load.sent(waiting)
    before = load.rates.decode_step_s

    load.tokens_arrived(decoding, 1.0)
    load.tokens_arrived(waiting, 1.1)
    load.tokens_arrived(decoding, 1.2)
    assert load.rates.decode_step_s == before

    for number in range(3):
        decoding.last_token_at = 1.2 + 0.05 * number
        load.tokens_arrived(decoding, decoding.last_token_at + 0.05)
    assert load.rates.decode_step_s == pytest.approx(0.05)


def test_an_engine_that_tells_nothing_has_room() -> None:
    """Then only its own queue limits it."""
    load = ExternalLoad(description_of("b0"))
    load.begin(EngineMetrics())

    assert load.report(0.0, cached_blocks=3).free_blocks == UNKNOWN_BLOCKS


def test_observations_replace_the_guess() -> None:
    """The initial guess is not any engine's rate."""
    rates = EngineRates()

    rates.observe_prefill(1000, 0.25)
    for _ in range(3):
        rates.observe_decode(2, 0.02)

    assert (round(rates.prefill_tokens_per_s), rates.decode_step_s) == (4000, 0.01)


def test_one_long_gap_between_tokens_changes_nothing() -> None:
    """The engine computed another client's prompt, even if this is the first gap observed."""
    rates, before = EngineRates(), EngineRates().decode_step_s

    rates.observe_decode(1, 2.0)

    assert rates.decode_step_s == before


def test_one_odd_answer_changes_little() -> None:
    """Engines compile kernels while serving."""
    rates = EngineRates()
    for _ in range(5):
        rates.observe_prefill(1000, 0.1)

    rates.observe_prefill(1000, 60.0)

    assert round(rates.prefill_tokens_per_s) == 10_000


def test_a_short_prompt_tells_nothing_of_prefill() -> None:
    """Its time is mostly the round trip."""
    rates, before = EngineRates(), EngineRates().prefill_tokens_per_s

    rates.observe_prefill(MIN_PREFILL_TOKENS - 1, 5.0)

    assert rates.prefill_tokens_per_s == before


@given(st.lists(st.tuples(st.integers(-5, 10**6), st.floats(-1.0, 1e6, allow_nan=False)), max_size=40))
def test_rates_stay_above_zero(seen: list[tuple[int, float]]) -> None:
    """Rates are used as divisors, so they must be positive whatever the clock returns."""
    rates = EngineRates()
    for tokens, seconds in seen:
        rates.observe_prefill(tokens, seconds)
        rates.observe_decode(tokens, seconds)

    assert rates.prefill_tokens_per_s > 0
    assert rates.decode_step_s > 0


VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",num_gpu_blocks="8192"} 1.0
"""
SGLANG = """sglang:num_running_reqs{model_name="m"} 4.0
sglang:num_queue_reqs{model_name="m"} 0.0
sglang:token_usage{model_name="m"} 0.5
sglang:num_pages{model_name="m"} 256.0
sglang:page_size{model_name="m"} 32.0
"""


def test_vllm_tells_load_and_blocks() -> None:
    """Values are summed over its ranks; a longer metric name with the same start is another metric."""
    assert read_metrics(VLLM) == EngineMetrics(running=5, waiting=1, kv_usage=0.25, num_blocks=8192, block_size=32)


def test_sglang_tells_load_and_blocks() -> None:
    """SGLang uses other metric names, and calls a block a page."""
    assert read_metrics(SGLANG) == EngineMetrics(running=4, waiting=0, kv_usage=0.5, num_blocks=256, block_size=32)


@pytest.mark.parametrize(("metrics", "label"), [(VLLM, "engine"), (SGLANG.replace("{", '{dp_rank="0",'), "dp_rank")])
def test_a_rank_has_its_own_load(metrics: str, label: str) -> None:
    """An engine reports its ranks as separate samples."""
    other = metrics.replace(f'{label}="0"', f'{label}="3"')

    assert read_metrics(metrics + other, 3) == read_metrics(other, 3)
    assert read_metrics(metrics, 3).running is None


def test_what_is_not_told_is_not_made_up() -> None:
    """vLLM reports None for values that a rank does not know yet."""
    assert (
        read_metrics('vllm:cache_config_info{num_gpu_blocks="None"} 1.0\nvllm:num_requests_running NaN\n')
        == EngineMetrics()
    )


@pytest.mark.parametrize(
    "metrics",
    [
        "vllm:num_requests_running{" * 100_000,
        "vllm:num_requests_running{\n" * 100_000,
        'vllm:num_requests_running{engine="1"} 1\n' * 100_000,
        "vllm:num_requests_running 1e300\n",
        f'vllm:cache_config_info{{num_gpu_blocks="{"9" * 5000}"}} 1\n',
        f'vllm:num_requests_running{{engine="{"9" * 5000}"}} 1\n',
    ],
)
def test_metrics_cannot_keep_the_router_busy_or_break_it(metrics: str) -> None:
    """Of any text, a bounded part is read, and numbers that cannot be are not reported."""
    found = read_metrics(metrics)

    assert (found.running or 0) <= MAX_SAMPLES
    assert found.num_blocks is None
    assert metric_ranks(metrics) in ((), (1,))
