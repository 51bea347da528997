"""docs/events.md matches the code."""

import asyncio
import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from homing.events.publish.publisher import EventPublisher
from homing.events.sdk import record
from homing.events.security.curve_keys import ServerKeys, new_pair
from homing.events.wire import messages

from .fakes import block, tokens
from .routers import Listing, serving

PAGE = (Path(__file__).parents[2] / "docs" / "events.md").read_text()


def documented_keys(title: str) -> set[str]:
    """The names in the first column of the table under a heading."""
    section = re.split(r"^#+ ", PAGE.split(f"### {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


@pytest.mark.parametrize(
    "struct",
    [
        messages.BlockStored,
        messages.BlockRemoved,
        messages.Heartbeat,
        messages.LoadReport,
        messages.SnapshotChunk,
    ],
)
def test_every_key_on_the_wire_is_documented(struct: type[msgspec.Struct]) -> None:
    """Readers in other languages have only this page."""
    assert documented_keys(struct.__name__) == set(struct.__struct_fields__)


def test_every_counter_of_a_load_report_is_documented() -> None:
    """They are keys of a map inside the report."""
    (row,) = re.findall(r"^\| `counters` \| map \| (.*) \|$", PAGE, re.MULTILINE)

    assert set(re.findall(r"`(\w+)`", row)) == set(messages.CacheCounters.__struct_fields__)


@pytest.mark.parametrize("encrypted", [False, True])
async def test_the_subscriber_of_the_page_follows_a_publisher(
    make_publisher: Callable[..., EventPublisher], encrypted: bool
) -> None:
    """This snippet is the first thing that a newcomer tries."""
    (code,) = [part for part in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "def held_blocks" in part]
    names: dict[str, Any] = {}
    exec(code, names)
    server, client = new_pair(), new_pair()
    publisher = make_publisher(keys=ServerKeys(server, lambda: frozenset([client.public])) if encrypted else None)
    endpoints = publisher.start()
    publisher.stored(None, [block(1), block(2)], tokens(1, 2))
    publisher.flush()

    following = names["held_blocks"](endpoints, client if encrypted else None)
    async with asyncio.timeout(120), contextlib.aclosing(following) as sets:
        async for held in sets:
            if held == {1, 2}:
                break

    assert held == {1, 2}


async def test_the_cluster_s_subscriber_of_the_page_follows_a_router(
    make_publisher: Callable[..., EventPublisher],
) -> None:
    """An external program needs only the router's address."""
    (code,) = [part for part in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "def held_by_replica" in part]
    names: dict[str, Any] = {}
    exec(code, names)
    listing, publisher = Listing(), make_publisher()
    listing.put("r0", 7, publisher.start())
    publisher.stored(None, [block(1), block(2)], tokens(1, 2))
    publisher.flush()

    with serving(listing) as url:
        async with asyncio.timeout(120), contextlib.aclosing(names["held_by_replica"](url)) as states:
            async for held in states:
                if held == {"r0": {1, 2}}:
                    break

    assert held == {"r0": {1, 2}}


def test_every_key_of_a_json_line_is_documented() -> None:
    """jq and JavaScript programs have only this page."""
    section = PAGE.split("## As JSON lines\n", 1)[1].split("\n## ", 1)[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    documented = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}

    assert documented == set(record._Line.__struct_fields__)
    assert all(f"`{kind}`" in section for kind in record.REMARKS)
