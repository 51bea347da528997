"""CORS: which web pages may call the server. Headers of responses and of preflights. Pure."""

from dataclasses import dataclass

from .exchange import Headers, Request

#: Seconds that a browser may cache the response to a preflight.
MAX_AGE_S = 600
_METHODS = "GET, POST, DELETE, OPTIONS"
_EXPOSED = (
    "x-request-id, x-homing-replica, x-homing-cached-tokens, x-homing-loaded-tokens, x-homing-pinned-tokens, "
    "x-homing-ignored-fields, x-homing-departure, retry-after"
)


@dataclass(slots=True, frozen=True)
class CorsPolicy:
    """The origins that may read responses."""

    origins: frozenset[str]

    @classmethod
    def of(cls, setting: str) -> "CorsPolicy | None":
        """Parse origins separated by commas; `*` allows every page. None: the setting is empty, which disables CORS."""
        origins = frozenset(each for part in setting.split(",") if (each := part.strip().rstrip("/")))
        return cls(origins) if origins else None

    def is_preflight(self, request: Request) -> bool:
        headers = request.headers
        return request.method == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers

    def headers(self, request: Request) -> Headers:
        """Headers of every response. Never allows credentials: keys are sent in `Authorization`, not in cookies."""
        origin = request.headers.get("origin")
        shown = "*" if origin is not None and "*" in self.origins else origin
        if shown not in self.origins:
            return (("vary", "origin"),)
        return ("access-control-allow-origin", shown), ("access-control-expose-headers", _EXPOSED), ("vary", "origin")

    def preflight(self, request: Request) -> Headers:
        """Additional headers of the response to a preflight; those of every response state the allowed origin."""
        wanted = request.headers.get("access-control-request-headers", "content-type, authorization")
        return (
            ("access-control-allow-methods", _METHODS),
            ("access-control-allow-headers", wanted),
            ("access-control-max-age", str(MAX_AGE_S)),
        )
