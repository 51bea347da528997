"""One request inside the router: its state, its allowed transitions, and the instructions that the flow returns for it.

Pure: no clock, no sockets, no queue. A request's phase changes only as `TRANSITIONS` allows.
"""

from enum import StrEnum
from typing import Literal, NamedTuple, NewType, get_args

import msgspec

from ...kvcache.hashing import BlockHash
from ...replica.messages import Request
from ..backend import Forecast, GenerationRequest, TokenDelta
from ..errors import RouterError
from ..routing.policy.base import Decision

#: Identifies a request inside this router for its whole life. The wire id, in contrast, is new for each placement.
RequestId = NewType("RequestId", int)


class Phase(StrEnum):
    """Where a request is in its life."""

    NEW = "new"  #: created, neither queued nor sent yet
    WAITING = "waiting"  #: in the router's queue
    SENT = "sent"  #: on a replica, without output so far
    STREAMING = "streaming"  #: on a replica that has started to produce output
    OVER = "over"


#: Aliases for speed: in Python 3.11 `Phase.SENT` takes a tenth of a microsecond, a global name nearly nothing.
WAITING, SENT, STREAMING = Phase.WAITING, Phase.SENT, Phase.STREAMING

Outcome = Literal["finished", "failed", "cancelled"]
Event = Literal["queue", "send", "start", "move", "finish", "fail", "cancel"]


class Transition(NamedTuple):
    """An allowed phase change."""

    before: Phase
    event: Event
    after: Phase
    when: str


TRANSITIONS = (
    Transition(Phase.NEW, "send", Phase.SENT, "a replica can take it at once"),
    Transition(Phase.NEW, "queue", Phase.WAITING, "no replica can take it, or others wait already"),
    Transition(Phase.WAITING, "send", Phase.SENT, "it is at the head of the queue and a replica can take it"),
    Transition(Phase.SENT, "start", Phase.STREAMING, "the replica's first output for it arrives"),
    Transition(
        Phase.SENT, "move", Phase.WAITING, "the replica is lost, stuck, refuses it or does not have it, and it may move"
    ),
    Transition(
        Phase.STREAMING, "move", Phase.WAITING, "the replica is lost, stuck or does not have it, and it may move"
    ),
    Transition(Phase.SENT, "finish", Phase.OVER, "the replica is lost, and nothing is left to generate"),
    Transition(
        Phase.STREAMING,
        "finish",
        Phase.OVER,
        "the last output or a stop string arrives, or only its finish reason is lost",
    ),
    Transition(Phase.WAITING, "fail", Phase.OVER, "its deadline passes, or the queue or the router drops it"),
    Transition(
        Phase.SENT,
        "fail",
        Phase.OVER,
        "it is refused, no retry is left, a second replica died with it, or its deadline passes",
    ),
    Transition(
        Phase.STREAMING,
        "fail",
        Phase.OVER,
        "tokens are missing, it may not move, a second replica died with it, or its deadline passes",
    ),
    Transition(Phase.WAITING, "cancel", Phase.OVER, "its client left, or its model was replaced"),
    Transition(Phase.SENT, "cancel", Phase.OVER, "its client left, or its model was replaced"),
    Transition(Phase.STREAMING, "cancel", Phase.OVER, "its client left"),
)
#: The same table by event, for fast lookup: each request needs it a few times.
_NEXT: dict[Event, dict[Phase, Phase]] = {
    event: {each.before: each.after for each in TRANSITIONS if each.event == event} for event in get_args(Event)
}


class Suspicion(msgspec.Struct, frozen=True):
    """Why a request may be what kills replicas (suspects.py)."""

    deaths: tuple[tuple[str, float], ...]  #: replicas that died with it, without another to blame, and when
    produced: int  #: tokens that the last of them had generated for it

    @property
    def since(self) -> float:
        """When the last of them died."""
        return self.deaths[-1][1]


class HashedTokens(msgspec.Struct, frozen=True, gc=False):
    """A request's prompt and what was generated before its last placement, and their blocks."""

    root: BlockHash
    tokens: bytes  #: uint32 LE
    hashes: bytes  #: block hashes of all full blocks of `tokens`
    keys: tuple[int, ...]  #: wire hashes of the same blocks, the keys of the prefix index
    version: int  #: of the way in which blocks were hashed


class Placed(msgspec.Struct, frozen=True, gc=False):
    """One decision by which a request was sent to a replica."""

    at: float
    due_at: float  #: when its next token was expected
    wire_id: int  #: the request's id on the replica
    generated: int  #: tokens generated before, on other replicas
    decision: Decision


class Moves(msgspec.Struct, eq=False, gc=False):
    """How often a request moved between replicas, and why."""

    continuations: int = 0
    attempts: int = 0  #: those that count against `retries`: no other request is to blame for them
    unsent: int = 0  #: times that it could not be sent to the replica chosen
    counted: bool = False  #: a replica that did not refuse it has had it, and counted its look-up
    excluded: frozenset[str] = frozenset()  #: replicas that refused it; emptied when no replica can take it


class RequestState(msgspec.Struct, eq=False):
    """A request's mutable state."""

    request_id: RequestId
    request: GenerationRequest
    arrived: float
    deadline: float
    prompt_tokens: int
    content: HashedTokens
    phase: Phase = Phase.NEW
    new_tokens: list[int] = []  #: generated since `content` was hashed
    generated: int = 0
    replica: str | None = None  #: current or last replica; None: never sent
    placed: list[Placed] = []  #: oldest first; the last one is valid while SENT or STREAMING
    forecast: Forecast | None = None  #: of the last decision before the first token
    text_only: bool = False  #: some output came as text without token ids, so no other replica can continue it
    moves: Moves = msgspec.field(default_factory=Moves)
    suspicion: Suspicion | None = None  #: None: no replica died with it
    waits_for: str = ""  #: why it waits in the router, in words; empty: it does not
    cached_tokens: int | None = None  #: prompt tokens found in the cache; None: no replica has told so far
    loaded_tokens: tuple[tuple[str, int], ...] = ()  #: the part of these loaded from tiers, by medium
    ttft_s: float | None = None
    outcome: Outcome | None = None  #: None until it is over

    def advance(self, event: Event) -> None:
        """Change the phase as `TRANSITIONS` says. A transition that is not in the table is an AssertionError."""
        after = _NEXT[event].get(self.phase)
        assert after is not None, f"request {self.request_id}: no transition {event!r} from phase {self.phase.value!r}"
        self.phase = after

    def exclude(self, replica: str) -> None:
        """Send it there no more, unless no other replica can take it."""
        self.moves.excluded |= {replica}

    @property
    def sent(self) -> Placed:
        """The last placement. There must be one."""
        return self.placed[-1]

    @property
    def produced(self) -> int:
        """Tokens that its current or last replica has generated for it."""
        return self.generated - self.placed[-1].generated if self.placed else 0

    @property
    def on_replica(self) -> bool:
        return self.phase is SENT or self.phase is STREAMING


class Send(msgspec.Struct, frozen=True, gc=False):
    """Send `message` to `replica`; on failure call `RequestFlow.unsendable`."""

    replica: str
    message: Request


class ReadSockets(msgspec.Struct, frozen=True, gc=False):
    """Read what has arrived from `replica`: something stands still, perhaps as a wake-up was lost."""

    replica: str


class Deliver(msgspec.Struct, frozen=True, gc=False):
    """Hand this delta to the request's reader."""

    request_id: RequestId
    delta: TokenDelta
    replica: str | None  #: producer of the delta; kept here because the request may be over when the delta is delivered


class Ended(msgspec.Struct, frozen=True, gc=False):
    """The request is over; its last delta has been delivered."""

    request: RequestState
    error: RouterError | None = None  #: error for the reader; None: the request finished or its reader left


class Continue(msgspec.Struct, frozen=True, gc=False):
    """More waiting requests may be placed: call `RequestFlow.pump` in the next iteration of the event loop."""


Instruction = Send | ReadSockets | Deliver | Ended | Continue
