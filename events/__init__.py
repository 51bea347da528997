"""The stream of cache events: publisher, subscriber and recovery. Must not import the other packages of homing.

The names below are for users of the subscriber SDK (docs/events.md); `replica`, `router` and `cluster` import modules.
"""

from .errors import BadRecord as BadRecord
from .errors import ClusterUnreachable as ClusterUnreachable
from .errors import EndpointUnusable as EndpointUnusable
from .errors import EventError as EventError
from .errors import KeysRefused as KeysRefused
from .errors import PublisherGone as PublisherGone
from .follow.block_set import CacheMirror as CacheMirror
from .follow.block_set import TieredMirror as TieredMirror
from .follow.feed import EventFeed as EventFeed
from .follow.subscription import Subscription as Subscription
from .sdk.follow_cluster import follow as follow
from .sdk.follow_cluster import follow_sync as follow_sync
from .sdk.plain_stream import StreamEvent as StreamEvent
from .sdk.plain_stream import describe as describe
from .sdk.record import Recorded as Recorded
from .sdk.record import from_line as from_line
from .sdk.record import read_lines as read_lines
from .sdk.record import rebuild as rebuild
from .sdk.record import to_line as to_line
from .sdk.subscribe import subscribe as subscribe
from .sdk.subscribe import subscribe_sync as subscribe_sync
from .security.curve_keys import KeyPair as KeyPair
from .security.curve_keys import load_pair as load_pair
from .wire.cache_events import CacheEvent as CacheEvent
from .wire.cache_events import Cleared as Cleared
from .wire.cache_events import Removed as Removed
from .wire.cache_events import Stored as Stored
from .wire.messages import EventEndpoints as EventEndpoints
