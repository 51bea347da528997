"""From the rows of a step to the plan that all ranks get, and whose logits it asks for. Pure; knows no model."""

from collections.abc import Sequence
from dataclasses import dataclass

from .scheduler import ScheduledRow
from .step_plan import PlanRow, StepPlan, plan_of_rows


@dataclass(slots=True, frozen=True)
class Wanted:
    """Whose logits a step returns: for each sampling row one and one a draft, then those for prompt logprobs."""

    samplers: list[ScheduledRow]
    prompts: list[tuple[ScheduledRow, Sequence[int]]]
    logits_at: list[int]


def plan_of_step(step: int, rows: Sequence[ScheduledRow], logits_at: Sequence[int]) -> StepPlan:
    """What all ranks are told."""
    plan_rows = [
        PlanRow(
            token_ids=_known_tokens(row),
            start=row.start,
            block_table=row.request.block_table(),
        )
        for row in rows
    ]
    copies = [row.copy for row in rows if row.copy is not None]
    return plan_of_rows(step, plan_rows, logits_at, copies)


def _known_tokens(row: ScheduledRow) -> Sequence[int]:
    """The row's tokens and drafts; 0 in place of one that a step in flight is drawing."""
    tokens = row.request.tokens[row.start : row.end]
    if row.drafts:
        return [*tokens, *row.drafts]
    return tokens if len(tokens) == row.count else [*tokens, 0]


def wanted_logits(rows: Sequence[ScheduledRow]) -> Wanted:
    """The flat token indexes whose logits a step needs."""
    samplers: list[ScheduledRow] = []
    prompts: list[tuple[ScheduledRow, Sequence[int]]] = []
    sample_at: list[int] = []
    prompt_at: list[int] = []
    first = 0
    for row in rows:
        if row.samples:
            samplers.append(row)
            sample_at += range(first + row.count - 1, first + row.width)
        if positions := prompt_positions(row):
            prompts.append((row, positions))
            prompt_at += [first + position - row.start for position in positions]
        first += row.width
    return Wanted(samplers=samplers, prompts=prompts, logits_at=sample_at + prompt_at)


def prompt_positions(row: ScheduledRow) -> Sequence[int]:
    """Positions of this row whose logits give a prompt token's logprob: those before the prompt's last token."""
    if row.request.may_use_cache:
        return ()
    return range(row.start, min(row.end, row.request.prompt_tokens - 1))
