"""Which tenant fills the caches."""

from random import Random

import pytest

from homing.router.routing.prefix_index import PrefixIndex
from homing.router.routing.tenant_blocks import TenantBlocks

RANDOM = Random(3)
BLOCKS = [RANDOM.randrange(2**64) for _ in range(40_000)]


def index_of(**held: list[int]) -> PrefixIndex:
    index = PrefixIndex()
    for replica, blocks in held.items():
        index.join(replica, 100_000, closed=False)
        index.add(replica, blocks)
    return index


def test_blocks_belong_to_the_tenant_that_needed_them_first() -> None:
    """A shared prefix counts once, on each replica that holds it."""
    tenants = TenantBlocks(index_of(r0=BLOCKS[:30], r1=BLOCKS[10:20]))
    tenants.needed(BLOCKS[:15], b"a")
    tenants.needed(BLOCKS[:30], b"b")
    tenants.needed(BLOCKS[30:40], b"c")

    assert tenants.by_replica() == {"r0": {b"a": 15, b"b": 15}, "r1": {b"a": 5, b"b": 5}}


@pytest.mark.parametrize("most", [8192, 512])
def test_cached_blocks_count_whoever_computed_them(most: int) -> None:
    """Those of other routers have a tenant as soon as a request here needs them; a later one needs only what is new."""
    tenants = TenantBlocks(index_of(r0=BLOCKS[:3000]), most=most)
    tenants.needed(BLOCKS[:2000], b"a", held=2000)
    tenants.needed(BLOCKS[:3000], b"b", held=2000)

    found = tenants.by_replica()["r0"]
    assert (found[b"a"], found[b"b"]) == (pytest.approx(2000, rel=0.2), pytest.approx(1000, rel=0.2))


def test_evicted_blocks_count_no_more() -> None:
    """The share of a tenant shrinks as it is evicted."""
    index = index_of(r0=BLOCKS[:30])
    tenants = TenantBlocks(index)
    tenants.needed(BLOCKS[:30], b"a")
    index.remove("r0", BLOCKS[10:30])

    assert tenants.by_replica() == {"r0": {b"a": 10}}


@pytest.mark.parametrize("most", [512, 8192])
def test_large_caches_are_estimated_from_a_bounded_sample(most: int) -> None:
    """Memory must not grow with the fleet; shares stay right."""
    tenants = TenantBlocks(index_of(r0=BLOCKS), most=most)
    for start in range(0, len(BLOCKS), 100):
        tenants.needed(BLOCKS[start : start + 100], b"a" if start < 30_000 else b"b")
        assert len(tenants) <= most

    found = tenants.by_replica()["r0"]

    assert found[b"a"] == pytest.approx(30_000, rel=0.2)
    assert found[b"b"] == pytest.approx(10_000, rel=0.2)


def test_what_no_replica_holds_makes_room_first() -> None:
    """Otherwise the sample of a small cache would become coarse with time."""
    index = index_of(r0=BLOCKS[:100])
    tenants = TenantBlocks(index, most=400)
    tenants.needed(BLOCKS[:100], b"a")
    for start in range(100, 10_000, 100):
        tenants.needed(BLOCKS[start : start + 100], b"b")

    assert tenants.by_replica() == {"r0": {b"a": 100}}
