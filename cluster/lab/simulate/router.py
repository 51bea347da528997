"""A modelled router process: the production placement with one policy, and the requests that it holds."""

from random import Random

from ....events.wire.messages import EventEndpoints
from ....replica.messages import ModelLimits, Parity, ReplicaDescription
from ....router.flow.fair_queue import FairQueue
from ....router.routing.placement import Placement
from ....router.routing.policy.base import Decision, Policy, Prompt
from .peers.base import Peer
from .replica import SimulatedReplica, Work


class SimulatedRouter:
    """Places requests. A restart loses all state of `placement`; clients stay connected, so held requests are kept."""

    def __init__(self, name: str, policy: Policy, rng: Random) -> None:
        self.name = name
        self._queue = FairQueue()
        self._held: dict[int, Work] = {}
        self._unstarted: dict[int, Work] = {}  #: sent, without a first token so far
        self.restart(policy, rng)

    def restart(self, policy: Policy, rng: Random) -> None:
        # Simulated replicas are never silent: a lost one leaves.
        self.placement = Placement(policy, router_id=self.name, silence_s=float("inf"), rng=rng)

    @property
    def waiting(self) -> list[Work]:
        return list(self._held.values())

    def head(self) -> Work | None:
        """The held request to place next, or None."""
        name = self._queue.head() if self._held else None
        return None if name is None else self._held[name]

    def hold(self, work: Work, block_tokens: int, now: float) -> None:
        """Queue a request here; one that lost its replica goes before all others."""
        self._held[work.request_id] = work
        if work.moved:
            self._queue.resume(work.request_id, priority=0)
        else:
            rank = 0, self.placement.rank(self._prompt(work, block_tokens, now))
            self._queue.push(work.request_id, priority=0, tenant=b"", weight=1.0, rank=rank)

    def release(self, work: Work) -> None:
        """Remove a request that was placed."""
        del self._held[work.request_id]
        self._queue.discard(work.request_id)

    def join(self, replica: SimulatedReplica, now: float) -> None:
        """Register a replica with the rates that it has measured so far."""
        description = ReplicaDescription(
            replica_id=replica.replica_id,
            epoch=replica.epoch,
            request_endpoint="",
            event_endpoints=EventEndpoints(events="", replay="", state="", snapshot=""),
            parity=Parity(
                tokenizer_digest="",
                template_digest="",
                block_size=replica.limits.block_tokens,
                hash_algorithm="",
                model_root=b"",
                canary=b"",
            ),
            model=ModelLimits(name="", path="", vocab_size=1, max_model_len=1, eos_token_ids=()),
            num_blocks=replica.limits.blocks,
            max_running_requests=replica.limits.max_running_requests,
            max_batched_tokens=replica.limits.max_batched_tokens,
            tensor_parallel_size=1,
            prefill_tokens_per_s=replica.rates.prefill_tokens_per_s,
            decode_step_s=replica.rates.decode_step_s,
        )
        self.placement.join(description, now)

    def place(self, work: Work, block_tokens: int, now: float) -> str | None:
        """Choose a replica, book the request there and return its id; None: hold it until something changes."""
        arrival, placement = work.arrival, self.placement
        prompt = self._prompt(work, block_tokens, now)
        usable = (prompt.tokens - 1) // block_tokens
        decision = placement.decide(prompt, placement.candidates(arrival.blocks, (), now, usable=usable))
        chosen = decision.chosen
        if chosen is None:
            return None
        if not isinstance(placement.policy, Peer):
            self._predict(work, prompt, decision)
        placement.book(work.request_id, decision, arrival.blocks, now)
        return chosen.replica_id

    def _predict(self, work: Work, prompt: Prompt, decision: Decision) -> None:
        """As in the request flow. A prompt of whole blocks computes only its last token."""
        foreseen, size = self.placement.foresee(decision), prompt.block_size
        work.predicted = min(foreseen.blocks * size, prompt.tokens - 1)
        work.predicted_loads = sum([blocks * size for _, blocks in foreseen.loads])
        for request_id, blocks in foreseen.passed.items():
            if (other := self._unstarted.get(request_id)) is not None and other.predicted is not None:
                other.predicted = max(other.predicted, min(blocks * size, other.arrival.tokens + other.generated - 1))
        self._unstarted[work.request_id] = work

    def started(self, replica: str, work: Work) -> None:
        """The request's first token arrived."""
        self._unstarted.pop(work.request_id, None)
        self.placement.started(replica, work.request_id)

    def lost(self, work: Work) -> None:
        """The request is gone with its replica."""
        self._unstarted.pop(work.request_id, None)

    def _prompt(self, work: Work, block_tokens: int, now: float) -> Prompt:
        arrival = work.arrival
        return Prompt(
            tokens=arrival.tokens + work.generated,
            blocks=len(arrival.blocks),
            block_size=block_tokens,
            hashes=arrival.blocks,
            text_hashes=arrival.text,
            generated=work.generated,
            now=now,
        )
