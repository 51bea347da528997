"""The scheduler, driven with a model whose tokens can be computed by hand."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from homing.events.wire.messages import PrefillWork
from homing.kvcache.hashing import BlockHasher
from homing.kvcache.pins import PinLimits
from homing.kvcache.prefix_cache import HELD_SHARE, PrefixCache
from homing.replica.engine.drafts import Drafter
from homing.replica.engine.queue_order import PATIENCE
from homing.replica.engine.request import RequestPhase, RequestState
from homing.replica.engine.scheduler import Scheduler, SchedulerLimits
from homing.replica.engine.step_plan import BlockCopy, block_ids
from homing.replica.engine.step_rows import ScheduledRow, logits_layout, plan_of_step
from homing.replica.errors import PromptTooLong
from homing.replica.messages import Pin

from ..fakes import FakeModel, request_state, undisturbed

HANG = 5_000


@dataclass
class Bench:
    """A scheduler with a fake model."""

    blocks: int = 16
    block_size: int = 2
    budget: int = 64
    running: int = 8
    enabled: bool = True
    partial_block_reuse: bool = True
    worth_waiting: int = 128
    prefill_step: int | None = None
    drafter: Drafter | None = None
    drafted_step: int | None = None
    held_share: float = HELD_SHARE
    ended: dict[int, RequestState] = field(default_factory=dict)
    rows: list[ScheduledRow] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hasher = BlockHasher(self.block_size, seed=7)
        self.cache = PrefixCache(
            self.blocks + 1,
            self.block_size,
            enabled=self.enabled,
            partial_block_reuse=self.partial_block_reuse,
            pin_limits=PinLimits(tenant_share=1.0, total_share=1.0),
            held_share=self.held_share,
        )
        self.model = FakeModel(self.blocks + 1, self.block_size)
        longest = self.blocks * self.block_size
        waiting, prefill, drafted = self.worth_waiting, self.prefill_step, self.drafted_step
        limits = SchedulerLimits(self.running, self.budget, longest, waiting, prefill, drafted)
        self.scheduler = Scheduler(limits, self.cache, self.hasher, self.drafter)
        self.number = 0

    def add(self, prompt: list[int], *, pinned: bool = False, **options) -> RequestState:
        self.number += 1
        request = request_state(self.number, prompt, self.hasher, **options)
        request.pins = (Pin(len(prompt), 60.0, b"t" * 16),) if pinned else ()
        self.scheduler.add(request)
        return request

    def step(self, abort_meanwhile: RequestState | None = None) -> int:
        """Run one step as the engine would, including its handling of the tokens; return the number of rows."""
        self.rows = rows = self.scheduler.schedule()
        self.check_rows(rows)
        if not rows:
            return 0
        wanted = logits_layout(rows)
        tokens = self.model.run(plan_of_step(0, rows, wanted.logits_at))
        if abort_meanwhile:
            self.scheduler.finish(abort_meanwhile)
        for row in rows:
            self.scheduler.complete(row)
        for row, token in zip(wanted.samplers, tokens, strict=False):
            if row.request.phase is RequestPhase.RUNNING:
                self.advance(row.request, token)
        return len(rows)

    def next_rows(self) -> list[ScheduledRow]:
        """Schedule the engine's next step with drafts, without running it."""
        return self.scheduler.add_drafts(self.scheduler.schedule())

    def fail(self) -> int:
        """Run a step that raises, which ends its requests; return their number."""
        rows = self.scheduler.schedule()
        for row in rows:
            self.scheduler.finish(row.request)
        return len(rows)

    def advance(self, request: RequestState, token: int) -> None:
        if request.pins and not request.output_sent:
            self.scheduler.pin(request, now=0.0)
        request.append(token, self.hasher)
        request.output_sent = True
        full = request.num_tokens >= self.scheduler.limits.max_model_len
        if full or request.generated >= request.sampling.max_tokens:
            self.ended[request.key.request_id] = request
            self.scheduler.finish(request)

    def check_rows(self, rows: list[ScheduledRow]) -> None:
        assert sum(row.width for row in rows) <= self.budget
        assert len({row.request.key for row in rows}) == len(rows) <= self.running
        assert all(row.count >= 1 for row in rows)

    def run(self) -> None:
        for _ in range(HANG):
            if not len(self.scheduler):
                return
            assert self.step(), "deadlock: requests exist but none is scheduled"
            self.scheduler.check()
        raise AssertionError("requests did not finish")

    def check_end(self) -> None:
        """No blocks are held, and every request got the tokens of an undisturbed run."""
        assert self.cache.free_blocks + self.cache.pinned_idle_blocks == self.cache.total_blocks
        for request in self.ended.values():
            prompt = list(request.tokens[: request.prompt_tokens])
            limit = self.scheduler.limits.max_model_len - len(prompt)
            expected = undisturbed(prompt, min(request.sampling.max_tokens, limit))
            assert list(request.tokens[len(prompt) :]) == expected


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.scheduler.check()


def test_decodes_go_first_and_a_prefill_takes_the_rest_of_the_budget() -> None:
    """A long prompt must not stall requests that are already generating."""
    bench = Bench(budget=4)
    bench.add([1, 2, 3], max_tokens=5)
    bench.step()
    bench.add(list(range(10)))

    bench.step()

    assert [(row.request.key.request_id, row.start, row.count) for row in bench.rows] == [(1, 3, 1), (2, 0, 3)]


def test_a_prompt_longer_than_the_budget_runs_in_chunks() -> None:
    """The chunks add up to the prompt and give the same tokens as one whole prefill."""
    bench = Bench(budget=3)
    bench.add(list(range(10)), max_tokens=1)

    counts = [bench.rows[0].count for _ in range(4) if bench.step()]

    assert counts == [3, 3, 3, 1]
    bench.check_end()


def test_the_second_of_two_equal_prompts_takes_the_cached_blocks(bench: Bench) -> None:
    """The last token must be computed; the tokens before it in its block are copied."""
    bench.add([1, 2, 3, 4, 5, 6])
    bench.run()

    again = bench.add([1, 2, 3, 4, 5, 6])
    bench.step()

    assert again.cached_tokens == 5
    assert bench.model.plans[-1].copies == [BlockCopy(source=3, target=again.blocks[2].block_id, tokens=1)]
    bench.run()
    bench.check_end()


def test_a_prompt_that_diverges_inside_a_block_computes_from_there_on() -> None:
    """Tokens shared within a block are copied instead of computed."""
    bench = Bench(block_size=8)
    bench.add([*range(13)], max_tokens=4)
    bench.run()

    other = bench.add([*range(11), 50, 51], max_tokens=1)
    bench.step()

    assert [(row.start, row.count) for row in bench.rows] == [(11, 2)]
    assert other.cached_tokens == 11
    bench.check_end()


def test_one_admission_s_source_may_be_the_next_one_s_block() -> None:
    """A step reads all copy sources before it writes, so a source need not be held for its reader."""
    bench = Bench(blocks=4, block_size=4, running=2)
    bench.add([1, 2, 3, 4], max_tokens=1)
    bench.run()
    bench.add([5, 6, 7, 8], max_tokens=1)
    bench.run()

    bench.add([1, 2, 9, 9, 9], max_tokens=1)
    bench.add([5, 6, 9, 9, 9], max_tokens=1)
    bench.step()

    first, second = bench.model.plans[-1].copies
    assert (first.tokens, second.tokens) == (2, 2)
    assert first.source in {block for table in bench.model.plans[-1].block_tables for block in block_ids(table)}
    bench.run()
    bench.check_end()


def test_a_source_that_becomes_its_own_target_is_not_copied() -> None:
    """The only free block may be the copy source itself, whose tokens are already in place."""
    bench = Bench(blocks=2, block_size=4)
    bench.add([1, 2, 3, 4], max_tokens=1)
    bench.run()
    bench.add([7, 7, 7], max_tokens=4)
    bench.step()

    sharer = bench.add([1, 2, 9], max_tokens=1)
    bench.step()

    assert (sharer.cached_tokens, bench.model.plans[-1].copies) == (2, [])
    bench.run()
    bench.check_end()


def test_with_copying_switched_off_whole_blocks_alone_are_taken() -> None:
    """Operators switch copying off to investigate a wrong answer."""
    bench = Bench(partial_block_reuse=False)
    for _ in range(2):
        last = bench.add([1, 2, 3, 4, 5, 6])
        bench.run()

    assert last.cached_tokens == 4
    assert not any(plan.copies for plan in bench.model.plans)


def test_drafts_take_what_prompts_leave_of_the_budget() -> None:
    """Drafts may be wrong, but a prompt's tokens are needed."""
    bench = Bench(budget=6, drafter=lambda _, most: [9] * most)
    bench.add([1, 2], max_tokens=20)
    bench.step()
    bench.add([3, 4, 5, 6])

    beside = [(row.count, len(row.drafts)) for row in bench.next_rows()]

    assert beside == [(1, 1), (4, 0)]


def test_each_draft_is_a_row_of_its_own() -> None:
    """Each draft row has one token and follows the previous row, as decode kernels expect."""
    bench = Bench(drafter=lambda tokens, most: [9] * min(most, 3) if tokens[0] == 1 else [])
    for first in (3, 1):
        bench.add([first, 2], max_tokens=20).drafting.trusted = True
    bench.step()

    rows = bench.next_rows()
    plan = plan_of_step(1, rows, logits_layout(rows).logits_at)

    assert plan.q_lens == [1] * 5
    assert plan.starts == [2, 2, 3, 4, 5]
    assert plan.logits_at == [0, 1, 2, 3, 4]
    assert [bytes(table) for table in plan.block_tables[2:]] == [plan.block_tables[1]] * 3


def test_drafts_take_blocks_only_while_some_are_free() -> None:
    """Drafts are cut to the free space; no request is preempted for them."""
    bench = Bench(blocks=4, block_size=2, drafter=lambda _, most: [9] * most)
    requests = [bench.add([number, 2], max_tokens=6) for number in (1, 3)]
    bench.step()

    rows = bench.next_rows()

    assert [(row.start, row.count, len(row.drafts)) for row in rows] == [(2, 1, 1), (2, 1, 1)]
    assert [len(request.blocks) for request in requests] == [2, 2]
    assert bench.scheduler.preemptions == 0


def test_a_step_has_drafts_only_while_further_tokens_cost_little() -> None:
    """Beyond some number of tokens, step time grows almost in proportion to the work."""
    bench = Bench(drafter=lambda _, most: [9] * most, drafted_step=4)
    for first in (1, 3, 5):
        bench.add([first, 2], max_tokens=20)
    bench.step()

    few = bench.next_rows()
    bench.add([7, 8], max_tokens=20)
    bench.step()

    assert [row.width for row in few] == [2, 1, 1]
    assert [row.width for row in bench.next_rows()] == [1] * 4


def test_one_token_is_guessed_until_a_guess_is_right() -> None:
    """A wrong draft costs one row per token, and the next draft is likely to be wrong too."""
    bench = Bench(drafter=lambda _, most: [9] * min(most, 3))
    request = bench.add([1, 2], max_tokens=20)
    bench.step()

    widths = []
    for right in (None, 1, 0):
        if right is not None:
            request.drafting.learn(1, right, request.generated - 100)
        widths.append([row.width for row in bench.next_rows()])

    assert widths == [[2], [4], [2]]


def test_requests_whose_drafts_fail_get_none_for_a_while() -> None:
    """Other requests keep getting drafts, and this one gets them again later."""
    bench = Bench(drafter=lambda _, most: [9] * most, budget=8)
    failing, other = bench.add([1, 2], max_tokens=20), bench.add([3, 4], max_tokens=20)
    bench.step()

    failing.drafting.learn(4, 0, failing.generated)
    rests = [len(row.drafts) > 0 for row in bench.next_rows()]
    for token in range(failing.drafting.paused_until - failing.generated):
        failing.append(token, bench.hasher)
        failing.computed += 1
    guessed = [row.request for row in bench.next_rows() if row.drafts]

    assert rests == [False, True]
    assert failing in guessed
    assert other.drafting.failures == 0


def test_no_draft_lies_beyond_an_answer_s_end() -> None:
    """The last token is always drawn, so at most the remaining tokens less one are worth drafting."""
    bench = Bench(drafter=lambda _, most: [9] * (most + 3))
    bench.add([1, 2], max_tokens=4).drafting.trusted = True
    bench.step()

    (row,) = bench.next_rows()

    assert len(row.drafts) == 2


def test_generated_blocks_are_cached(bench: Bench) -> None:
    """The next turn of a conversation starts with the previous answer."""
    first = bench.add([1, 2, 3], max_tokens=4)
    bench.run()

    following = bench.add([*first.tokens, 9])
    bench.step()

    assert following.cached_tokens == 6, "7 tokens, but the last one's KV was never computed"


def test_a_block_is_not_shared_before_its_kv_is_there(bench: Bench) -> None:
    """Two equal prompts in one step are both computed: otherwise the second would read unfinished blocks."""
    bench.add([1, 2, 3, 4, 5])
    bench.add([1, 2, 3, 4, 5])

    bench.step()

    assert [row.start for row in bench.rows] == [0, 0]
    bench.run()
    bench.check_end()


def test_a_request_waits_for_a_prefix_that_another_computes() -> None:
    """A shared system prompt is computed once, here in chunks, while requests behind the waiter proceed."""
    bench = Bench(budget=5, worth_waiting=4)
    first = bench.add([1, 2, 3, 4, 5, 6, 7, 8, 9])
    second = bench.add([1, 2, 3, 4, 5, 6, 7, 8, 5])
    other = bench.add([6] * 12)

    bench.step()
    assert [(row.request, row.start, row.count) for row in bench.rows] == [(first, 0, 5)]
    bench.step()
    assert [(row.request, row.start, row.count) for row in bench.rows] == [(first, 5, 4), (other, 0, 1)]
    bench.step()

    assert (second, 8, 1) in [(row.request, row.start, row.count) for row in bench.rows]
    bench.run()
    bench.check_end()


def test_nobody_waits_for_a_few_tokens_or_without_a_cache() -> None:
    """A step's fixed cost would exceed the saving; without a cache the blocks would never become available."""
    for options in ({"worth_waiting": 6}, {"worth_waiting": 4, "enabled": False}):
        bench = Bench(**options)
        bench.add([1, 2, 3, 4, 5])
        bench.add([1, 2, 3, 4, 6])

        bench.step()

        assert [row.start for row in bench.rows] == [0, 0]
        bench.run()
        bench.check_end()


def test_prompts_that_fill_a_step_leave_further_ones_to_the_next() -> None:
    """A first token comes as soon as its own prompt is done, not after all of them; no prompt is split for this."""
    bench = Bench(prefill_step=4)
    first, second, third = bench.add([1, 2, 3]), bench.add([4, 5, 6, 7, 8]), bench.add([9] * 6)

    bench.step()
    assert [(row.request, row.count) for row in bench.rows] == [(first, 3), (second, 5)]
    bench.step()

    assert [(row.request, row.count) for row in bench.rows] == [(first, 1), (second, 1), (third, 6)]
    bench.run()
    bench.check_end()


LONG = [1, 2, 3, 4, 5, 6, 7, 8]


def two_of_one_prefix() -> tuple[Bench, RequestState, RequestState]:
    """The first request computes the prefix in chunks while the second waits for it."""
    bench = Bench(budget=4, worth_waiting=4)
    leader, waiter = bench.add([*LONG, 9]), bench.add([*LONG, 5])
    bench.step()
    assert (leader.phase, waiter.phase) == (RequestPhase.RUNNING, RequestPhase.WAITING)
    return bench, leader, waiter


def test_who_waits_for_a_prefix_goes_on_when_its_computer_is_aborted() -> None:
    """The waiter takes the blocks computed so far and must compute the rest itself."""
    bench, leader, waiter = two_of_one_prefix()

    bench.scheduler.finish(leader)
    bench.step()

    assert [(row.request, row.start) for row in bench.rows] == [(waiter, 4)]
    bench.run()
    bench.check_end()


def test_who_waits_for_a_prefix_goes_on_when_the_step_fails() -> None:
    """Blocks of a failed step are not committed, so the waiter gets only the blocks from before it."""
    bench, _, waiter = two_of_one_prefix()

    failed = bench.fail()
    bench.step()

    assert failed == 1
    assert [(row.request, row.start) for row in bench.rows] == [(waiter, 4)]
    bench.run()
    bench.check_end()


def test_who_waits_for_a_prefix_goes_on_when_its_computer_is_preempted() -> None:
    """A decode takes the leader's blocks; the leader resumes before the waiter, and both finish."""
    bench = Bench(blocks=8, budget=3, worth_waiting=4)
    bench.add([9, 7, 5, 3, 1], max_tokens=9)
    bench.step()
    bench.step()
    leader, waiter = bench.add([*LONG, 9], max_tokens=1), bench.add([*LONG, 5], max_tokens=1)

    phases = set()
    while len(bench.scheduler):
        phases.add((leader.phase, waiter.phase))
        assert bench.step()

    assert leader.preemptions == 1
    assert (RequestPhase.RUNNING, RequestPhase.WAITING) in phases
    bench.check_end()


def test_who_loses_least_is_preempted_and_gets_its_tokens_all_the_same() -> None:
    """Preemption recomputes: among equal losses the last request is preempted, and its tokens do not change."""
    bench = Bench(blocks=6)
    old = bench.add([1, 2, 3, 4], max_tokens=7)
    young = bench.add([5, 6, 7, 8], max_tokens=7)
    bench.add([9, 9], max_tokens=1)

    bench.run()

    assert (old.preemptions, young.preemptions) == (0, 1)
    bench.check_end()


def test_a_request_that_has_generated_little_gives_way_to_one_that_has_generated_much() -> None:
    """It is preempted although it came first, because its tokens cost less to recompute."""
    bench = Bench(blocks=8)
    old = bench.add([1, 2, 3, 4, 5, 6], max_tokens=10)
    bench.step()
    bench.scheduler.finish(old)
    again = bench.add([1, 2, 3, 4, 5, 6], max_tokens=10)  # all but the last block of its prompt is cached
    young = bench.add([5, 6, 7, 8, 9, 9], max_tokens=9)

    bench.run()

    assert (again.preemptions, young.preemptions) == (1, 0)
    bench.check_end()


def test_the_less_urgent_priority_gives_way_however_much_it_loses() -> None:
    """Priority counts before the amount of lost work."""
    bench = Bench(blocks=6)
    low = bench.add([1, 2, 3, 4, 5, 6], max_tokens=5, priority=1)
    bench.step()
    bench.step()
    high = bench.add([7, 8], max_tokens=8)

    bench.run()

    assert high.preemptions == 0 < low.preemptions
    bench.check_end()


def test_a_short_prompt_starts_before_the_rest_of_a_long_one() -> None:
    """The long prompt is chunked anyway; its first token is barely delayed, the short one's comes far sooner."""
    bench = Bench(budget=4)
    long = bench.add([1] * 16)
    bench.step()
    short = bench.add([2, 3, 4])

    bench.step()

    assert [(row.request, row.count) for row in bench.rows] == [(short, 3), (long, 1)]
    bench.run()
    bench.check_end()


def test_a_longer_cached_prefix_starts_first() -> None:
    """Among equally long prompts, the one with less to compute starts first."""
    bench = Bench(budget=8, running=1)
    bench.add([1, 2, 3, 4, 5, 6], max_tokens=1)
    bench.run()
    cold, warm = bench.add([9, 2, 3, 4, 5, 6], max_tokens=1), bench.add([1, 2, 3, 4, 5, 7], max_tokens=1)

    bench.step()

    assert [row.request for row in bench.rows] == [warm]
    assert cold.phase is RequestPhase.WAITING
    bench.run()


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3)), min_size=2, max_size=30),
    budget=st.integers(2, 9),
    running=st.integers(1, 4),
)
def test_no_prompt_waits_for_those_that_come_after_its_own_length_was_computed(
    prompts: list[tuple[int, int]], budget: int, running: int
) -> None:
    """Bound on starvation: an endless stream of short prompts cannot keep a long one waiting."""
    bench = Bench(blocks=64, budget=budget, running=running, enabled=False)
    computed, came, started = 0, {}, []

    def step() -> None:
        nonlocal computed
        bench.step()
        for row in bench.rows:
            number = row.request.key.request_id
            started.extend([number] if number not in started else [])
            computed += 0 if row.decodes else row.count

    for length, steps in prompts:
        request = bench.add([length] * length, max_tokens=2)
        came[request.key.request_id] = (computed, length)
        for _ in range(steps):
            step()
    while len(bench.scheduler):
        step()

    for place, number in enumerate(started):
        at, length = came[number]
        for before in started[:place]:
            assert came[before][0] <= at + PATIENCE * length, f"{before} passed {number}"


def test_a_preempted_request_gets_its_cached_prefix_back() -> None:
    """Its blocks stay cached until they are needed; only evicted blocks are recomputed."""
    bench = Bench(blocks=6)
    bench.add([1, 2, 3, 4], max_tokens=5)
    young = bench.add([5, 6, 7, 8], max_tokens=7)
    while not young.preemptions:
        bench.step()

    while young.phase is RequestPhase.WAITING:
        bench.step()

    assert young.computed > 2
    bench.run()
    bench.check_end()


def test_a_waiting_request_finds_the_prefix_that_was_cached_when_it_arrived() -> None:
    """Its router counted on these blocks. An answer that grows in the meantime evicts others, used more recently."""
    bench = Bench(blocks=8, running=1)
    wanted, other = [1, 2, 3, 4], [5, 6, 7, 8]
    for prompt in (wanted, other):
        bench.add(prompt, max_tokens=1)
        bench.run()
    bench.add([9], max_tokens=12)
    bench.step()
    waiting = bench.add([*wanted, 10], max_tokens=1)

    bench.run()

    assert waiting.cached_tokens == 4
    assert bench.cache.counters.evicted_tokens
    bench.check_end()


def test_a_prompt_waits_rather_than_take_what_another_waiting_one_holds() -> None:
    """The other's router counted on these blocks, and memory is freed as answers end."""
    bench = Bench(blocks=256, budget=512)
    wanted = list(range(60))
    bench.add(wanted, max_tokens=1)
    bench.run()
    bench.add([2] * 400, max_tokens=8)
    bench.step()
    first = bench.add([1] * 80, max_tokens=1, priority=0)
    later = bench.add([*wanted, 3], max_tokens=1, priority=1)

    bench.step()
    assert first.phase is RequestPhase.WAITING
    bench.run()

    assert later.cached_tokens == len(wanted)


def test_guesses_take_no_blocks_that_a_request_waits_for() -> None:
    """They are optional, and the waiting request was routed here for these blocks."""
    bench = Bench(blocks=12, running=1, block_size=2, drafter=lambda _, most: [1] * min(most, 8))
    wanted = list(range(10, 18))
    bench.add(wanted, max_tokens=1)
    bench.run()
    answering = bench.add([9] * 13, max_tokens=12)
    for _ in range(3):
        bench.step()
    answering.drafting.trusted = True
    bench.add([*wanted, 1], max_tokens=1)
    rows, held = bench.scheduler.schedule(), sum(map(bench.cache.holds, bench.cache.blocks))
    assert held

    bench.scheduler.add_drafts(rows)

    assert sum(map(bench.cache.holds, bench.cache.blocks)) == held


def test_an_aborted_request_no_longer_keeps_its_prefix(bench: Bench) -> None:
    """Holds end with the requests that wait."""
    bench.add([1, 2, 3, 4], max_tokens=1)
    bench.run()
    waiting = bench.add([1, 2, 3, 4, 5], max_tokens=1)
    assert any(map(bench.cache.holds, bench.cache.blocks))

    bench.scheduler.finish(waiting)

    assert not any(map(bench.cache.holds, bench.cache.blocks))


def test_priority_goes_before_arrival() -> None:
    """Lower numbers run first; equal ones run in order of arrival."""
    bench = Bench(running=1)
    for priority in (1, 0, 1, 0):
        bench.add([1, 2], priority=priority, max_tokens=1)
    order = []
    while bench.step():
        order.append(bench.rows[0].request.key.request_id)

    assert order == [2, 4, 1, 3]


def test_who_does_not_fit_holds_up_those_behind() -> None:
    """If small requests could overtake it indefinitely, a big one would starve."""
    bench = Bench(blocks=8)
    bench.add([1] * 8, max_tokens=6)
    bench.add([4] * 3, max_tokens=1)
    big = bench.add([2] * 12, max_tokens=1)
    bench.step()
    small = bench.add([3] * 2, max_tokens=1)

    bench.step()

    assert (big.phase, small.phase) == (RequestPhase.WAITING, RequestPhase.WAITING)
    bench.run()
    bench.check_end()


def test_a_request_that_can_never_fit_is_refused_by_name(bench: Bench) -> None:
    """It would wait forever and block all requests behind it."""
    with pytest.raises(PromptTooLong, match="32 tokens leave no room"):
        bench.add([1] * 32)

    assert len(bench.scheduler) == 0


def test_an_abort_frees_the_blocks_at_once(bench: Bench) -> None:
    """Memory must not be held for a client that has disconnected."""
    running = bench.add([1, 2, 3, 4])
    waiting = bench.add([1, 2, 3, 4])
    bench.step()

    bench.scheduler.finish(running)
    bench.scheduler.finish(waiting)

    assert bench.cache.free_blocks == bench.cache.total_blocks
    bench.scheduler.finish(running)  # a second abort finds nothing


def test_a_request_with_prompt_logprobs_takes_no_cached_blocks(bench: Bench) -> None:
    """Cached tokens produce no logits, so their logprobs would be missing."""
    bench.add([1, 2, 3, 4, 5], max_tokens=1)
    bench.run()

    echo = bench.add([1, 2, 3, 4, 5], max_tokens=1, prompt_logprobs=0)
    bench.step()

    assert echo.cached_tokens == 0
    assert logits_layout([ScheduledRow(echo, 0, 5)]).logits_at[1:] == []  # logprobs already delivered: no prompt rows


def test_the_layout_names_the_sampling_rows_first_then_the_prompt_positions() -> None:
    """The sampler and the prompt logprobs each take one slice of the logits."""
    bench = Bench(budget=6)
    echo = bench.add([1, 2, 3, 4], prompt_logprobs=1)
    plain = bench.add([5, 6, 7, 8, 9])

    rows = bench.scheduler.schedule()
    wanted = logits_layout(rows)

    assert [(row.request, row.count) for row in rows] == [(echo, 4), (plain, 2)]
    assert (wanted.samplers, wanted.logits_at) == ([rows[0]], [3, 0, 1, 2])


def test_the_backlog_counts_uncached_prompt_tokens_and_decode_context() -> None:
    """The router predicts waiting times from these numbers."""
    bench = Bench(budget=4, running=2)
    bench.add([1, 2, 3], max_tokens=8)
    bench.step()
    bench.add([4] * 9)
    bench.add([1, 2] + [9] * 12)
    bench.step()

    backlog = bench.scheduler.backlog()

    assert (backlog.running, backlog.waiting) == (2, 1)
    assert backlog.queued_prefill == PrefillWork(
        prompts=1,
        tokens=(9 - 3) + (14 - 2),
        pairs=sum([3.5, 4.5, 5.5, 6.5, 7.5, 8.5]) + sum(place + 0.5 for place in range(12)),
        context=12 * 2,
    )
    assert backlog.decode_context_tokens == 4
    assert backlog.waiting_blocks == 6  # [1, 2] is already in use


class Schedules(RuleBasedStateMachine):
    """Random arrivals, pins, steps, failures and aborts under random limits and pools down to one block; all finish."""

    @initialize(
        blocks=st.integers(1, 12),
        block_size=st.integers(1, 4),
        budget=st.integers(1, 12),
        running=st.integers(1, 5),
        enabled=st.booleans(),
        partial_block_reuse=st.booleans(),
        worth_waiting=st.sampled_from([1, 4, 128]),
        prefill_step=st.sampled_from([None, 1, 3]),
        held_share=st.sampled_from([HELD_SHARE, 1.0]),
    )
    def start(self, **limits: Any) -> None:
        self.bench = Bench(**limits)
        self.refused = self.aborted = 0

    @rule(
        shared=st.integers(0, 8),
        own=st.lists(st.integers(0, 2), min_size=1, max_size=6),
        max_tokens=st.integers(1, 9),
        priority=st.integers(0, 1),
        echo=st.sampled_from([None, None, None, 0]),
        pinned=st.sampled_from([False, False, True]),
        tenant=st.sampled_from([b"", b"", b"a", b"b"]),
    )
    def add(self, shared: int, own: list[int], max_tokens: int, echo: int | None, **options: Any) -> None:
        options |= {"max_tokens": max_tokens, "prompt_logprobs": echo, "weight": 1.0 + len(options["tenant"])}
        try:
            self.bench.add([*range(shared), *own], **options)
        except PromptTooLong:
            self.refused += 1

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            assert self.bench.step() or not len(self.bench.scheduler)

    @rule()
    def step_fails(self) -> None:
        self.aborted += self.bench.fail()

    def pick(self, data: st.DataObject) -> RequestState:
        return data.draw(st.sampled_from(list(self.bench.scheduler.requests())))

    @precondition(lambda self: len(self.bench.scheduler))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.bench.scheduler.finish(self.pick(data))
        self.aborted += 1

    @precondition(lambda self: len(self.bench.scheduler))
    @rule(data=st.data())
    def abort_while_a_step_runs(self, data: st.DataObject) -> None:
        self.bench.step(abort_meanwhile=self.pick(data))
        self.aborted += 1

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "bench"):
            self.bench.scheduler.check()

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.bench.run()
            self.bench.check_end()
            assert len(self.bench.ended) + self.refused + self.aborted == self.bench.number


Schedules.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestSchedules = Schedules.TestCase
