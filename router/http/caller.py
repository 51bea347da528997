"""The sender of one HTTP request: its tenant with the tenant's rate limits, its session, and its request id."""

import re
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256

from ..tenants.api_keys import Tenant
from ..tenants.rate_limits import RateLimiter
from ..text.encoder_threads import Sender
from .front import Front
from .protocol.exchange import Exchange

REQUEST_ID = "x-request-id"
#: Headers in which OpenCode, Codex, Claude Code, pi and others name the session; the first one present counts.
SESSION_HEADERS = (
    *("x-session-affinity", "x-correlation-id", "x-claude-code-session-id", "session_id", "session-id"),
    *("x-session-id", "x-opencode-session", "x-affinity"),
)
#: Headers of Claude Code, Codex (threads) and OpenCode that name the agent in a session, and the agent's parent.
AGENT_HEADERS = ("x-claude-code-agent-id", "thread-id", "thread_id")
PARENT_HEADERS = ("x-claude-code-parent-agent-id", "x-codex-parent-thread-id", "x-parent-session-id")
#: Longer names are hashed: the router remembers tens of thousands of sessions, and an HTTP head may have 64 KB.
MAX_SESSION_CHARS = 64
_NAMING_HEADERS = frozenset((*SESSION_HEADERS, *AGENT_HEADERS, *PARENT_HEADERS))
#: The JSON objects of bodies up to this size are not counted.
FEW_OBJECTS_BYTES = 16 * 1024
_PRINTABLE = re.compile(r"[\x21-\x7e]{1,256}")


def request_id(given: str | None, random_bits: Callable[[int], int]) -> str:
    """The client's request id, or a new one if it is absent or unfit for a header and a log line."""
    return given if given and _PRINTABLE.fullmatch(given) else f"{random_bits(64):016x}"


def first_header(headers: Mapping[str, str], names: Sequence[str] = SESSION_HEADERS) -> str | None:
    """The `bounded_session` value of the first of these headers that is present; by default, the request's session."""
    for name in names:
        if value := headers.get(name):
            return bounded_session(value)
    return None


def bounded_session(session: str) -> str:
    """The name of a session, or its SHA-256 in hex if it is longer than `MAX_SESSION_CHARS`."""
    return session if len(session) <= MAX_SESSION_CHARS else sha256(session.encode()).hexdigest()


def tenant_of(front: Front, headers: Mapping[str, str]) -> Tenant:
    """The tenant whose API key the headers carry. Raises MissingKey and UnknownKey."""
    return front.tenants.of(headers.get("authorization") or headers.get("x-api-key"))


class Caller:
    """Charges the request to its tenant: `begin`, then either `refund` or `end`, which do nothing without `begin`.

    Every step but `end` updates the rate-limit headers of the response. Only tenants in the keys file are charged.
    """

    __slots__ = (
        *("_charged", "_exchange", "_limiter", "_notes", "_now", "_timeout_s"),
        *("agent", "begun", "history_bytes", "history_objects", "ignored", "parent", "request_id", "session", "tenant"),
    )

    def __init__(self, front: Front, exchange: Exchange) -> None:
        """Identify the tenant by its API key. Raises MissingKey and UnknownKey."""
        headers = exchange.request.headers
        self.tenant = tenant_of(front, headers)
        exchange.tenant = self.tenant.label
        self.request_id = exchange.id
        self.session = self.agent = self.parent = None
        self.history_bytes = self.history_objects = 0  #: of stored items that the server adds to the body
        if not _NAMING_HEADERS.isdisjoint(headers):
            self.session = first_header(headers)
            self.agent = first_header(headers, AGENT_HEADERS)
            self.parent = first_header(headers, PARENT_HEADERS)
        self.begun = False  #: whether the request has been charged, even if refunded later
        self.ignored: Sequence[str] = ()  #: fields of the body that have no effect
        self._exchange = exchange
        self._limiter = front.limiters.get(self.tenant.digest)
        self._now = front.monotonic
        self._timeout_s = front.settings.request_timeout_s
        self._charged: Sequence[int] | None = None
        self._notes: list[tuple[str, str]] = []  #: response headers besides the rate limits

    def ignore(self, names: Sequence[str]) -> None:
        """List these fields of the body as ignored in a response header; names unfit for a header are left out."""
        self.ignored = names
        self._exchange.extra_headers = [each for each in self._exchange.extra_headers if each not in self._notes]
        shown = ", ".join([each for each in names if _PRINTABLE.fullmatch(each)])
        self._notes = [("x-homing-ignored-fields", shown)] if names else []
        self._exchange.extra_headers = [*self._exchange.extra_headers, *self._notes]

    def named(self, *names: str | None) -> None:
        """Let the request be aborted by these names. The first is its id, unless the header has one."""
        given = [name for name in names if name]
        if given and REQUEST_ID not in self._exchange.request.headers:
            self._exchange.id = self.request_id = given[0]
        self._exchange.names = given

    def sender(self, narrowed_by: str | None = None) -> Sender:
        """The caller as the encoder threads see it. `narrowed_by`: see `Tenant.cache_salt`."""
        tenant, exchange = self.tenant, self._exchange
        body = exchange.request.body
        return Sender(
            tenant.digest,
            tenant.cache_salt(narrowed_by),
            len(body) + self.history_bytes,
            (body.count(b"{") if len(body) > FEW_OBJECTS_BYTES else 0) + self.history_objects,
            tenant.limits.max_prompt_tokens,
            self.check,
            exchange,
            self._timeout_s,
        )

    def check(self, prompts: Sequence[int] = ()) -> None:
        """Raise RateLimited or PromptOverLimit if a request with prompts of at least these lengths could not begin."""
        if self._limiter is not None:
            now = self._show_limits(self._limiter)
            self._limiter.check(prompts, now, at_least=True)

    def begin(self, prompts: Sequence[int]) -> None:
        """Begin a request whose prompts have these lengths in tokens. Raises RateLimited and PromptOverLimit."""
        self.begun = True
        if self._limiter is not None:
            self._limiter.begin(prompts, self._now())
            self._charged = prompts
            self._show_limits(self._limiter)

    def refund(self) -> None:
        """Refund a request that was not accepted."""
        if self._limiter is not None and self._charged is not None:
            self._limiter.refund(self._charged, self._now())
            self._charged = None
            self._show_limits(self._limiter)

    def end(self, generated_tokens: int) -> None:
        """Charge the generated tokens of a request that has ended."""
        if self._limiter is not None and self._charged is not None:
            self._charged = None
            self._limiter.end(generated_tokens, self._now())

    def charge(self, prompts: Sequence[int]) -> None:
        """Begin and end a request that generates nothing. Raises RateLimited and PromptOverLimit."""
        self.begin(prompts)
        self.end(0)

    def _show_limits(self, limiter: RateLimiter) -> float:
        """Set OpenAI's rate-limit headers to the tenant's current state. Returns the monotonic time."""
        now, headers = self._now(), list(self._notes)
        for name, status in limiter.status(now).items():
            headers += [
                (f"x-ratelimit-limit-{name}", str(status.per_minute)),
                (f"x-ratelimit-remaining-{name}", str(status.remaining)),
                (f"x-ratelimit-reset-{name}", f"{status.reset_s:.3f}s"),
            ]
        self._exchange.extra_headers = headers
        return now
