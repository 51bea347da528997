"""Expected blocks: counted from dispatch until no request is left that would store them."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from homing.router.routing.expected_blocks import Expectation, ExpectedBlocks

CHAIN = [10, 11, 12, 13]


def expecting(*wanted: tuple[Any, int]) -> tuple[ExpectedBlocks, list[Expectation]]:
    """The expected blocks of these chains, each from an index on."""
    blocks, made = ExpectedBlocks(), [Expectation(chain=chain, start=start) for chain, start in wanted]
    for each in made:
        blocks.expect(each)
    return blocks, made


def test_expected_blocks_prolong_what_is_held() -> None:
    """A sibling that comes before the events must see where the prefix will be."""
    blocks, _ = expecting((CHAIN, 1))

    assert (blocks.extended(CHAIN, 1), blocks.extended(CHAIN, 0)) == (4, 0)


def test_a_prompt_shares_only_what_agrees() -> None:
    """Two turns of one conversation share their first blocks, not their last."""
    blocks, _ = expecting((CHAIN, 0))

    assert blocks.extended([10, 11, 99], 0) == 2
    assert blocks.extended([98, 99], 0) == 0


def test_expectations_of_several_requests_add_up() -> None:
    """The longer prompt will use the shorter one's blocks and adds its own."""
    blocks, _ = expecting((CHAIN[:2], 0), (CHAIN, 0))

    assert blocks.extended([*CHAIN, 14], 0) == 4
    assert len(blocks) == 4


def test_a_block_stays_expected_while_any_request_will_store_it() -> None:
    """Aborting the first sibling must not remove the second one's expected blocks."""
    blocks, (first, second) = expecting((CHAIN, 0), (CHAIN, 0))

    blocks.withdraw(first)

    assert blocks.extended(CHAIN, 0) == 4
    blocks.withdraw(second)
    assert len(blocks) == 0


class CountedChain(list[int]):
    """Counts the elements that are read."""

    reads = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.reads += len(found) if isinstance(place, slice) else 1
        return found


def test_the_cost_of_a_withdrawal_does_not_grow_with_those_before_it() -> None:
    """A long prompt that shares blocks with many shorter ones takes over each block once."""
    prompts = 256
    long = CountedChain(range(prompts))
    blocks, made = expecting(*((range(number), 0) for number in range(1, prompts)), (long, 0))

    for each in made[:-1]:
        blocks.withdraw(each)

    assert long.reads <= 2 * prompts * prompts.bit_length()
    assert len(blocks) == prompts


def test_the_cost_of_a_withdrawal_does_not_grow_with_the_number_of_equal_prompts() -> None:
    """Hundreds of requests may share a long prompt that is not computed yet."""
    requests, length = 64, 500
    chains = [CountedChain(range(length)) for _ in range(requests)]
    blocks, made = expecting(*((chain, 0) for chain in chains))

    for each in made:
        blocks.withdraw(each)

    assert sum(chain.reads for chain in chains) <= 5 * requests * length
    assert len(blocks) == 0


#: Prompts as block hashes: a hash covers its word and all before it, so equal hashes are at equal positions.
prompts = st.lists(st.integers(0, 2), max_size=6).map(
    lambda words: [hash(tuple(words[:n])) for n in range(1, 1 + len(words))]
)


class ExpectationMachine(RuleBasedStateMachine):
    """Compared with the set of blocks that each request will store."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = ExpectedBlocks()
        self.open: list[Expectation] = []

    def expected(self) -> set[int]:
        return {block for each in self.open for block in each.chain[each.start :]}

    @rule(prompt=prompts, held=st.integers(0, 6))
    def expect(self, prompt, held):
        self.open.append(Expectation(chain=prompt, start=held))
        self.blocks.expect(self.open[-1])

    @rule(prompt=prompts, held=st.integers(0, 6))
    def extended(self, prompt, held):
        held, expected = min(held, len(prompt)), self.expected()
        end = next((at for at in range(held, len(prompt)) if prompt[at] not in expected), len(prompt))
        assert self.blocks.extended(prompt, held) == end

    @rule(data=st.data())
    def withdraw(self, data):
        if self.open:
            gone = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
            self.blocks.withdraw(gone)
            self.blocks.withdraw(gone)

    @invariant()
    def agrees(self):
        self.blocks.check(self.open)


TestExpectations = ExpectationMachine.TestCase
TestExpectations.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
