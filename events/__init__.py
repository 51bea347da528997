"""The stream of cache events: publisher, reader and their recovery. Knows no other room."""

from .config import EventsSettings
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
from .follow.block_set import CacheMirror, Digest
from .follow.cluster_feed import ClusterFeed, ClusterSink, Source
from .follow.feed import EventFeed, FeedSink
from .follow.subscription import FeedStatus, Reach, Subscription
from .publish.publisher import EventPublisher
from .sdk.follow_cluster import follow, follow_sync
from .sdk.format import describe
from .sdk.plain_stream import StreamEvent
from .sdk.record import Recorded, from_line, read_lines, rebuild, remark, to_line
from .sdk.subscribe import subscribe, subscribe_sync
from .security.curve_keys import KeyPair, load_pair
from .wire.cache_events import CacheEvent, Cleared, Removed, Stored, wire_name
from .wire.dialects import BatchDecoder
from .wire.messages import EventEndpoints, LoadReport, SnapshotBlock

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
