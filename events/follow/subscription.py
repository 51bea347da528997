"""Follows one publisher's stream: a pure state machine, messages in, instructions out.

It has no sockets and no clock (time is counted in ticks), and does not depend on how the applied events are used.

`Apply` is returned only for the batch that directly follows the last applied batch or reset, within one epoch of the
publisher. A gap is closed by a replay if the history reaches back far enough, otherwise by a snapshot. Batches that
arrive meanwhile wait in a bounded buffer; if it overflows, that is another gap, repaired in the same way.

    SYNCING   a replay or snapshot was requested or will be, or nothing is known yet
    LIVE      every batch up to the newest known one is applied
    STALE     nothing was received for `silent_ticks`, or the connection is lost

Publishers without a snapshot socket (vLLM, SGLang) are followed by replay alone, from number 0 at the start and after a
reconnect. If their history does not reach back that far, the set starts empty: it then holds some of the publisher's
blocks and no others, and `exact` is False. They have no epoch either; a restart shows as a sequence number that falls
while the time advances. Nor do they send heartbeats: while one is quiet, it is asked for a replay of what follows. The
end of that replay proves that the publisher is alive and that no final batch was lost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import NamedTuple

from ..wire.cache_events import CacheEvent, Cleared, Stored
from ..wire.dialects import DecodedBatch
from ..wire.messages import Heartbeat, LoadReport, SnapshotBlock, SnapshotChunk
from .block_set import CacheMirror, Digest
from .input_log import InputLog, logged
from .residency import Residency, SetResidency


class FeedStatus(StrEnum):
    """State of a publisher's stream. Only LIVE means that the applied blocks are those that the publisher holds."""

    SYNCING = "syncing"
    LIVE = "live"
    STALE = "stale"
    APPROXIMATE = "approximate"  #: set by routers: there is no stream, only a record of what was sent to the engine


@dataclass(slots=True, frozen=True)
class RequestReplay:
    since: int


@dataclass(slots=True, frozen=True)
class RequestSnapshot:
    """Request the whole resident set."""


@dataclass(slots=True, frozen=True)
class Apply:
    """Apply the events of batch `seq`, the next in order."""

    seq: int
    ts: float
    events: Sequence[CacheEvent]
    rank: int | None = None  #: data-parallel rank of the batch


@dataclass(slots=True, frozen=True)
class Reset:
    """Hold exactly these blocks (parents first), as of `seq`, instead of everything applied before.

    `blocks` are those in the pool, empty if the feed's own `blocks` hold them already.
    """

    epoch: int | None
    seq: int | None
    blocks: Sequence[SnapshotBlock]
    tiers: Mapping[str, Sequence[SnapshotBlock]] = field(default_factory=dict)  #: blocks in tiers, by medium


@dataclass(slots=True, frozen=True)
class SetStatus:
    status: FeedStatus


@dataclass(slots=True, frozen=True)
class ForwardLoad:
    """Pass on a load report that is not from an earlier epoch."""

    report: LoadReport


@dataclass(slots=True, frozen=True)
class DigestMismatch:
    """A heartbeat's digest differs from that of the applied blocks; a snapshot is requested after a pause."""

    in_a_row: int  #: 1 plus the number of preceding snapshots that did not make the digests agree
    pause_ticks: int


Instruction = RequestReplay | RequestSnapshot | Apply | Reset | SetStatus | ForwardLoad | DigestMismatch


@dataclass(slots=True, frozen=True, kw_only=True)
class FeedOptions:
    """The services that a publisher offers, and the subscriber's limits."""

    replay: bool = True
    snapshot: bool = True
    heartbeats: bool = True
    #: ticks without any message after which a publisher with heartbeats, or one that answers replays, is STALE
    silent_ticks: int = 10
    #: ticks without any message after which a publisher without heartbeats is asked for a replay of what follows
    poll_ticks: int = 3
    #: ticks without progress after which a request is repeated
    answer_ticks: int = 10
    #: longest pause between snapshot requests while snapshots do not make the digests agree
    max_pause_ticks: int = 600
    #: maximum number of replays requested for one gap
    replay_attempts: int = 3
    #: batches that may wait behind a gap; about 10 MB at 8 blocks each
    buffer_batches: int = 10_000


@dataclass(slots=True)
class Counters:
    """Totals of detected and repaired faults."""

    gaps: int = 0  #: gaps detected
    snapshots: int = 0  #: snapshots requested
    overruns: int = 0  #: times the buffer was full and was emptied


class Cursor(NamedTuple):
    """A subscriber's position: `expected` is the next number of `epoch`, or None while the position is unknown."""

    epoch: int | None = None
    expected: int | None = None


class _Waiting(Enum):
    NOTHING = 0
    REPLAY = 1
    SNAPSHOT = 2


#: Ticks for which an earlier epoch is remembered, so that its late messages are not mistaken for a newer one's. Not
#: forever: epochs have no order, so the epoch we consider the earlier one might be the live one.
_RETIRED_TICKS = 20
#: Ticks by which batches on the events socket may lag behind a heartbeat on the state socket before it counts as a gap.
_BEAT_GRACE_TICKS = 2


#: Inputs that each subscription keeps.
MAX_INPUTS = 100


def tier_digests(beat: Heartbeat) -> dict[str, Digest]:
    """The digests of the blocks in tiers, by medium."""
    return {each.medium: Digest(each.blocks, each.digest) for each in beat.tiers if each.blocks}


def _batch_bytes(args: tuple[int | None, int, DecodedBatch]) -> int:
    return sum([_event_bytes(each) for each in args[2].events])


def _event_bytes(event: CacheEvent) -> int:
    if isinstance(event, Cleared):
        return 0
    return 40 * (len(event.hashes) + (len(event.token_ids) if isinstance(event, Stored) else 0))


def _chunk_bytes(args: tuple[SnapshotChunk]) -> int:
    parts = (args[0].blocks, *args[0].tiers.values())
    return sum([256 + 40 * len(each.token_ids) for blocks in parts for each in blocks])


class Subscription:
    """Follows one publisher. Every `on_…` method returns instructions, to be carried out in order."""

    def __init__(self, options: FeedOptions | None = None, residency: Residency | None = None) -> None:
        """`residency`: where the held blocks are stored; by default, a set owned by this subscription."""
        self._options = options or FeedOptions()
        self._residency: Residency = residency or SetResidency(CacheMirror())
        #: Current epoch and next number.
        self.cursor = Cursor()
        self._buffer: dict[int, DecodedBatch] = {}
        self._newest_buffered = -1  # the newest buffered number, even if the buffer was emptied since
        self._waiting = _Waiting.NOTHING
        self._waited_ticks = 0
        self._attempts = 0
        self._replay_from = 0  # the first number of the requested replay
        self._replay_to = -1  # the newest number known when it was requested
        self._staged: tuple[int, int | None, int] | None = None  # epoch, number and index of the last staged chunk
        self._beat: Heartbeat | None = None  # a heartbeat ahead of our position, compared when we reach it
        self._beat_ticks = 0
        self._mismatches = 0  # `DigestMismatch` instructions in a row
        self._pause_ticks = 0  # ticks left until the next snapshot request after a differing digest; 0: none planned
        self._retired: dict[int, int] = {}  # epoch -> ticks left
        self.last_ts = float("-inf")  #: the newest timestamp of all batches applied since the index was last emptied
        self._quiet_ticks = 0
        self._silent = False
        self._ever_received = False  # whether any message was ever received
        self._answers = False  # whether the publisher has answered a replay request
        #: The status in the last `SetStatus`; SYNCING before the first.
        self.status = FeedStatus.SYNCING
        self._out: list[Instruction] = []
        self.exact = True
        self.counters = Counters()
        self.inputs = InputLog(MAX_INPUTS)

    @property
    def digest(self) -> Digest:
        """Digest of the blocks held in the pool according to the applied events."""
        return self._residency.digest

    def agrees(self, tiers: Mapping[str, Digest]) -> bool:
        """Whether these are the digests of the blocks held in tiers, by medium, as far as tiers are followed."""
        return self._residency.agrees(tiers)

    @property
    def silent(self) -> bool:
        """Whether nothing is being received, or was ever received."""
        return self._silent or not self._ever_received

    # Messages and time

    @logged()
    def start(self) -> list[Instruction]:
        """Request the full state. Call it when the sockets connect, or when the user of this object lost messages."""
        self._begin()
        return self._done()

    @logged(_batch_bytes)
    def on_batch(self, epoch: int | None, seq: int, batch: DecodedBatch) -> list[Instruction]:
        return self._on_batch(epoch, seq, batch)

    def _on_batch(self, epoch: int | None, seq: int, batch: DecodedBatch) -> list[Instruction]:
        self._note_message()
        # Fast path for the usual case, at half the cost: with no request pending, the buffer is empty.
        if self.cursor == (epoch, seq) and self._waiting is _Waiting.NOTHING:
            self._apply(seq, batch)
        else:
            self._accept(epoch, seq, batch)
        return self._done()

    @logged(_batch_bytes)
    def on_replayed(self, epoch: int | None, seq: int, batch: DecodedBatch) -> list[Instruction]:
        self._waited_ticks = 0
        return self._on_batch(epoch, seq, batch)

    @logged()
    def on_unreadable(self, epoch: int | None, seq: int) -> list[Instruction]:
        """Batch `seq` cannot be read, now or ever: it is not requested again, and what it would change is unknown."""
        self._note_message()
        if epoch not in self._retired and (self.cursor.expected is None or seq >= self.cursor.expected):
            if self._options.snapshot:
                if self._waiting is not _Waiting.SNAPSHOT:
                    self._request_snapshot()
            else:
                self._buffer = {held: batch for held, batch in self._buffer.items() if held > seq}
                self._restart_at(seq + 1)
                self._advance()
        return self._done()

    @logged()
    def on_replay_end(self) -> list[Instruction]:
        self._note_message()
        self._answers = True
        if self._waiting is _Waiting.REPLAY:
            self._end_replay()
        return self._done()

    @logged(_chunk_bytes)
    def on_chunk(self, chunk: SnapshotChunk) -> list[Instruction]:
        self._note_message()
        # Accept another epoch only while we know none: a late answer must not take us back to an earlier epoch.
        expected = self.cursor.epoch is None or chunk.epoch == self.cursor.epoch
        if self._waiting is _Waiting.SNAPSHOT and expected:
            self._waited_ticks = 0
            self._collect(chunk)
        return self._done()

    @logged()
    def on_heartbeat(self, beat: Heartbeat) -> list[Instruction]:
        """Compare our blocks with a heartbeat's digest, now or when we reach its position."""
        self._note_message()
        if beat.epoch in self._retired:
            return self._done()
        if beat.epoch != self.cursor.epoch:
            self._enter(beat.epoch)
        # One at a time: if a newer heartbeat replaced an unchecked one, none would ever be checked under load.
        if self._beat is None and self._waiting is not _Waiting.SNAPSHOT:
            self._beat, self._beat_ticks = beat, 0
            self._check_beat()
        return self._done()

    @logged()
    def on_load(self, report: LoadReport) -> list[Instruction]:
        self._note_message()
        if report.epoch not in self._retired:
            self._out.append(ForwardLoad(report))
        return self._done()

    @logged()
    def on_tick(self) -> list[Instruction]:
        self._quiet_ticks += 1
        self._retired = {epoch: ticks - 1 for epoch, ticks in self._retired.items() if ticks > 1}
        if (self._options.heartbeats or self._answers) and self._quiet_ticks >= self._options.silent_ticks:
            self._silent = True
        self._poll()
        if self._waiting is not _Waiting.NOTHING:
            self._wait_on()
        elif self._beat is not None:
            self._beat_ticks += 1
            if self._beat_ticks >= _BEAT_GRACE_TICKS:
                self._open_gap()
        if self._pause_ticks:
            self._pause_ticks -= 1
            if not self._pause_ticks:
                self._request_snapshot()
        return self._done()

    def _poll(self) -> None:
        quiet, expected = self._quiet_ticks % self._options.poll_ticks == 0, self.cursor.expected
        polled = self._options.replay and not self._options.heartbeats and self._waiting is _Waiting.NOTHING
        if polled and quiet and expected is not None:
            self._out.append(RequestReplay(expected))

    @logged()
    def on_disconnect(self) -> list[Instruction]:
        """The connection was lost: the state is uncertain until the next message."""
        self._silent = True
        if not self._options.heartbeats:
            # Without heartbeats, a restarted publisher cannot be distinguished from the old one.
            self._begin()
        return self._done()

    # Batches and gaps.

    def _accept(self, epoch: int | None, seq: int, batch: DecodedBatch) -> None:
        if epoch in self._retired:
            return
        if epoch != self.cursor.epoch:
            self._enter(epoch)
            self._accept(epoch, seq, batch)
            return
        expected = self.cursor.expected
        if expected is not None and seq < expected:
            if epoch is not None or batch.ts <= self.last_ts:
                return
            self._begin()
            self._accept(epoch, seq, batch)
            return
        if seq == expected and self._waiting is not _Waiting.SNAPSHOT:
            self._apply(seq, batch)
        else:
            if len(self._buffer) >= self._options.buffer_batches:
                self.counters.overruns += 1
                self._buffer.clear()
            self._buffer[seq] = batch
            self._newest_buffered = max(self._newest_buffered, seq)
        self._advance()

    def _apply(self, seq: int, batch: DecodedBatch) -> None:
        assert seq == self.cursor.expected, f"batch {seq} applied, {self.cursor.expected} is next"
        events = self._residency.apply(batch.events)
        self.cursor = Cursor(self.cursor.epoch, seq + 1)
        if batch.ts > self.last_ts:
            self.last_ts = batch.ts
        self._out.append(Apply(seq, batch.ts, events, batch.data_parallel_rank))
        if self._beat is not None:
            self._check_beat()

    def _advance(self) -> None:
        """Apply buffered batches that are next in order. If some remain behind a gap, start to close it."""
        if self.cursor.expected is None and self._waiting is _Waiting.NOTHING and self._buffer:
            self._restart_at(min(self._buffer))
        while self._waiting is not _Waiting.SNAPSHOT and self.cursor.expected in self._buffer:
            expected = self.cursor.expected
            self._apply(expected, self._buffer.pop(expected))
        if self._waiting is _Waiting.NOTHING and self._newest_buffered >= (self.cursor.expected or 0):
            self._open_gap()

    def _open_gap(self) -> None:
        self.counters.gaps += 1
        self._attempts = 0
        self._request_replay()

    def _known_seq(self) -> int:
        """Return the newest known sequence number, -1 if none."""
        beat = -1 if self._beat is None or self._beat.seq is None else self._beat.seq
        return max(beat, self._newest_buffered)

    # Requests and answers.

    def _begin(self) -> None:
        self._buffer.clear()
        self._newest_buffered = -1
        self._beat = None
        if self._options.snapshot:
            self._request_snapshot()
            return
        self._empty()
        self._attempts = 0
        self._waiting = _Waiting.NOTHING
        if self._options.replay:
            self.cursor = Cursor(self.cursor.epoch, 0)
            self._request_replay()

    def _empty(self) -> None:
        self.exact = True
        self.last_ts = float("-inf")
        self.cursor = Cursor(self.cursor.epoch, None)
        self._residency.replace([])
        self._out.append(Reset(self.cursor.epoch, None, ()))

    def _request_replay(self) -> None:
        expected = self.cursor.expected
        if not self._options.replay or expected is None:
            self._give_up_replay()
            return
        self._attempts += 1
        self._waiting, self._waited_ticks = _Waiting.REPLAY, 0
        self._replay_from, self._replay_to = expected, self._known_seq()
        self._out.append(RequestReplay(expected))

    def _end_replay(self) -> None:
        self._waiting = _Waiting.NOTHING
        expected = self.cursor.expected or 0
        if expected > self._replay_to:
            self._advance()
        elif expected > self._replay_from and self._attempts < self._options.replay_attempts:
            self._request_replay()
        else:
            self._give_up_replay()

    def _give_up_replay(self) -> None:
        """Close a gap that replay cannot close: by a snapshot, or by restarting from the empty set."""
        if self._options.snapshot:
            self._request_snapshot()
            return
        self._waiting = _Waiting.NOTHING
        if self._known_seq() >= (self.cursor.expected or 0):
            self._restart_at(min(self._buffer, default=self._known_seq() + 1))
            self._advance()

    def _restart_at(self, seq: int) -> None:
        """Continue from the empty set with batch `seq`: earlier blocks are missing, but no wrong ones are held."""
        self._empty()
        self.exact = seq == 0
        self._beat = None
        self.cursor = Cursor(self.cursor.epoch, seq)

    def _request_snapshot(self) -> None:
        self.counters.snapshots += 1
        self._waiting, self._waited_ticks = _Waiting.SNAPSHOT, 0
        self._staged = None
        self._beat = None
        self._pause_ticks = 0
        self._out.append(RequestSnapshot())

    def _collect(self, chunk: SnapshotChunk) -> None:
        """Stage a chunk. If it does not follow the one before it, wait for the next request."""
        if chunk.index and self._staged != (chunk.epoch, chunk.seq, chunk.index - 1):
            self._staged = None
            return
        self._residency.stage(chunk.blocks, chunk.tiers, first=not chunk.index)
        self._staged = chunk.epoch, chunk.seq, chunk.index
        if chunk.last:
            self._install(chunk.epoch, chunk.seq)

    def _install(self, epoch: int | None, seq: int | None) -> None:
        staged = self._residency.install()
        expected = 0 if seq is None else seq + 1
        self._staged = None
        self._waiting = _Waiting.NOTHING
        self.cursor = Cursor(epoch, expected)
        self._out.append(Reset(epoch, seq, staged.pool, staged.tiers))
        self._buffer = {held: batch for held, batch in self._buffer.items() if held >= expected}
        self._advance()

    def _wait_on(self) -> None:
        """Count a tick of waiting for an answer, and repeat the request when there is no progress."""
        self._waited_ticks += 1
        if self._waited_ticks < self._options.answer_ticks:
            return
        if self._waiting is _Waiting.SNAPSHOT:
            self._request_snapshot()
        elif self._attempts < self._options.replay_attempts:
            self._request_replay()
        else:
            self._give_up_replay()

    # Epochs, heartbeats and status.

    def _enter(self, epoch: int | None) -> None:
        """Handle a message of an epoch that is neither the current one nor a retired one."""
        if self.cursor.epoch is None and self.cursor.expected in (None, 0):
            self.cursor = Cursor(epoch, self.cursor.expected)  # the first known epoch
            return
        self._mismatches = self._pause_ticks = 0
        if self.cursor.epoch is not None:
            self._retired[self.cursor.epoch] = _RETIRED_TICKS
        self.cursor = Cursor(epoch, None)
        if self._options.snapshot:
            self._empty()  # until the snapshot comes, an empty set is a better guess than the old publisher's blocks
        self._begin()

    def _check_beat(self) -> None:
        """Compare digests if we are at the heartbeat's position. Keep one that is ahead, drop one that is behind."""
        beat, expected = self._beat, self.cursor.expected
        if beat is None or expected is None:
            return
        beat_next = 0 if beat.seq is None else beat.seq + 1
        if beat_next > expected:
            return
        self._beat = None
        if beat_next < expected:
            return
        if self._residency.digest == (beat.blocks, beat.digest) and self._residency.agrees(tier_digests(beat)):
            self._mismatches = self._pause_ticks = 0
            return
        if not self._pause_ticks:
            self._on_mismatch()

    def _on_mismatch(self) -> None:
        """Request a snapshot: at once the first time, then after longer and longer pauses while snapshots do not help.

        Otherwise, a publisher whose digest never agrees would send its whole set after every heartbeat.
        """
        self._mismatches += 1
        pause_ticks = 0
        if self._mismatches > 1:
            pause_ticks = min(
                self._options.answer_ticks << min(self._mismatches - 2, 16), self._options.max_pause_ticks
            )
        self._out.append(DigestMismatch(self._mismatches, pause_ticks))
        if not pause_ticks:
            self._request_snapshot()
            return
        self._pause_ticks = pause_ticks

    def _note_message(self) -> None:
        self._quiet_ticks = 0
        self._silent = False
        self._ever_received = True

    def _done(self) -> list[Instruction]:
        """Return the collected instructions, followed by a status change if there is one."""
        status = self._present_status()
        if status is not self.status:
            self.status = status
            self._out.append(SetStatus(status))
        out, self._out = self._out, []
        return out

    def _present_status(self) -> FeedStatus:
        if self._silent:
            return FeedStatus.STALE
        if (
            not self._ever_received
            and not self._options.heartbeats
            and self._options.replay
            and self._waiting is _Waiting.NOTHING
        ):
            return FeedStatus.STALE  # a replay was requested, but nothing was ever received
        if self._waiting is not _Waiting.NOTHING or self.cursor.expected is None or self._pause_ticks:
            return FeedStatus.SYNCING
        return FeedStatus.LIVE

    def check(self) -> None:
        """Assert the invariants that hold between two messages."""
        expected = self.cursor.expected
        assert len(self._buffer) <= self._options.buffer_batches, f"{len(self._buffer)} batches wait"
        if expected is not None:
            early = [seq for seq in self._buffer if seq < expected]
            assert not early, f"batches {early} wait, {expected} is next"
        if self._waiting is _Waiting.NOTHING:
            assert not self._buffer, f"batches {sorted(self._buffer)} wait without a pending request"
        assert not self._out, f"instructions were left behind: {self._out}"
