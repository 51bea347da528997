"""The router: prefix index, routing decision, request flow, and the HTTP front.

Imports nothing heavy: `homing.router.replicas.service.RouterService` and `homing.router.server.RouterServer` are
imported where they are used, as they need sockets and an HTTP server.
"""

from .backend import (
    Backend,
    ClusterView,
    Explanation,
    FinishedRequest,
    GenerationRequest,
    Observer,
    TokenDelta,
    TokenStream,
)
from .config import RouterSettings
from .errors import RouterError

__all__ = [
    "Backend",
    "ClusterView",
    "Explanation",
    "FinishedRequest",
    "GenerationRequest",
    "Observer",
    "RouterError",
    "RouterSettings",
    "TokenDelta",
    "TokenStream",
]
