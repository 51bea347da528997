"""Decode steps on a CPU, recorded by shape and run again on other rows. Knows nothing of requests.

A shape is recorded when it comes for the second time: many come once, as rows join and leave. What cannot be recorded
runs as it would without this, and the log says why.
"""

import logging
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..attention.base import Batch
from ..engine.step_plan import RaggedBatch
from ..kernels.cpu.runtime.call_recording import Arena, NotRecorded, Program, record
from ..models.layers import FEW_ROWS

log = logging.getLogger(__name__)

Forward = Callable[[Batch], torch.Tensor]

#: Shapes to remember: batch sizes, some of them with tables of two or three widths.
MOST_SHAPES = 256
#: Pages of the narrowest tables.
LEAST_PAGES = 16
#: What the log tells who wants programs.
REMEDY = "dtype bfloat16 on a processor with avx512_bf16, model_provider native, quantization none"


@dataclass(slots=True, frozen=True)
class Shape:
    """What two steps must have in common."""

    rows: int
    pages: int  #: of the block tables, rounded up to a power of two
    threads: int


def decode_shape(batch: RaggedBatch, threads: int) -> Shape | None:
    """The shape of a step in which each row computes one token and wants its logits; None: it is no such step."""
    rows = len(batch.q_lens)
    if not rows or len(batch.token_ids) != rows or len(batch.logits_at) != rows or batch.copied_slots.size:
        return None
    pages = max(LEAST_PAGES, batch.block_tables.shape[1])
    return Shape(rows, 1 << (pages - 1).bit_length(), threads)


class DecodePrograms:
    """The programs of one runner."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._arena = Arena()
        #: None: came once. The shape that was used last stands last.
        self._programs: OrderedDict[Shape, _Recorded | None] = OrderedDict()
        self._most_rows: float = math.inf

    def run(self, batch: RaggedBatch) -> torch.Tensor | None:
        """The logits [rows, vocab], to be read before the next step; None: the step is none of these."""
        shape = decode_shape(batch, torch.get_num_threads())
        if shape is None or shape.rows > self._most_rows:
            return None
        found = self._programs.get(shape) or self._second(shape, batch)
        if found is None:
            return None
        self._programs.move_to_end(shape)
        return found.run(batch)

    def _second(self, shape: Shape, batch: RaggedBatch) -> "_Recorded | None":
        """Record it, unless it comes for the first time."""
        if shape not in self._programs:
            self._programs[shape] = None
            if len(self._programs) > MOST_SHAPES:
                self._programs.popitem(last=False)
            return None
        try:
            self._programs[shape] = _Recorded(shape, batch, self._arena, self._forward)
        except NotRecorded as error:
            log.info("decode_programs_unusable rows=%d reason=%r remedy=%r", shape.rows, str(error), REMEDY)
            self._give_up(shape.rows)
            return None
        return self._programs[shape]

    def _give_up(self, rows: int) -> None:
        """So many rows and more, and what only `FEW_ROWS` have kernels of ours for on any processor."""
        self._most_rows = min(rows - 1, FEW_ROWS)
        for shape in [shape for shape in self._programs if shape.rows > self._most_rows]:
            del self._programs[shape]


class _Recorded:
    """A program, and the tensors that it reads a step's rows from."""

    def __init__(self, shape: Shape, batch: RaggedBatch, arena: Arena, forward: Forward) -> None:
        self._batch = static = _batch_of(shape)
        self._set(batch)
        self._program: Program = record(arena, lambda: forward(static))

    def run(self, batch: RaggedBatch) -> torch.Tensor:
        self._set(batch)
        return self._program.run()

    def _set(self, batch: RaggedBatch) -> None:
        static = self._batch
        static.token_ids.numpy()[:] = batch.token_ids
        static.positions.numpy()[:] = batch.positions
        static.slots.numpy()[:] = batch.slots
        static.seq_lens.numpy()[:] = batch.kv_lens
        static.logits_at.numpy()[:] = batch.logits_at
        static.block_tables.numpy()[:, : batch.block_tables.shape[1]] = batch.block_tables


def _batch_of(shape: Shape) -> Batch:
    """Rows of this shape, as yet of zeros. Lengths on the host steer nothing in a step of decodes alone."""
    rows = shape.rows
    token_ids, positions, slots, logits_at = (torch.zeros(rows, dtype=torch.int64) for _ in range(4))
    return Batch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        q_lens=[1] * rows,
        kv_lens=[1] * rows,
        seq_lens=torch.zeros(rows, dtype=torch.int32),
        block_tables=torch.zeros(rows, shape.pages, dtype=torch.int32),
        logits_at=logits_at,
        copied_slots=torch.zeros(2, 0, dtype=torch.int64),
    )
