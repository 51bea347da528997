"""A decision as a table for people: what counted for each replica, and why it was or was not chosen."""

from ...backend import Explanation, ReplicaScore
from .base import Decision, Score


def explanation_of(decision: Decision) -> Explanation:
    """The table of a decision, recomputed for all candidates."""
    rows, chosen = decision.table(), decision.row
    if chosen is not None:
        why = decision.reason([row for row in rows if row.obstacle is None])
    elif rows:
        why = "held: " + ", ".join(f"{row.candidate.replica_id} {row.obstacle}" for row in rows)
    else:
        why = "no replica has joined"
    return Explanation(
        policy=decision.policy,
        chosen=chosen.candidate.replica_id if chosen else None,
        why=why,
        prompt_tokens=decision.prompt.tokens,
        prompt_blocks=decision.prompt.blocks,
        block_size=decision.prompt.block_size,
        replicas=[_explained(row, chosen, why) for row in rows],
    )


def _explained(row: Score, chosen: Score | None, why: str) -> ReplicaScore:
    candidate, load = row.candidate, row.candidate.load
    is_chosen = chosen is not None and candidate.replica_id == chosen.candidate.replica_id
    return ReplicaScore(
        replica_id=candidate.replica_id,
        feed=candidate.feed,
        eligible=row.obstacle is None,
        held_blocks=candidate.held_blocks,
        expected_blocks=candidate.expected_blocks,
        slower_blocks=dict(candidate.slower_blocks),
        uncached_tokens=row.uncached_tokens,
        queued_prefill_tokens=load.queued_prefill_tokens,
        running=load.running,
        waiting=load.waiting,
        expected_ttft_s=row.ttft_s,
        others_s=row.others_s,
        chosen=is_chosen,
        why=why if is_chosen else row.obstacle or _behind(row, chosen),
    )


def _behind(row: Score, chosen: Score | None) -> str:
    if chosen is None or row.cost_s <= chosen.cost_s:
        return "equally good, not chosen"
    if row.ttft_s <= chosen.ttft_s:
        return f"sooner, but others lose {(row.others_s - chosen.others_s) * 1000:.1f} ms"
    return f"{(row.ttft_s - chosen.ttft_s) * 1000:.1f} ms later"
