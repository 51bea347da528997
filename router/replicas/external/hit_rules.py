"""How much of a prompt an external engine finds in its caches, by its own rules. Pure: blocks in, lengths out.

An engine with several kinds of layers keeps a group of blocks for each kind. A hit must be valid for every group:

    full attention     every block of the prefix
    sliding window     the blocks of the last window before the hit's end (or all from the start, if the hit is shorter)
    Mamba              the single block at the hit's end, which holds the state at that point

Engines extend a hit with blocks that left the GPU for slower memory, by the same rules. They are those of vLLM 0.33
(`single_type_kv_cache_manager.py`, `OffloadingConnector`) and, for one group, of SGLang's hierarchical cache. A group
of any other kind counts as full attention, which never gives a longer hit.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, count
from operator import not_
from typing import NamedTuple

GPU = "GPU"
_FAST_TO_SLOW = (GPU, "CPU CPU_PINNED CPU_TIER1 LMCACHE-L1", "CPU_TIER2", "DISK STORAGE", "EXTERNAL")
#: Media of vLLM, SGLang, Dynamo and LMCache by typical speed; unknown media come last.
_SPEED = {name: speed for speed, names in enumerate(_FAST_TO_SLOW) for name in names.split()}


class Hit(NamedTuple):
    """A prefix that an engine does not have to compute."""

    blocks: int
    slower: tuple[tuple[str, int], ...] = ()  #: part of `blocks` to load from slower memory: medium and number


@dataclass(slots=True, frozen=True)
class GroupRule:
    """The hit rule of one group of layers."""

    kind: str = "full_attention"
    window: int = 0  #: tokens in a sliding window


def rank_of_medium(medium: str) -> tuple[int, str]:
    """Sort key that orders media from fast to slow."""
    return _SPEED.get(medium, len(_SPEED)), medium


@dataclass(slots=True, frozen=True)
class HeldBlocks:
    """The blocks that one group holds."""

    rule: GroupRule
    media: Mapping[str, Collection[int]]  #: by medium: keys of the blocks, each the key at the block's end
    #: by medium: tokens per block if different from the router's; unless it is a multiple of that, there is no hit
    sizes: Mapping[str, int] = field(default_factory=dict)


def longest_hit(keys: Sequence[int], block_size: int, groups: Sequence[HeldBlocks]) -> Hit:
    """The longest prefix of a prompt with these `keys` that all groups hold, looked up from fast to slow memory."""
    media = sorted({medium for group in groups for medium in group.media} | {GPU}, key=rank_of_medium)
    blocks, slower = 0, []
    for place, medium in enumerate(media):
        found = _in_medium(keys, block_size, groups, media[: place + 1], blocks)
        if found > blocks and medium != GPU:
            slower.append((medium, found - blocks))
        blocks = max(blocks, found)
    return Hit(blocks, tuple(slower))


def _in_medium(
    keys: Sequence[int], block_size: int, groups: Sequence[HeldBlocks], media: Sequence[str], before: int
) -> int:
    """The hit length with the last of `media`, given that of the faster ones; shortened until every group agrees."""
    hit = len(keys)
    while True:
        start = hit
        for group in groups:
            size = group.sizes.get(media[-1], block_size)
            factor = size // block_size
            if size % block_size or not factor:
                return 0
            own = keys[factor - 1 : hit : factor]
            hit = factor * _of_group(group, own, size, media, before // factor)
        if hit == start or len(groups) == 1:
            return hit


def _of_group(group: HeldBlocks, keys: Sequence[int], size: int, media: Sequence[str], before: int) -> int:
    held: Collection[int] = group.media.get(media[-1], ())
    faster = [group.media[medium] for medium in media[:-1] if medium in group.media]

    def has(place: int) -> bool:
        return keys[place] in held or (place < before and any(keys[place] in each for each in faster))

    window_blocks = -(-(group.rule.window - 1) // size)
    match group.rule.kind:
        case "mamba":
            return next((place + 1 for place in reversed(range(len(keys))) if has(place)), 0)
        case "sliding_window" if group.rule.window > 1:
            return _last_window(len(keys), window_blocks, has)
        case _:
            missing = map(not_, map(held.__contains__, keys[before:]))
            return min(before, len(keys)) + next(compress(count(), missing), len(keys[before:]))


def _last_window(total: int, window_blocks: int, has: Callable[[int], bool]) -> int:
    """The longest hit whose last `window_blocks` blocks are held, or, if shorter than that, all of its blocks."""
    run = 0
    for place in reversed(range(total)):
        run = run + 1 if has(place) else 0
        if run == window_blocks:
            return place + run
    return run
