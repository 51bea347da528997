"""Decode steps on a CPU, captured by shape and replayed with other rows. Independent of requests.

A shape is captured when it occurs for the second time, since many occur only once, as rows join and leave. A step that
cannot be captured runs eagerly, and the log says why.
"""

import logging
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..attention.paged import Batch
from ..engine.step_plan import RaggedBatch
from ..kernels.cpu.runtime.call_recording import Arena, CallRecording, NotRecorded, record
from ..models.layers import few_rows

log = logging.getLogger(__name__)

Forward = Callable[[Batch], torch.Tensor | None]

#: Number of shapes to keep: one per batch size, and for some sizes two or three table widths.
MAX_SHAPES = 256
#: Width of the narrowest block tables, in pages.
MIN_PAGES = 16
#: Steps of so many rows are tried after larger ones could not be captured, where all use the same products.
FEW_ROWS = 2


@dataclass(slots=True, frozen=True)
class DecodeShape:
    rows: int
    pages: int  #: width of the block tables, rounded up to a power of two
    threads: int


def decode_shape(batch: RaggedBatch, threads: int) -> DecodeShape | None:
    """The shape of a step in which each row computes one token and returns its logits; None for any other step."""
    rows = len(batch.q_lens)
    if not rows or len(batch.token_ids) != rows or len(batch.logits_at) != rows or batch.copied_slots.size:
        return None
    pages = max(MIN_PAGES, batch.block_tables.shape[1])
    return DecodeShape(rows, 1 << (pages - 1).bit_length(), threads)


class CapturedSteps:
    def __init__(self, forward: Forward) -> None:
        """`forward` computes a batch's logits; this is the only rank."""
        self._forward = forward
        self._arena = Arena()
        #: By shape, most recently used last; None for a shape that occurred only once.
        self._steps: OrderedDict[DecodeShape, _CapturedStep | None] = OrderedDict()
        self._max_rows: float = math.inf

    def run(self, batch: RaggedBatch) -> torch.Tensor | None:
        """The logits [rows, vocab], valid until the next step; None if this batch has no captured step."""
        shape = decode_shape(batch, torch.get_num_threads())
        if shape is None or shape.rows > self._max_rows:
            return None
        step = self._steps.get(shape) or self._capture_second(shape, batch)
        if step is None:
            return None
        self._steps.move_to_end(shape)
        return step.run(batch)

    def _capture_second(self, shape: DecodeShape, batch: RaggedBatch) -> "_CapturedStep | None":
        """Capture the step, unless its shape occurs for the first time or cannot be captured."""
        if shape not in self._steps:
            self._steps[shape] = None
            if len(self._steps) > MAX_SHAPES:
                self._steps.popitem(last=False)
            return None
        try:
            step = self._steps[shape] = _CapturedStep(shape, batch, self._arena, self._forward)
        except NotRecorded as error:
            log.info("captured_steps_unusable rows=%d reason=%r", shape.rows, str(error))
            # No step with this many rows or more can be captured. Those of a few rows may use other kernels.
            few = few_rows()
            self._max_rows = min(shape.rows - 1, FEW_ROWS if few == math.inf else few)
            for larger in [each for each in self._steps if each.rows > self._max_rows]:
                del self._steps[larger]
            return None
        return step


class _CapturedStep:
    """A recording of one step's kernel calls, and the tensors that they read its rows from."""

    def __init__(self, shape: DecodeShape, batch: RaggedBatch, arena: Arena, forward: Forward) -> None:
        rows = shape.rows
        token_ids, positions, slots, logits_at = (torch.zeros(rows, dtype=torch.int64) for _ in range(4))
        self._batch = Batch(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            q_lens=[1] * rows,
            kv_lens=[1] * rows,  # these host values are unused in a step of decodes only
            seq_lens=torch.zeros(rows, dtype=torch.int32),
            block_tables=torch.zeros(rows, shape.pages, dtype=torch.int32),
            logits_at=logits_at,
            copied_slots=torch.zeros(2, 0, dtype=torch.int64),
        )
        self._set(batch)

        def step() -> torch.Tensor:
            logits = forward(self._batch)
            assert logits is not None, "the only rank has the logits"
            return logits

        self._recording: CallRecording = record(arena, step)

    def run(self, batch: RaggedBatch) -> torch.Tensor:
        self._set(batch)
        return self._recording.run()

    def _set(self, batch: RaggedBatch) -> None:
        static = self._batch
        static.token_ids.numpy()[:] = batch.token_ids
        static.positions.numpy()[:] = batch.positions
        static.slots.numpy()[:] = batch.slots
        static.seq_lens.numpy()[:] = batch.kv_lens
        static.logits_at.numpy()[:] = batch.logits_at
        static.block_tables.numpy()[:, : batch.block_tables.shape[1]] = batch.block_tables
