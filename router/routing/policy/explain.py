"""A decision for people: its reason in one word, and a table of what counted for each replica."""

from collections.abc import Iterable, Sequence

from ...backend import Explanation, Reason, ReplicaScore
from ..replica_load import ReplicaLoad
from .base import LIVE, Candidate, Decision, Prompt, Score
from .expected_ttft import cost_limit


def regret_tokens(prompt: Prompt, candidates: Sequence[Candidate], decision: Decision) -> int:
    """Tokens that the chosen replica computes but the best holder with a live feed would not have had to."""
    assert decision.row is not None, "nothing was chosen"
    best = max([each.expected_blocks if each.feed is LIVE else 0 for each in candidates])
    cached = min(best * prompt.block_size, prompt.tokens - 1)
    return decision.row.candidate.uncached_tokens(prompt) - (prompt.tokens - cached)


def reason_of(decision: Decision, candidates: Sequence[Candidate], regret: int) -> Reason:
    """The reason of a decision; `regret`: its `regret_tokens`."""
    if decision.row is None:
        return "held"
    if len(candidates) == 1:
        return "only"
    if not decision.weighs_cache:
        return "policy"
    if decision.row.uncached_tokens >= decision.prompt.tokens and not regret:
        return "cold"
    return "load" if regret > 0 or _is_tie(decision.row.candidate.expected_blocks, candidates) else "prefix"


def _is_tie(blocks: int, candidates: Sequence[Candidate]) -> bool:
    """Whether several available replicas have this many blocks of the prompt, so that load decided between them."""
    return sum([each.expected_blocks >= blocks and each.feed is LIVE and each.available for each in candidates]) > 1


def why_none_opens(loads: Iterable[tuple[str, ReplicaLoad]]) -> str:
    """Why none of these replicas takes new requests, in words, as `why_held`."""
    return _grouped([(_closed_by(load), replica) for replica, load in loads])


def _closed_by(load: ReplicaLoad) -> str:
    return "draining" if load.draining else "warming up" if load.warming else "silent"


def why_held(decision: Decision) -> str:
    """Why no replica takes the request now, in words."""
    return _obstacles(decision.table())


def _obstacles(rows: Sequence[Score]) -> str:
    """The obstacle of each replica, as `held: OBSTACLE: REPLICA, REPLICA; OBSTACLE: ...`."""
    return _grouped([(row.obstacle or "not chosen, without an obstacle", row.candidate.replica_id) for row in rows])


def _grouped(obstacles: Iterable[tuple[str, str]]) -> str:
    replicas: dict[str, list[str]] = {}
    for obstacle, replica in obstacles:
        replicas.setdefault(obstacle, []).append(replica)
    if not replicas:
        return "no replica has joined"
    return "held: " + "; ".join(f"{obstacle}: {', '.join(names)}" for obstacle, names in replicas.items())


def explanation_of(decision: Decision) -> Explanation:
    """The table of a decision, recomputed for all candidates."""
    rows, chosen = decision.table(), decision.row
    usable = [row for row in rows if row.obstacle is None]
    why = decision.reason(usable) if chosen is not None else _obstacles(rows)
    candidates = [row.candidate for row in rows]
    regret = regret_tokens(decision.prompt, candidates, decision) if chosen is not None else 0
    limit = cost_limit(min([row.cost_s for row in usable], default=0.0))
    return Explanation(
        policy=decision.policy,
        chosen=chosen.candidate.replica_id if chosen else None,
        reason=reason_of(decision, candidates, regret),
        why=why,
        prompt_tokens=decision.prompt.tokens,
        prompt_blocks=decision.prompt.blocks,
        block_size=decision.prompt.block_size,
        replicas=[_explained(decision.prompt, row, chosen, why, limit) for row in rows],
    )


def _explained(prompt: Prompt, row: Score, chosen: Score | None, why: str, limit: float) -> ReplicaScore:
    """`limit`: costs up to it count as equal."""
    candidate, load = row.candidate, row.candidate.load
    is_chosen = chosen is not None and candidate.replica_id == chosen.candidate.replica_id
    return ReplicaScore(
        replica_id=candidate.replica_id,
        feed=candidate.feed,
        eligible=row.obstacle is None,
        held_blocks=candidate.held_blocks,
        expected_blocks=candidate.expected_blocks,
        slower_blocks=dict(candidate.slower_blocks),
        loading_s=candidate.loading_s(prompt),
        uncached_tokens=row.uncached_tokens,
        queued_prefill_tokens=load.queued_prefill_tokens,
        running=load.running,
        waiting=load.waiting,
        expected_ttft_s=row.ttft_s,
        others_s=row.others_s,
        chosen=is_chosen,
        why=why if is_chosen else row.obstacle or _behind(row, chosen, limit),
    )


def _behind(row: Score, chosen: Score | None, limit: float) -> str:
    if chosen is None or row.cost_s <= max(limit, chosen.cost_s):
        return "equally good, not chosen"
    if row.ttft_s <= chosen.ttft_s:
        return f"sooner, but other requests would wait {(row.others_s - chosen.others_s) * 1000:.1f} ms longer"
    return f"{(row.ttft_s - chosen.ttft_s) * 1000:.1f} ms later"
