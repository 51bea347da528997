"""A step's rows: which tokens of which request it computes, and the plan and the logits that follow from them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from .request import RequestState
from .step_plan import BlockCopy, PlanRow, StepPlan, plan_of_rows


@dataclass(slots=True, frozen=True)
class ScheduledRow:
    """One request's share of a step: tokens `start` up to `start + count`, and drafts for the tokens after them."""

    request: RequestState
    start: int
    count: int
    #: Made before this step writes any KV: until then the source block holds the matched KV, even if reallocated.
    copy: BlockCopy | None = None
    #: Guesses at the next tokens of a sampling row; a token is also drawn after each of them.
    drafts: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def width(self) -> int:
        return self.count + len(self.drafts)

    @property
    def samples(self) -> bool:
        """Whether the step computes the request's newest token, so the next one can be drawn. False for embeddings."""
        return self.end == self.request.num_tokens and self.request.embedding is None

    @property
    def decodes(self) -> bool:
        return self.count == 1 and self.start >= self.request.prompt_tokens

    def token_ids(self) -> Sequence[int]:
        """Tokens and drafts to compute, with 0 for a token that a step in flight is still drawing."""
        tokens = self.request.tokens[self.start : self.end]
        if self.drafts:
            return [*tokens, *self.drafts]
        return tokens if len(tokens) == self.count else [*tokens, 0]


@dataclass(slots=True, frozen=True)
class LogitsLayout:
    """The logits that a step returns, and the hidden states that become embeddings.

    Each sampling row gets 1 + len(drafts) logits; those for prompt logprobs follow after all of them.
    """

    samplers: list[ScheduledRow]
    prompts: list[tuple[ScheduledRow, Sequence[int]]]  #: each with the positions whose logits are needed
    logits_at: list[int]  #: flat token indexes
    hidden: list[tuple[ScheduledRow, range]]  #: each with the flat token indexes that are pooled


def logits_layout(rows: Sequence[ScheduledRow]) -> LogitsLayout:
    samplers: list[ScheduledRow] = []
    prompts: list[tuple[ScheduledRow, Sequence[int]]] = []
    sample_at: list[int] = []
    prompt_at: list[int] = []
    hidden: list[tuple[ScheduledRow, range]] = []
    first = 0
    for row in rows:
        if row.samples:
            samplers.append(row)
            sample_at += range(first + row.count - 1, first + row.width)
        if row.request.scores_prompt:
            # A prompt token's logprob comes from the logits of the position before it.
            positions = range(row.start, min(row.end, row.request.prompt_tokens - 1))
            if positions:
                prompts.append((row, positions))
                prompt_at += [first + position - row.start for position in positions]
        first += row.width
        if row.request.embedding is not None:
            pooled = row.count if row.request.embedding.pooling == "mean" else row.end == row.request.num_tokens
            hidden.append((row, range(first - pooled, first)))
    return LogitsLayout(samplers, prompts, sample_at + prompt_at, hidden)


def plan_of_step(step: int, rows: Sequence[ScheduledRow], logits_at: Sequence[int]) -> StepPlan:
    """The plan for these rows. Each draft is a row of its own, so its result is bit for bit that of a later step.

    That works because attention reads the KV that all rows of a step have written. The step can also be a captured one.
    """
    plan_rows: list[PlanRow] = []
    for row in rows:
        table = row.request.block_table()
        if row.drafts:
            plan_rows += [PlanRow([token], row.start + place, table) for place, token in enumerate(row.token_ids())]
        else:
            plan_rows.append(PlanRow(row.token_ids(), row.start, table))
    return plan_of_rows(step, plan_rows, logits_at, [row.copy for row in rows if row.copy is not None])
