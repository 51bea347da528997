"""The hit rules of engines, compared with the definition of a hit applied to every possible end."""

from hypothesis import given
from hypothesis import strategies as st

from homing.router.replicas.external.hit_rules import GroupRule, HeldBlocks, Hit, longest_hit

SIZE = 4
KEYS = tuple(range(100, 112))
RULES = st.one_of(
    st.just(GroupRule()),
    st.just(GroupRule("mamba")),
    st.builds(GroupRule, st.just("sliding_window"), st.integers(2, 14)),
    st.just(GroupRule("chunked_local_attention", 8)),
)


def suffices(rule: GroupRule, held: frozenset[int], end: int) -> bool:
    """Return whether this group can continue after the first `end` blocks."""
    if rule.kind == "mamba":
        return end == 0 or KEYS[end - 1] in held
    start = 0
    if rule.kind == "sliding_window":
        first_token = end * SIZE - (rule.window - 1)
        start = max(0, first_token // SIZE)
    return all(key in held for key in KEYS[start:end])


@given(st.lists(st.tuples(RULES, st.frozensets(st.sampled_from(KEYS))), min_size=1, max_size=3))
def test_a_hit_is_the_longest_prefix_that_suffices_for_every_group(groups) -> None:
    """This is tested with one kind of memory and any order of the groups."""
    hit = longest_hit(KEYS, SIZE, [HeldBlocks(rule, {"GPU": held}) for rule, held in groups])

    ends = [end for end in range(len(KEYS) + 1) if all(suffices(rule, held, end) for rule, held in groups)]
    assert hit == Hit(max(ends))


def test_slower_memory_continues_what_faster_memory_has() -> None:
    """GPU blocks after a block that only the CPU holds are not used."""
    media = {"GPU": {100, 101, 103}, "CPU": {100, 102, 103}, "DISK": {104}}

    hit = longest_hit(KEYS, SIZE, [HeldBlocks(GroupRule(), media)])

    assert hit == Hit(5, (("CPU", 2), ("DISK", 1)))


def test_a_window_may_lie_in_two_media() -> None:
    """Blocks covered by the hit in GPU memory need not be loaded."""
    full = HeldBlocks(GroupRule(), {"GPU": {100, 101}, "CPU": {102}})
    window = HeldBlocks(GroupRule("sliding_window", 6), {"GPU": {100, 101}, "CPU": {102}})

    assert longest_hit(KEYS, SIZE, [full, window]) == Hit(3, (("CPU", 1),))


def test_blocks_of_several_of_ours_end_where_theirs_do() -> None:
    """A group with longer blocks shortens the hit to a multiple of them; other sizes cannot be credited."""
    full = HeldBlocks(GroupRule(), {"GPU": set(KEYS[:5])})
    long = HeldBlocks(GroupRule("mamba"), {"GPU": {KEYS[3]}}, {"GPU": 2 * SIZE})
    odd = HeldBlocks(GroupRule("mamba"), {"GPU": {KEYS[3]}}, {"GPU": SIZE + 1})

    assert longest_hit(KEYS, SIZE, [full, long]) == Hit(4)
    assert longest_hit(KEYS, SIZE, [full, odd]) == Hit(0)
