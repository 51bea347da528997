"""Why a prompt was not cached, in every case."""

from typing import Any

import msgspec
import pytest

from homing.kvcache.hashing import tenant_root
from homing.router.backend import FeedState
from homing.router.flow.missing_blocks import missing_of
from homing.router.routing.block_history import BlockHistory
from homing.router.routing.policy.base import Prompt

from ..fakes import BLOCK, ROOT, request_of
from ..routing.policy.cases import candidate
from .test_request_flow import World

KEYS = tuple(range(100, 110))


def reason(
    past: BlockHistory | None = None, *, tokens: int = 10 * BLOCK + 5, shared: bytes | None = None, **here: Any
) -> tuple[str, int] | None:
    """The reason for a prompt of 10 blocks of which r0, the chosen one, has 4 and r1 none, unless told otherwise."""
    hashes, elsewhere = here.pop("hashes", KEYS), here.pop("elsewhere", 0)
    prompt = Prompt(tokens=tokens, blocks=tokens // BLOCK, block_size=BLOCK, hashes=hashes)
    chosen, other = candidate("r0", 4, **here), candidate("r1", elsewhere)
    found = missing_of(prompt, KEYS, [chosen, other], chosen, past or BlockHistory(), lambda _: shared)
    return None if found is None else (found.reason, found.token)


def past(*events: tuple[str, str, float]) -> BlockHistory:
    """The history after these events of the fifth block: what happened, where and when."""
    made = BlockHistory()
    for what, replica, made.now in events:
        if what == "lost":
            made.lost(replica)
        else:
            {"sent": made.sent, "removed": made.removed}[what](replica, [KEYS[4]], "q1")
    return made


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("new", 4 * BLOCK)),
        ({"tokens": BLOCK}, ("short", 0)),
        ({"expected": 10}, None),
        ({"tokens": 4 * BLOCK + 1}, None),
        ({"tokens": 5 * BLOCK}, None),  # the last token is always computed
        ({"hashes": ()}, ("scored", 0)),
        ({"feed": FeedState.STALE}, ("unknown", 0)),
        ({"elsewhere": 5}, ("elsewhere", 4 * BLOCK)),
        ({"elsewhere": 4}, ("new", 4 * BLOCK)),
        ({"shared": b"t" * 16}, ("other tenant", 4 * BLOCK)),
        ({"past": past(("sent", "r1", 1.0), ("removed", "r1", 2.0))}, ("evicted", 4 * BLOCK)),
        ({"past": past(("sent", "r1", 1.0), ("lost", "r1", 2.0))}, ("lost", 4 * BLOCK)),
        ({"past": past(("lost", "r1", 1.0), ("sent", "r1", 2.0)), "shared": b"t"}, ("lost", 4 * BLOCK)),
    ],
)
def test_the_reason_fits_the_case(changes: dict[str, Any], expected: tuple[str, int] | None) -> None:
    """Each reason calls for another remedy: more memory, pins, shared keys, or another client."""
    assert reason(**changes) == expected


def test_an_evicted_prompt_tells_for_whom() -> None:
    """The request that was waiting for its first token when the replica announced the evictions."""
    world = World(replicas=1)
    prompt = list(range(10 * BLOCK))
    first = world.submit(msgspec.structs.replace(request_of(prompt), trace_id="first"))
    keys = world.flow.state_of(first).content.keys
    world.settle()
    world.submit(msgspec.structs.replace(request_of([7] * 200), trace_id="second"))
    world.placement.blocks_of("r0").remove(keys[5:])
    world.settle()

    last = world.submit(msgspec.structs.replace(request_of([*prompt, 1]), trace_id="third"))
    missing = world.flow.state_of(last).forecast.missing

    assert (missing.reason, missing.token, missing.request) == ("evicted", 5 * BLOCK, "second")
    world.settle()


def test_what_another_tenant_has_cached_is_told_from_what_is_new() -> None:
    """Tenants share no blocks, so the remedy is a sharing group, not memory."""
    world = World(replicas=1)
    prompt = list(range(10 * BLOCK))
    for tenant in (b"one", b"two"):
        given = msgspec.structs.replace(request_of(prompt), salt=tenant, tenant=tenant.ljust(16))
        found = world.flow.state_of(world.submit(given)).forecast.missing
        world.settle()
        assert (found.reason, found.tenant) == (
            ("new", None) if tenant == b"one" else ("other tenant", b"one ".hex()[:8])
        )

    table = world.flow.explain(msgspec.structs.replace(request_of([*prompt, 1]), salt=b"one"), 0.0)
    assert table.missing is None
    assert tenant_root(ROOT, salt=b"one") != tenant_root(ROOT, salt=b"two")


def test_a_tenant_with_another_salt_is_no_other_tenant() -> None:
    """Salts separate blocks within one tenant, too."""
    world = World(replicas=1)
    prompt = list(range(10 * BLOCK))
    for salt in (b"first", b"second"):
        given = msgspec.structs.replace(request_of(prompt), salt=salt, tenant=b"one".ljust(16))
        found = world.flow.state_of(world.submit(given)).forecast.missing
        world.settle()
        assert (found.reason, found.tenant) == ("new", None)
