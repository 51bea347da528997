"""Who steers requests in a simulation: our router's own placement, or a peer's policy (peers.py).

`Steering` is all that the simulation knows of a router. `Homing` runs the production code (placement.py, policy.py,
index.py, reservations.py, load.py) unchanged; it only puts a request's blocks into its words.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from ....events.follow.subscription import FeedStatus
from ....events.wire.messages import EventEndpoints, LoadReport
from ....replica.messages import ModelLimits, Parity, ReplicaDescription
from ....router.routing.placement import Placement
from ....router.routing.policy.base import Policy, Prompt
from ....router.routing.replica_load import LoadBook
from ....router.routing.reservations import Reservations
from .replica import ReplicaLimits
from .workload import Arrival

#: No replica of a simulation falls silent for good: whoever is gone leaves.
_SILENCE_S = float("inf")

_NOWHERE = EventEndpoints(events="", replay="", state="", snapshot="")
_NO_PARITY = Parity(
    tokenizer_digest="", template_digest="", block_size=0, hash_algorithm="", model_root=b"", canary=b""
)


@dataclass(slots=True, frozen=True)
class Placed:
    """Where a request goes, and what the router expects of it there."""

    replica: str
    predicted_cached_tokens: int | None = None  #: None: the policy does not predict


class Steering(Protocol):
    """A router as the simulation sees it. All calls come in the order in which this router learns of things."""

    @property
    def name(self) -> str:
        """For reports."""

    def join(self, description: ReplicaDescription, now: float) -> None:
        """A replica is there."""

    def leave(self, replica: str) -> None:
        """A replica is gone, with its requests."""

    def restarted(self, replica: str) -> bool:
        """Its engine started anew behind the same address. Whether this router notices: then it leaves, and joins."""

    def place(self, request_id: int, arrival: Arrival, generated: int, now: float) -> Placed | None:
        """Choose a replica and book the request there; None: hold it until something changes."""

    def started(self, replica: str, request_id: int) -> None:
        """Its first token came."""

    def ended(self, replica: str, request_id: int) -> None:
        """Its last token came."""

    def stored(self, replica: str, blocks: Sequence[int]) -> None:
        """The replica announced these blocks."""

    def removed(self, replica: str, blocks: Sequence[int]) -> None:
        """The replica gave these up."""

    def reset(self, replica: str, blocks: Sequence[int]) -> None:
        """The replica holds exactly these."""

    def live(self, replica: str, live: bool) -> None:
        """Whether what was announced is exact now."""

    def report(self, replica: str, report: LoadReport, now: float) -> None:
        """The replica's load."""


def describe(replica_id: str, epoch: int, limits: ReplicaLimits, rates: tuple[float, float]) -> ReplicaDescription:
    """A modelled replica as it introduces itself; `rates` are prefill tokens per second and a decode step's seconds."""
    return ReplicaDescription(
        replica_id=replica_id,
        epoch=epoch,
        request_endpoint="",
        event_endpoints=_NOWHERE,
        parity=_NO_PARITY,
        model=ModelLimits(name="", path="", vocab_size=1, max_model_len=1, eos_token_ids=()),
        num_blocks=limits.blocks,
        max_running_requests=limits.max_running_requests,
        max_batched_tokens=limits.max_batched_tokens,
        tensor_parallel_size=1,
        prefill_tokens_per_s=rates[0],
        decode_step_s=rates[1],
    )


class Homing:
    """One router process of ours."""

    def __init__(self, router_id: str, policy: Policy, block_tokens: int, rng: Random) -> None:
        self.placement = Placement(
            policy, loads=LoadBook(router_id, _SILENCE_S), reservations=Reservations(30.0), rng=rng
        )
        self._block_tokens = block_tokens

    @property
    def name(self) -> str:
        """The policy's."""
        return self.placement.policy.name

    def join(self, description: ReplicaDescription, now: float) -> None:
        self.placement.join(description, now)

    def leave(self, replica: str) -> None:
        self.placement.leave(replica)

    def restarted(self, replica: str) -> bool:  # noqa: ARG002
        return True  # by the epoch in whatever it sends

    def rest(self, replica: str) -> None:
        """Send it nothing new: it drains."""
        self.placement.loads.rest(replica, "draining")

    def place(self, request_id: int, arrival: Arrival, generated: int, now: float) -> Placed | None:
        placement = self.placement
        placement.reservations.expire(now)
        prompt = Prompt(
            tokens=arrival.tokens + generated,
            blocks=len(arrival.blocks),
            block_size=self._block_tokens,
            now=now,
            session=arrival.session,
        )
        decision = placement.decide(prompt, placement.candidates(arrival.blocks, (), now))
        chosen = decision.chosen
        if chosen is None:
            return None
        placement.book(request_id, decision, arrival.blocks, now)
        return Placed(chosen.replica_id, prompt.tokens - chosen.uncached_tokens(prompt))

    def started(self, replica: str, request_id: int) -> None:
        self.placement.started(replica, request_id)

    def ended(self, replica: str, request_id: int) -> None:
        self.placement.ended(replica, request_id)

    def stored(self, replica: str, blocks: Sequence[int]) -> None:
        self.placement.stored(replica, blocks)

    def removed(self, replica: str, blocks: Sequence[int]) -> None:
        self.placement.removed(replica, blocks)

    def reset(self, replica: str, blocks: Sequence[int]) -> None:
        self.placement.reset(replica, blocks)

    def live(self, replica: str, live: bool) -> None:
        self.placement.set_feed(replica, FeedStatus.LIVE if live else FeedStatus.SYNCING)

    def report(self, replica: str, report: LoadReport, now: float) -> None:
        self.placement.report(replica, report, now)
