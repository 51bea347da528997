"""The stream of cache events: publisher, reader and their recovery. Knows no other room."""

from .config import EventsSettings
from .decode import BatchDecoder, CacheEvent, Cleared, Removed, Stored, wire_name
from .errors import BadKeys, BadRecord, EndpointUnusable, EventError, KeysRefused, MalformedFrame, PublisherGone
from .feed import EventFeed, FeedSink
from .fold import CacheMirror, Digest
from .format import describe
from .keys import KeyPair, load_pair
from .messages import EventEndpoints, LoadReport, SnapshotBlock
from .publisher import EventPublisher
from .record import Recorded, from_line, read_lines, rebuild, to_line
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
    "Stored",
    "StreamEvent",
    "Subscription",
    "describe",
    "from_line",
    "load_pair",
    "read_lines",
    "rebuild",
    "subscribe",
    "subscribe_sync",
    "to_line",
    "wire_name",
]
