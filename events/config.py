"""Settings of the event stream. `cluster/config.py` joins them with the other packages' settings."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class EventsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What replicas publish about their cache, and how much of it they keep for subscribers that join late."""

    publish_events: Annotated[bool, "publish cache events; off: routing by load alone"] = True
    hash_format: Annotated[Literal["int64", "bytes"], "hashes in events: the last 8 bytes, or all 16"] = "int64"
    hash_only: Annotated[bool, "publish no token ids"] = False
    replay_batches: Annotated[int, Meta(ge=0), "batches kept for replay"] = 10_000
    events_preset: Annotated[
        Literal["none", "llm-d", "aibrix", "dynamo"],
        "also publish where the indexer of this project reads",
    ] = "none"
    events_port: Annotated[
        int,
        Meta(ge=0, le=65535),
        "also publish on this TCP port, or the next free one; 0: as the preset",
    ] = 0
    events_replay_port: Annotated[
        int, Meta(ge=0, le=65535), "port for replays beside events_port; 0: as the preset"
    ] = 0
    events_topic: Annotated[
        str,
        Meta(pattern=r"^([^{}]|\{(epoch|host|model|replica)\})*$"),
        "topic on events_port, with {epoch}, {host}, {model}, {replica}; empty: as the preset",
    ] = ""
    events_curve_keys: Annotated[str, "folder of CURVE keys, made by `homing keys`; empty: not encrypted"] = ""
    events_curve_clients: Annotated[Literal["listed", "any"], "who may connect: listed keys, or any"] = "listed"
    heartbeat_interval_s: Annotated[float, Meta(gt=0, le=10), "seconds between heartbeats"] = 0.2
