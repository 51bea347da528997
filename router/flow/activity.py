"""What the flow of one model's requests shows to people who watch. Pure: reads the flow's state, changes nothing."""

from collections.abc import Mapping, Sequence

from ..activity import ModelActivity, PrefixNode, RunningRequest
from ..routing.prefix_index import PrefixIndex
from .prefix_tree import TreeNode, hot_tree
from .recent_requests import MAX_TRACE_ID
from .request_flow import RequestFlow
from .request_state import RequestState

#: Running requests that are shown, the oldest first: those are the ones to worry about.
MAX_RUNNING = 24


def activity_of(
    flow: RequestFlow, model: str, block_size: int, next_evictions: Mapping[str, Sequence[int]]
) -> ModelActivity:
    """The flow's requests, decisions and prefixes as they are now.

    `next_evictions`: by replica, what it would evict next.
    """
    prompts = flow.hot_prefixes
    doomed = {replica: frozenset(hashes) for replica, hashes in next_evictions.items()}
    index = flow.placement.index
    return ModelActivity(
        model=model,
        block_size=block_size,
        prefixes=[_prefix(node, index, doomed) for node in hot_tree(prompts.newest(), prompts.step)],
        routed=flow.recent.routed(),
        running=[_running(each) for each in flow.oldest(MAX_RUNNING)],
        failed=flow.recent.failed(),
        next_evictions={replica: tuple(hashes) for replica, hashes in next_evictions.items()},
    )


def _prefix(node: TreeNode, index: PrefixIndex, doomed: Mapping[str, frozenset[int]]) -> PrefixNode:
    gone = {replica: len(hashes.intersection(node.hashes)) for replica, hashes in doomed.items()}
    return PrefixNode(
        parent=node.parent,
        last_hash=node.hashes[-1],
        start=node.start,
        blocks=len(node.hashes),
        requests=node.requests,
        held=index.holders(node.hashes),
        evicted_next={replica: blocks for replica, blocks in gone.items() if blocks},
    )


def _running(state: RequestState) -> RunningRequest:
    return RunningRequest(
        arrived=state.arrived,
        trace_id=state.request.trace_id[:MAX_TRACE_ID],
        tenant=state.request.tenant,
        state=state.phase.value,
        replica=state.replica,
        prompt_tokens=state.prompt_tokens,
        cached_tokens=state.delivered_cached_tokens,
        generated_tokens=state.generated,
    )
