"""Builds the live page's view of one model's request flow. Pure: reads the flow's state, changes nothing.

Recent prompts are shown as a tree of prefixes with the number of requests that used each. A hash identifies its whole
prefix, so prompts that share a hash also share every block before it. Like `HotPrefixes.hottest`, the tree
distinguishes prefixes in steps of several blocks.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, groupby

import msgspec

from ..activity import ModelActivity, PrefixNode, RunningRequest
from ..routing.prefix_index import PrefixIndex
from .recent_requests import MAX_REASON, MAX_TRACE_ID
from .request_flow import RequestFlow
from .request_state import RequestState

#: Running requests to show, oldest first: a stuck request is among the oldest.
MAX_RUNNING = 24
#: Tree nodes to show.
MAX_NODES = 40
#: Prompt steps to examine, newest prompts first; this takes about 2 ms on a 2.5 GHz core.
MAX_STEPS = 2048


def activity_of(
    flow: RequestFlow, model: str, block_size: int, next_evictions: Mapping[str, Sequence[int]]
) -> ModelActivity:
    """The flow's current requests, decisions and prefixes.

    `next_evictions`: wire hashes of the blocks that each replica would evict next.
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


class TreeNode(msgspec.Struct, frozen=True, gc=False):
    """Consecutive blocks that all occur in the same prompts."""

    parent: int | None  #: index of the parent in the list; None: the node starts a prompt
    start: int  #: number of blocks before the node
    hashes: Sequence[int]
    requests: int


def hot_tree(prompts: Iterable[Sequence[int]], step: int) -> list[TreeNode]:
    """The nodes with the most requests, parents before children; ties go to the newest prompts.

    `prompts`: each prompt's hashes of full blocks, newest prompt first. `step`: number of blocks in a step.
    """
    marked = []
    left = MAX_STEPS
    for hashes in prompts:
        names = hashes[step - 1 :: step][:left]
        marked.append((hashes, names))
        left -= len(names)
        if not left:
            break
    requests = Counter(chain.from_iterable(names for _, names in marked))
    found: dict[int, tuple[int | None, TreeNode]] = {}  #: first step's name -> (parent's name, node)
    for hashes, names in marked:
        parent, start = None, 0
        for count, run in groupby(names, requests.__getitem__):
            first, end = names[start], start + len(list(run))
            found.setdefault(first, (parent, TreeNode(None, start * step, hashes[start * step : end * step], count)))
            parent, start = first, end
    # A child has fewer requests than its parent, so the parent sorts first.
    hottest = sorted(found.items(), key=lambda each: -each[1][1].requests)[:MAX_NODES]
    places = {name: place for place, (name, _) in enumerate(hottest)}
    return [
        msgspec.structs.replace(node, parent=None if parent is None else places[parent])
        for _, (parent, node) in hottest
    ]


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
        waits_for=state.waits_for[:MAX_REASON],
        replica=state.replica,
        prompt_tokens=state.prompt_tokens,
        cached_tokens=state.cached_tokens,
        generated_tokens=state.generated,
    )
