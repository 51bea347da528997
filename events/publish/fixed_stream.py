"""The event stream at an address that others know beforehand: its topic and ports, from settings. Pure.

Indexers of other projects find engines by pod and expect their events on a fixed port under a topic of their own form.
They read the same batches as ours; our own readers keep to the other sockets, whose topic has the epoch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..config import EventsSettings
from ..wire.frames import events_topic

#: Replicas of one node that may have fixed ports.
MAX_PLACES = 64
LAST_PORT = 65_535


class Preset(NamedTuple):
    topic: str  #: empty: the default
    port: int
    replay_port: int
    tiers: bool = True  #: whether the reader tells blocks in tiers from those in the pool


#: By value of `events_preset`. All three dial these ports; only llm-d reads the topic.
PRESETS = {
    "llm-d": Preset("kv@{host}@{model}", 5557, 5558),
    "aibrix": Preset("", 5557, 5558, tiers=False),
    "dynamo": Preset("", 5557, 5558),
}


@dataclass(slots=True, frozen=True)
class Publisher:
    """What a topic may name."""

    epoch: int
    host: str
    model: str = ""
    replica: str = ""


@dataclass(slots=True, frozen=True)
class FixedStream:
    topic: bytes
    port: int
    replay_port: int  #: 0: no replays
    tiers: bool  #: whether its batches include the blocks in tiers

    def places(self) -> Iterator[tuple[int, int]]:
        """The ports of the node's first replica, its second, and so on; a replica takes the first that are free."""
        for place in range(min(MAX_PLACES, LAST_PORT + 1 - max(self.port, self.replay_port))):
            yield self.port + place, self.replay_port and self.replay_port + place


def settings_problem(settings: EventsSettings) -> str | None:
    """What is wrong with the settings of the fixed address, or None."""
    found = fixed_stream(settings, Publisher(0, ""))
    if found is None:
        named = [name for name in ("events_replay_port", "events_topic") if getattr(settings, name)]
        return f"{named[0]}: it has no effect without events_port or events_preset" if named else None
    if found.port == found.replay_port:
        return f"events_replay_port: {found.port} is the port of the events, too; choose another one"
    return None


def fixed_stream(settings: EventsSettings, about: Publisher) -> FixedStream | None:
    """None: no such address. What is set goes before the preset."""
    preset = PRESETS.get(settings.events_preset, Preset("", 0, 0))
    port = settings.events_port or preset.port
    if not port:
        return None
    topic = settings.events_topic or preset.topic
    names = {"epoch": f"{about.epoch:016x}", "host": about.host, "model": about.model, "replica": about.replica}
    return FixedStream(
        topic.format(**names).encode() if topic else events_topic(about.epoch),
        port,
        settings.events_replay_port or preset.replay_port,
        preset.tiers,
    )
