"""The stream of cache events: publisher, reader and their recovery. Knows no other room."""

from .config import EventsSettings
from .decode import BatchDecoder, CacheEvent, Cleared, Removed, Stored, wire_name
from .errors import EndpointUnusable, EventError, MalformedFrame
from .feed import EventFeed, FeedSink
from .fold import CacheMirror, Digest
from .messages import EventEndpoints, LoadReport, SnapshotBlock
from .publisher import EventPublisher
from .subscription import FeedStatus, Reach, Subscription

__all__ = [
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
    "LoadReport",
    "MalformedFrame",
    "Reach",
    "Removed",
    "SnapshotBlock",
    "Stored",
    "Subscription",
    "wire_name",
]
