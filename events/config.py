"""Settings of the event stream. `cluster/config.py` joins them with the other packages' settings."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class EventsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What replicas publish about their cache, and how much of it they keep for subscribers that join late."""

    publish_events: Annotated[bool, "publish cache events; without them, requests are routed by load alone"] = True
    hash_format: Annotated[
        Literal["int64", "bytes"], "hashes on the stream: last 8 bytes as an int, or all 16 bytes"
    ] = "int64"
    hash_only: Annotated[bool, "publish no token ids, so that they never leave the replica"] = False
    replay_batches: Annotated[int, Meta(ge=0), "event batches kept for replay"] = 10_000
    events_preset: Annotated[
        Literal["none", "llm-d", "aibrix", "dynamo"],
        "also publish the events where this project's indexer reads them: its ports and topic",
    ] = "none"
    events_port: Annotated[
        int,
        Meta(ge=0, le=65535),
        "also publish the events on this TCP port, or the next free one (a node's other replicas); 0: as the preset",
    ] = 0
    events_replay_port: Annotated[
        int, Meta(ge=0, le=65535), "port for replays beside `events_port`; 0: as the preset, or none"
    ] = 0
    events_topic: Annotated[
        str,
        Meta(pattern=r"^([^{}]|\{(epoch|host|model|replica)\})*$"),
        "topic on `events_port`, with {epoch}, {host}, {model}, {replica}; empty: as the preset, or kv-events@{epoch}",
    ] = ""
    publish_queue_batches: Annotated[
        int, Meta(ge=1), "batches queued for sending; more are lost as a gap, so the engine never waits"
    ] = 10_000
    send_high_water_mark: Annotated[int, Meta(ge=1), "ZeroMQ messages queued per subscriber"] = 100_000
    events_curve_keys: Annotated[str, "folder of CURVE keys (`homing keys DIR` creates one); empty: no encryption"] = ""
    events_curve_clients: Annotated[
        Literal["listed", "any"], "who may connect: keys in the folder's `clients/`, or any key"
    ] = "listed"
    heartbeat_interval_s: Annotated[
        float, Meta(gt=0, le=10), "seconds between residency digests and load reports when idle"
    ] = 0.2
