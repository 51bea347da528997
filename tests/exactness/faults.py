"""Faults of an engine's event stream, as scenarios with two engines over real sockets.

At the end of each story, `a` and `b` hold different parts of one prompt, and an exact router sends the prompt to the
engine that has to compute less. A router that keeps outdated blocks or misses stored ones chooses the other engine.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from homing.events.wire.frames import encode_seq

from ..router.replicas.external.fakes import FakeEngine

BLOCK = 16
BLOCKS = 8
#: One token after the last full block, which every engine has to compute.
PROMPT = list(range(1, BLOCKS * BLOCK + 2))
OTHER = list(range(500, 500 + 4 * BLOCK))
Sent = Literal["now", "lost", "later"]


class Engine:
    """A fake engine that publishes events as the story says."""

    def __init__(self, name: str, fake: FakeEngine) -> None:
        self.name = name
        self.fake = fake
        self._later: list[int] = []

    def store(self, blocks: range = range(BLOCKS), *, sent: Sent = "now", rank: int = 0, **fields: Any) -> None:
        """Cache blocks of the prompt."""
        self._announce(self._stored(PROMPT, blocks, **fields), sent=sent, rank=rank)

    def store_other(self, *, sent: Sent = "now") -> None:
        """Cache blocks of another prompt."""
        self._announce(self._stored(OTHER, range(4)), sent=sent)

    def hold(self, blocks: range, *, medium: str = "GPU", group: int = 0, **fields: Any) -> None:
        """Announce copies by their hashes only, as connectors and groups that skip blocks do."""
        event = self._stored(PROMPT, blocks, medium=medium, group_idx=group, **fields)
        self._announce(event | {"token_ids": [], "block_size": 0 if medium != "GPU" else BLOCK})

    def remove(
        self, blocks: range = range(BLOCKS), *, sent: Sent = "now", medium: str = "GPU", group: int = 0, rank: int = 0
    ) -> None:
        event = {"type": "BlockRemoved", "medium": medium, "group_idx": group}
        self._announce(event | {"block_hashes": [self._hash(PROMPT, place) for place in blocks]}, sent=sent, rank=rank)

    def clear(self) -> None:
        self._announce({"type": "AllBlocksCleared"})

    def send_again(self) -> None:
        """Send the last message a second time."""
        self._send(self.sent - 1)

    def deliver(self) -> None:
        """Send the delayed messages."""
        for seq in self._later:
            self._send(seq)
        self._later.clear()

    def forget_history(self) -> None:
        """Shorten the replay buffer to the last message."""
        self.fake.replay_from = self.sent - 1

    async def restart(self) -> None:
        """Restart at the same addresses with an empty cache."""
        await self.fake.stop()
        await self.fake.start()

    @property
    def sent(self) -> int:
        """Number of messages, including lost ones."""
        return len(self.fake.history)

    @property
    def restarted_s(self) -> float:
        """The lowest timestamp of a message since the last start."""
        return self.fake.starts * 1000.0

    def _announce(self, event: dict[str, Any], *, sent: Sent = "now", rank: int = 0) -> None:
        self.fake.history.append(msgspec.msgpack.encode([self.restarted_s + self.sent, [event], rank]))
        if sent == "now":
            self._send(self.sent - 1)
        elif sent == "later":
            self._later.append(self.sent - 1)

    def _send(self, seq: int) -> None:
        self.fake.send(encode_seq(seq), self.fake.history[seq])

    def _stored(self, prompt: list[int], blocks: range, **fields: Any) -> dict[str, Any]:
        event = {
            "type": "BlockStored",
            "block_hashes": [self._hash(prompt, place) for place in blocks],
            "parent_block_hash": self._hash(prompt, blocks.start - 1) if blocks.start else None,
            "token_ids": prompt[blocks.start * BLOCK : blocks.stop * BLOCK],
            "block_size": BLOCK,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "group_idx": 0,
        }
        return event | fields

    def _hash(self, prompt: list[int], place: int) -> int:
        """A hash that differs between engines, since each may hash in its own way."""
        return hash((self.name, prompt[0], place)) & (1 << 63) - 1


Story = Callable[[Engine, Engine], Awaitable[None]]


@dataclass(slots=True, frozen=True)
class Fault:
    name: str
    winner: Literal["a", "b"]  #: the engine that has to compute less at the end
    story: Story
    joins_late: bool = False  #: whether the router starts after the story


async def _lost(a: Engine, b: Engine) -> None:
    _begin(a, b)
    a.remove(sent="lost")
    a.store_other()


async def _lost_last(a: Engine, b: Engine) -> None:
    _begin(a, b)
    a.remove(sent="lost")


async def _lost_store(a: Engine, b: Engine) -> None:
    b.store(range(4))
    a.store(sent="lost")
    a.store_other()


async def _duplicated(a: Engine, b: Engine) -> None:
    _begin(a, b)
    a.send_again()
    a.remove()


async def _reordered(a: Engine, b: Engine) -> None:
    _begin(a, b)
    a.remove(sent="later")
    a.store()
    a.deliver()


async def _delayed(a: Engine, b: Engine) -> None:
    _begin(a, b)
    a.remove(sent="later")
    for _ in range(20):
        a.store_other()
    a.deliver()


async def _evicted(a: Engine, b: Engine) -> None:
    _begin(a, b)
    a.remove()


async def _restarted(a: Engine, b: Engine) -> None:
    _begin(a, b)
    await a.restart()
    a.store_other()


async def _restarted_and_ahead(a: Engine, b: Engine) -> None:
    _begin(a, b)
    await a.restart()
    for _ in range(5):
        a.store_other()
    a.store(range(2))


async def _overrun(a: Engine, b: Engine) -> None:
    _begin(a, b)
    a.remove(sent="lost")
    for _ in range(5):
        a.store_other(sent="lost")
    a.store_other()
    a.forget_history()


async def _reset(a: Engine, b: Engine) -> None:
    _begin(a, b)
    a.clear()


async def _placeholder(a: Engine, b: Engine) -> None:
    _begin(a, b)
    a.hold(range(BLOCKS), medium="CPU")
    a.store_other()


async def _slower_copy(a: Engine, b: Engine) -> None:
    b.store(range(7))
    a.store()
    a.hold(range(BLOCKS), medium="CPU")
    a.remove()


async def _copy_left(a: Engine, b: Engine) -> None:
    b.store(range(2))
    a.store()
    a.store(medium="CPU")
    a.remove()


async def _window(a: Engine, b: Engine) -> None:
    _begin(a, b)
    a.hold(range(BLOCKS), group=1, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=2 * BLOCK)
    a.remove(range(1, BLOCKS), group=1)


async def _state(a: Engine, b: Engine) -> None:
    _begin(a, b)
    a.hold(range(1, 2), group=1, kv_cache_spec_kind="mamba")


async def _ranks(a: Engine, b: Engine) -> None:
    b.store(range(4))
    a.store(rank=1)
    a.store(range(2), rank=0)


def _begin(a: Engine, b: Engine) -> None:
    a.store()
    b.store(range(4))


async def _nothing(a: Engine, b: Engine) -> None:
    _begin(a, b)


FAULTS = (
    Fault("nothing happens", "a", _nothing),
    Fault("a removal is lost", "b", _lost),
    Fault("the last message is lost", "b", _lost_last),
    Fault("a store is lost", "a", _lost_store),
    Fault("a message arrives twice", "b", _duplicated),
    Fault("messages change places", "a", _reordered),
    Fault("a message is delayed", "b", _delayed),
    Fault("the router joins late", "b", _evicted, joins_late=True),
    Fault("restart behind the same address", "b", _restarted),
    Fault("restart, then more messages than before", "b", _restarted_and_ahead),
    Fault("lost beyond the replay buffer", "b", _overrun),
    Fault("the cache is reset", "b", _reset),
    Fault("a placeholder without tokens", "a", _placeholder),
    Fault("only CPU memory has it", "b", _slower_copy),
    Fault("a copy in CPU memory is left", "a", _copy_left),
    Fault("a sliding window is evicted", "b", _window),
    Fault("a Mamba state is missing", "b", _state),
    Fault("data-parallel ranks differ", "b", _ranks),
)
