"""The router: prefix index, decision, flow of requests, and the HTTP front.

A light face: `homing.router.replicas.service.RouterService` and `homing.router.server.RouterServer` are imported where
they are used, as they bring sockets and an HTTP server along.
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
