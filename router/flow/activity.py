"""What the flow of one model's requests shows to people who watch. Pure: reads the flow's state, changes nothing.

The recent prompts are shown as a tree of prefixes, by how many requests went through each. A hash names its whole
prefix, so prompts with a hash in common have all before it in common, too. Like `hottest` it tells prefixes apart in
steps of several blocks.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, groupby

import msgspec

from ..activity import ModelActivity, PrefixNode, RunningRequest
from ..routing.prefix_index import PrefixIndex
from .recent_requests import MAX_TRACE_ID
from .request_flow import RequestFlow
from .request_state import RequestState

#: Running requests that are shown, the oldest first: those are the ones to worry about.
MAX_RUNNING = 24
#: Nodes that are shown.
MAX_NODES = 40
#: Steps of prompts that are looked at, the newest prompts first: this takes about 2 ms on a 2.5 GHz core.
MAX_STEPS = 2048


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


class TreeNode(msgspec.Struct, frozen=True, gc=False):
    """Blocks that follow each other, all of them in the same prompts."""

    parent: int | None  #: place of its parent in the list
    start: int  #: blocks before it
    hashes: Sequence[int]
    requests: int


def hot_tree(prompts: Iterable[Sequence[int]], step: int) -> list[TreeNode]:
    """The nodes with the most requests, parents before their children; of equals, those of the newest prompts first.

    `prompts`: hashes of all full blocks, the newest prompt first. `step`: blocks.
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
    found: dict[int, tuple[int | None, TreeNode]] = {}  #: by the name of the first step: its parent's name, and itself
    for hashes, names in marked:
        parent, start = None, 0
        for count, run in groupby(names, requests.__getitem__):
            first, end = names[start], start + len(list(run))
            found.setdefault(first, (parent, TreeNode(None, start * step, hashes[start * step : end * step], count)))
            parent, start = first, end
    # A child has fewer requests than its parent, so that a parent comes first.
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
        replica=state.replica,
        prompt_tokens=state.prompt_tokens,
        cached_tokens=state.delivered_cached_tokens,
        generated_tokens=state.generated,
    )
