"""The stream of cache events: publisher, reader and their recovery. Knows no other room."""

from .cluster import ClusterFeed, ClusterSink, Source
from .config import EventsSettings
from .decode import BatchDecoder, CacheEvent, Cleared, Removed, Stored, wire_name
from .errors import (
    BadKeys,
    BadRecord,
    ClusterUnreachable,
    EndpointUnusable,
    EventError,
    KeysRefused,
    MalformedFrame,
    PublisherGone,
)
from .feed import EventFeed, FeedSink
from .fold import CacheMirror, Digest
from .follow import follow, follow_sync
from .format import describe
from .keys import KeyPair, load_pair
from .messages import EventEndpoints, LoadReport, SnapshotBlock
from .publisher import EventPublisher
from .record import Recorded, from_line, read_lines, rebuild, remark, to_line
from .stream import StreamEvent
from .subscribe import subscribe, subscribe_sync
from .subscription import FeedStatus, Reach, Subscription

__all__ = [
    "BadKeys",
    "BadRecord",
    "BatchDecoder",
    "CacheEvent",
    "CacheMirror",
    "Cleared",
    "ClusterFeed",
    "ClusterSink",
    "ClusterUnreachable",
    "Digest",
    "EndpointUnusable",
    "EventEndpoints",
    "EventError",
    "EventFeed",
    "EventPublisher",
    "EventsSettings",
    "FeedSink",
    "FeedStatus",
    "KeyPair",
    "KeysRefused",
    "LoadReport",
    "MalformedFrame",
    "PublisherGone",
    "Reach",
    "Recorded",
    "Removed",
    "SnapshotBlock",
    "Source",
    "Stored",
    "StreamEvent",
    "Subscription",
    "describe",
    "follow",
    "follow_sync",
    "from_line",
    "load_pair",
    "read_lines",
    "rebuild",
    "remark",
    "subscribe",
    "subscribe_sync",
    "to_line",
    "wire_name",
]
