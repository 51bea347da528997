"""Drafts: guesses at the next tokens of decodes, so that one step can compute several tokens of an answer.

Drafts use the budget and the free blocks that all other rows leave. A request whose drafts fail gets none for a while.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from .request import RequestState
from .request_blocks import RequestBlocks
from .step_rows import ScheduledRow

#: (a request's tokens, maximum count) -> guesses at the next token ids, or (). The sampler checks them, so they do not
#: affect which tokens are generated. The extension point for speculative decoding.
Drafter = Callable[[Sequence[int], int], Sequence[int]]


class Drafts:
    """Adds drafts to steps of up to `step_tokens` tokens; none without a `drafter`."""

    def __init__(self, drafter: Drafter | None, step_tokens: int, max_model_len: int, blocks: RequestBlocks) -> None:
        self._drafter = drafter
        self._step_tokens = step_tokens
        self._max_model_len = max_model_len
        self._blocks = blocks

    def add_to(self, rows: list[ScheduledRow]) -> list[ScheduledRow]:
        """Add drafts to a step's decodes and return all its rows. No token may be in flight."""
        drafter, spare = self._drafter, self._step_tokens - sum(row.count for row in rows)
        if drafter is None or spare <= 0:
            return rows
        drafted: list[ScheduledRow] = []
        for row in rows:
            drafts = self._fitting(row.request, spare, drafter) if row.decodes and row.samples else ()
            spare -= len(drafts)
            drafted.append(replace(row, drafts=drafts) if drafts else row)
        return drafted

    def expected(self, running: Sequence[RequestState]) -> bool:
        """Whether a decode can get drafts now or, with tokens in flight, probably can once they are known."""
        drafter, spare = self._drafter, self._step_tokens - len(running)
        if drafter is None or spare <= 0:
            return False
        decoding: Iterable[RequestState] = (request for request in running if request.decoding)
        return any(self._expects(request, spare, drafter) for request in decoding)

    def _fitting(self, request: RequestState, spare: int, drafter: Drafter) -> tuple[int, ...]:
        drafts = self._proposed(request, spare, drafter)
        return drafts[: self._blocks.extend_for_drafts(request, len(drafts))] if drafts else ()

    def _proposed(self, request: RequestState, spare: int, drafter: Drafter) -> tuple[int, ...]:
        """At most `spare` drafts for a request; none for its last token."""
        places = self._max_model_len - request.num_tokens - 1
        most = min(spare, places, request.sampling.max_tokens - request.generated - 1)
        if not request.drafting.trusted:
            most = min(most, 1)
        # With a guide, each draft would need the mask of a state that is discarded if an earlier draft is wrong.
        if most <= 0 or request.guide is not None or request.generated < request.drafting.paused_until:
            return ()
        return tuple(drafter(request.tokens, most)[:most])

    def _expects(self, request: RequestState, spare: int, drafter: Drafter) -> bool:
        drafting = request.drafting
        if drafting.expected is not None and not request.pending:
            place, token_id = drafting.expected
            drafting.learn(1, int(request.tokens[place] == token_id), request.generated)
            drafting.expected = None
        drafts = self._proposed(request, spare, drafter)
        if drafts and request.pending:
            drafting.expected = len(request.tokens), drafts[0]
        return bool(drafts)
