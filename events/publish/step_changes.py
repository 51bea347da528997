"""The cache changes of one step, passed from the engine's thread to the publisher's thread.

Pure values, and `Mailbox`, the only object that both threads use: bounded and never blocking.

When the mailbox is full, further steps are merged into one `LostSteps` entry. Their batches are never sent (each uses
up a sequence number, so that subscribers notice the gap), but their net effect is kept, so that the publisher's own
record stays exact. The cache's capacity bounds a `LostSteps` entry, however long the publisher's thread is delayed.
"""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, assert_never


class StoredBlocks(NamedTuple):
    """Consecutive blocks of one chain. `tokens` holds the ids of all of them as uint32 little-endian, or is empty."""

    parent: bytes | None
    hashes: tuple[bytes, ...]
    tokens: bytes
    salt: str = ""  #: of a chain's first block: what distinguishes it from other chains of the same tokens
    medium: str = "GPU"  #: GPU: where the engine computes; CPU and DISK: the tiers below


class RemovedBlocks(NamedTuple):
    """Blocks whose last copy in a medium was evicted."""

    hashes: tuple[bytes, ...]
    medium: str = "GPU"


class AllCleared(NamedTuple):
    """The cache was emptied."""


Change = StoredBlocks | RemovedBlocks | AllCleared
Step = list[Change]


def net_changes(step: Step) -> Step:
    """Return changes with the same net effect and coalesced removals: older blocks first, blocks of this step last.

    A reset cancels everything before it. The result is a reset, if there was one, and for each medium at most [removal,
    stores…, removal].
    """
    if len(step) < 2:
        return step
    reset = max((i for i, change in enumerate(step) if isinstance(change, AllCleared)), default=None)
    head: Step = [] if reset is None else [AllCleared()]
    rest = step if reset is None else step[reset + 1 :]
    if not any(isinstance(change, RemovedBlocks) for change in rest):
        return head + rest
    by_medium: dict[str, list[StoredBlocks | RemovedBlocks]] = {}
    for change in rest:
        assert not isinstance(change, AllCleared), "`rest` is what follows the last reset"
        by_medium.setdefault(change.medium, []).append(change)
    for medium, changes in by_medium.items():
        head += _net_in_medium(medium, changes)
    return head


def _net_in_medium(medium: str, changes: Sequence[StoredBlocks | RemovedBlocks]) -> Step:
    before: dict[bytes, None] = {}  # removed, stored before this step
    after: dict[bytes, None] = {}  # removed, stored in this step
    stores: Step = []
    stored: set[bytes] = set()
    for change in changes:
        match change:
            case StoredBlocks(hashes=hashes):
                stores.append(change)
                stored.update(hashes)
                for block in hashes:
                    after.pop(block, None)
            case RemovedBlocks(hashes):
                for block in hashes:
                    (after if block in stored else before)[block] = None
            case _:
                assert_never(change)
    first: Step = [RemovedBlocks(tuple(before), medium)] if before else []
    last: Step = [RemovedBlocks(tuple(after), medium)] if after else []
    return [*first, *stores, *last]


@dataclass(slots=True)
class LostSteps:
    """The net effect of steps that will not be sent."""

    batches: int = 0  #: sequence numbers that the steps use up
    cleared: bool = False
    #: by medium: blocks resident before the first of these steps
    removed: dict[str, dict[bytes, None]] = field(default_factory=dict)
    #: one block each, in storage order
    stored: dict[tuple[str, bytes], StoredBlocks] = field(default_factory=dict)

    def add(self, step: Step) -> None:
        self.batches += 1
        for change in step:
            match change:
                case StoredBlocks(parent, hashes, tokens, salt, medium):
                    stride = len(tokens) // len(hashes) if hashes else 0
                    for i, block in enumerate(hashes):
                        content = tokens[i * stride : (i + 1) * stride]
                        self.stored.setdefault((medium, block), StoredBlocks(parent, (block,), content, salt, medium))
                        parent, salt = block, ""
                case RemovedBlocks(hashes, medium):
                    for block in hashes:
                        # A block stored by these steps was not resident before them, unless already in `removed`.
                        if self.stored.pop((medium, block), None) is None:
                            self.removed.setdefault(medium, {})[block] = None
                case AllCleared():
                    self.cleared = True
                    self.removed.clear()
                    self.stored.clear()
                case _:
                    assert_never(change)

    def changes(self) -> Step:
        head: Step = [AllCleared()] if self.cleared else []
        removed: Step = [RemovedBlocks(tuple(blocks), medium) for medium, blocks in self.removed.items()]
        return [*head, *removed, *self.stored.values()]


class Mailbox:
    """A queue of steps between two threads: `put` never waits, `take` returns None when the queue is empty."""

    __slots__ = ("_limit", "_lock", "_queue", "lost_batches")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._queue: deque[Step | LostSteps] = deque()
        self._lock = threading.Lock()
        #: total number of batches that were never sent
        self.lost_batches = 0

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, step: Step) -> bool:
        """Append one step. Returns False when the queue was full and the step was merged into a `LostSteps` entry."""
        with self._lock:
            if len(self._queue) < self._limit:
                self._queue.append(step)
                return True
            self.lost_batches += 1
            if not isinstance(self._queue[-1], LostSteps):
                self._queue.append(LostSteps())
            tail = self._queue[-1]
            assert isinstance(tail, LostSteps), f"a full mailbox ends in a loss, not in {type(tail).__name__}"
            tail.add(step)
            return False

    def take(self) -> Step | LostSteps | None:
        with self._lock:
            return self._queue.popleft() if self._queue else None
