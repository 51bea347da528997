"""Chooses a replica for a request, books it there, and records what the decision expects.

Pure: hashes the request's tokens, asks `Placement`, and writes the message. Independent of the queue and of replies.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial

import msgspec

from ...kvcache.hashing import TOKEN_BYTES, BlockHash, BlockHasher, salt_text, token_bytes, wire_hash, wire_hashes
from ...replica.messages import Generate, ModelLimits
from ..backend import Explanation, Forecast, GenerationRequest, Missing
from ..errors import NoReplica, PromptTooLong
from ..routing.placement import Placement, known_tokens
from ..routing.policy.base import Candidate, Decision, Prompt
from ..routing.policy.explain import reason_of, regret_tokens, why_held
from .block_hash_cache import BlockHashCache
from .missing_blocks import evicted, missing_of
from .recent_requests import MAX_TRACE_ID, RecentRequests
from .request_state import HashedTokens, Placed, RequestId, RequestState, Send
from .request_table import RequestTable

#: Tenants whose caches are searched for a prompt that is not in its own, and the blocks of it that are compared.
MAX_TENANTS = 8
MAX_COMPARED = 64


@dataclass(slots=True, frozen=True)
class ServedModel:
    """The served model's limits and how its blocks are hashed."""

    hasher: BlockHasher
    root: BlockHash
    limits: ModelLimits


class Dispatcher:
    """Places the requests of one model."""

    def __init__(
        self,
        placement: Placement,
        table: RequestTable,
        recent: RecentRequests,
        wire_ids: Iterator[int],
        block_size: int,
    ) -> None:
        self.model: ServedModel | None = None
        self.block_size = block_size
        self._placement = placement
        self._table = table
        self._recent = recent
        self._wire_ids = wire_ids
        self._hash_cache: BlockHashCache | None = None  #: of `model`
        self._version = 0  #: number of models adopted so far
        self._tenants: OrderedDict[BlockHash, bytes] = OrderedDict()  #: the latest ones by the root of their blocks

    def adopt(self, model: ServedModel) -> None:
        """Serve this model, or hash its blocks in another way; waiting requests are hashed again when placed."""
        self.model = model
        self._version += 1
        self._hash_cache = BlockHashCache(model.hasher, model.root)

    def new_request(
        self, request_id: RequestId, request: GenerationRequest, now: float, deadline: float
    ) -> RequestState:
        """The state of a request that has not been placed. Raises NoReplica or PromptTooLong."""
        if self.model is None:
            raise NoReplica("no replica has joined yet", retry_after_s=1.0)
        prompt_tokens, longest = len(request.token_ids) // 4, self.model.limits.max_model_len
        assert prompt_tokens * 4 == len(request.token_ids) > 0, f"{len(request.token_ids)} bytes of prompt token ids"
        if prompt_tokens + (request.embedding is None) > longest:
            raise PromptTooLong(prompt_tokens, longest)
        content = self.hashed(request, request.token_ids)
        self._tenants[content.root] = request.tenant
        self._tenants.move_to_end(content.root)
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)
        return RequestState(request_id, request, now, deadline, prompt_tokens, content)

    def hashed(self, request: GenerationRequest, tokens: bytes) -> HashedTokens:
        """The blocks of a request's tokens."""
        assert self._hash_cache is not None, "a request without a model"
        root = self._hash_cache.root(request.salt, request.adapter)
        hashes = self._hash_cache.hashes(root, tokens)
        return HashedTokens(root, tokens, hashes, wire_hashes(hashes), self._version)

    def rank(self, request: RequestState, now: float) -> tuple[int, float]:
        """The request's place among its tenant's waiting requests: the lowest goes first."""
        return request.request.own_order, self._placement.rank(self._prompt(request, request.content.keys, now))

    def place(
        self, request: RequestState, now: float, closed: Collection[str] = (), *, anyway: bool = False
    ) -> Send | None:
        """Choose a replica and reserve its capacity; None if no replica can take the request now.

        `closed`: replicas that are kept for other requests. `anyway`: choose the one with the fewest requests, whatever
        the policy says.
        """
        if request.new_tokens or request.content.version != self._version:
            tokens = request.content.tokens + token_bytes(request.new_tokens)
            request.content, request.new_tokens = self.hashed(request.request, tokens), []
        decide = self._placement.fewest if anyway else self._placement.decide
        prompt, candidates = self._prompt_and_candidates(request, now, closed, every=anyway)
        decision = decide(prompt, candidates)
        if decision.row is None and len(candidates) < len(self._placement):  # not all are among the contenders
            prompt, candidates = self._prompt_and_candidates(request, now, closed, every=True)
            decision = decide(prompt, candidates)
        row = decision.row
        if row is None:
            # Replicas that refused it may be tried again later; `retries` limits how often.
            request.moves.excluded = frozenset()
            request.waits_for = why_held(decision)
            return None
        if not request.generated:
            request.forecast = self._forecast(request, prompt, candidates, decision)
        request.waits_for = ""
        request.advance("send")
        wire_id, replica, about = next(self._wire_ids), row.candidate.replica_id, request.request
        request.replica = replica
        request.placed.append(Placed(now, now + row.ttft_s, wire_id, request.generated, decision))
        self._table.sent(request)
        name = about.trace_id[:MAX_TRACE_ID]
        self._placement.book(wire_id, decision, request.content.keys, now, name, about.tenant)
        self._recent.placed(request, decision, now)
        return Send(replica, _generate(request, wire_id))

    def explain(self, request: GenerationRequest, now: float) -> Explanation:
        """Explain the decision that would be taken now. Raises NoReplica or PromptTooLong."""
        state = self.new_request(RequestId(0), request, now, now)
        prompt, candidates = self._prompt_and_candidates(state, now, every=True)
        table = self._placement.explain(prompt, candidates)
        chosen = next((each for each in candidates if each.replica_id == table.chosen), None)
        if chosen is None:
            return table
        return msgspec.structs.replace(table, missing=self._missing(state, prompt, candidates, chosen))

    def found_less(self, request: RequestState, cached: int) -> None:
        """Look again why no more was cached if the replica found less than was predicted."""
        forecast, keys, block = request.forecast, request.content.keys, max(0, cached) // self.block_size
        if forecast is not None and cached + self.block_size <= forecast.cached_tokens and block < len(keys):
            found = evicted(keys[block], block * self.block_size, self._placement.past)
            request.forecast = msgspec.structs.replace(forecast, missing=found or forecast.missing)

    def check(self) -> None:
        if self._hash_cache is not None:
            self._hash_cache.check()

    def _prompt_and_candidates(
        self, request: RequestState, now: float, closed: Collection[str] = (), *, every: bool = False
    ) -> tuple[Prompt, list[Candidate]]:
        # Prompt logprobs and mean pooling need every prompt token to be computed, so the cache does not help.
        scores_prompt = request.request.sampling.prompt_logprobs is not None and not request.generated
        embedding = request.request.embedding
        hashes = () if scores_prompt or (embedding and embedding.pooling == "mean") else request.content.keys
        prompt = self._prompt(request, hashes, now)
        usable = (prompt.tokens - 1) // prompt.block_size
        excluded: Collection[str] = request.moves.excluded.union(closed) if closed else request.moves.excluded
        if adapter := request.request.adapter:
            excluded = {*excluded, *(each.name for each in self._placement.fleet if not each.offers(adapter))}
        return prompt, self._placement.candidates(hashes, excluded, now, usable=usable, every=every)

    def _prompt(self, request: RequestState, hashes: tuple[int, ...], now: float) -> Prompt:
        return Prompt(
            tokens=request.prompt_tokens + request.generated,
            blocks=len(request.content.keys),
            block_size=self.block_size,
            hashes=hashes,
            generated=request.generated,
            now=now,
        )

    def _forecast(
        self, request: RequestState, prompt: Prompt, candidates: list[Candidate], decision: Decision
    ) -> Forecast:
        """What the decision expects. Also corrects the forecasts of requests that this one will pass."""
        row, before = decision.row, request.forecast
        assert row is not None, "nothing was chosen"
        foreseen, size = self._placement.foresee(decision), prompt.block_size
        for wire_id, blocks in foreseen.passed.items():
            other = self._table.on_wire(wire_id)
            if other is not None and not other.generated and (theirs := other.forecast) is not None:
                cached = foreseen.tokens(blocks, other.prompt_tokens, size)
                if cached > theirs.cached_tokens:
                    other.forecast = msgspec.structs.replace(theirs, cached_tokens=cached)
        regret = regret_tokens(prompt, candidates, decision)
        waited_s = prompt.now - request.arrived
        return Forecast(
            reason=reason_of(decision, candidates, regret),
            queue_s=waited_s if before is None else before.queue_s,
            ttft_s=waited_s + row.ttft_s,
            cached_tokens=foreseen.tokens(foreseen.blocks, prompt.tokens, size),
            loaded_tokens=tuple([(medium, blocks * size) for medium, blocks in foreseen.loads]),
            regret_tokens=regret,
            # It takes time to compute, so only sessions get it.
            known_tokens=0 if request.request.session is None else known_tokens(prompt, candidates),
            missing=self._missing(request, prompt, candidates, row.candidate),
        )

    def _missing(
        self, request: RequestState, prompt: Prompt, candidates: list[Candidate], chosen: Candidate
    ) -> Missing | None:
        shared_with = partial(self._shared_with, request)
        return missing_of(prompt, request.content.keys, candidates, chosen, self._placement.past, shared_with)

    def _shared_with(self, request: RequestState, number: int) -> bytes | None:
        """Another tenant that has block `number` of the prompt cached, or an earlier one of a long prompt."""
        assert self.model is not None, "a request without a model"
        index, size, content = self._placement.index, self.block_size * TOKEN_BYTES, request.content
        for root, tenant in reversed(self._tenants.items()):
            if root == content.root or tenant == request.request.tenant:
                continue
            for end in dict.fromkeys((1, min(number, MAX_COMPARED) + 1)):  # most prompts differ in their first block
                chain = self.model.hasher.chain(root, content.tokens[: end * size])
                if wire_hash(chain[-1]) not in index:
                    break
            else:
                return tenant
        return None


def _generate(request: RequestState, wire_id: int) -> Generate:
    about, sampling, content = request.request, request.request.sampling, request.content
    if request.generated and sampling.prompt_logprobs is not None:
        # The first delta already delivered them; asking again would keep the request from using the cache.
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
    return Generate(
        request_id=wire_id,
        token_ids=content.tokens,
        prompt_tokens=request.prompt_tokens,
        root=content.root,
        salt=salt_text(about.salt),
        block_hashes=content.hashes,
        sampling=sampling,
        priority=about.priority,
        trace_id=about.trace_id,
        traceparent=about.traceparent,
        pins=about.pins,
        tokens_per_output=about.tokens_per_delta,
        constraint=about.constraint,
        chat=about.chat,
        embedding=about.embedding,
        counted=request.moves.counted,
        given=about.given,
        adapter=about.adapter,
        tenant=about.tenant,
        weight=about.weight,
    )
