"""A step of decodes and short prompts, padded to a fixed number of tokens, so that a CUDA graph can hold it.

Its inputs are written into tensors that keep their addresses: first the tokens of decodes, then those of prompts, then
padding. Decode and prompt attention both run over all tokens, and each token keeps the result of its own kind.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ..attention.paged import PagedAttention
from ..engine.logit_edits import Move
from ..engine.step_plan import RaggedBatch
from ..models.base import Model

#: Numbers of tokens to pad a step to.
SIZES = (32, 64, 128, 256, 512, 768, 1024, 1536, 2048)
#: Sizes that every model captures.
COMMON_TOKENS = 512
#: Operations that a device does while the host launches a step's kernels one by one: 5 ms at 400 TFLOP/s. A graph of a
#: larger step gains nothing. Calculated, not measured.
LAUNCH_FLOPS = 2e12
#: Maximum number of prompts in a captured step. Those that a step lacks cost an empty program per layer and KV head.
MAX_PROMPTS = 64


def sizes_for(hidden_size: int, layers: int) -> tuple[int, ...]:
    """The sizes to capture. A layer has about 12 weights per squared hidden feature; `hidden_size` 0: not known."""
    flops_per_token = 2 * 12 * hidden_size**2 * layers
    most = max(COMMON_TOKENS, LAUNCH_FLOPS / flops_per_token if flops_per_token else 0)
    return tuple(size for size in SIZES if size <= most)


def leading_decodes(q_lens: list[int]) -> int:
    return next((row for row, count in enumerate(q_lens) if count > 1), len(q_lens))


def fits(batch: RaggedBatch, max_rows: int) -> bool:
    """Whether a captured step can run this batch, which may need at most `max_rows` logits."""
    prompts = len(batch.q_lens) - leading_decodes(batch.q_lens)
    return prompts <= MAX_PROMPTS and len(batch.logits_at) <= max_rows


class MixedStep:
    """Inputs of steps of these `sizes`. Logits of up to `max_rows` tokens are written to `logits`."""

    def __init__(
        self,
        model: Model,
        attention: PagedAttention,
        logits: torch.Tensor | None,
        *,
        sizes: Sequence[int],
        max_rows: int,
        pages: int,
    ) -> None:
        self.sizes = sizes
        device = attention.device
        self._model, self._attention, self._logits, self._max_rows = model, attention, logits, max_rows

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        tokens, rows = sizes[-1], MAX_PROMPTS + 1
        self.token_ids, self._positions, self._slots = (zeros(tokens) for _ in range(3))
        self._logits_at = zeros(max_rows)
        self._lengths, self._tables = zeros(tokens, dtype=torch.int32), zeros(tokens, pages, dtype=torch.int32)
        #: Row 0 represents all decodes and reads only the null block.
        self._prompt_lengths, self._prompt_tables = (
            zeros(rows, dtype=torch.int32),
            zeros(rows, pages, dtype=torch.int32),
        )
        self._first_queries = zeros(rows + 1, dtype=torch.int32)
        self._is_prompt = zeros(tokens, dtype=torch.bool)

    def write(self, batch: RaggedBatch, size: int, move: Move) -> None:
        """Set the inputs of a step that `fits`, padded to `size` tokens."""
        decodes, tokens, rows = leading_decodes(batch.q_lens), len(batch.token_ids), len(batch.q_lens)
        kv_lens = np.asarray(batch.kv_lens, dtype=np.int32)
        wide = np.zeros((5, size), dtype=np.int64)
        wide[:3, :tokens] = batch.token_ids, batch.positions, batch.slots
        wide[3, :decodes] = kv_lens[:decodes]
        wide[4, decodes:tokens] = 1
        inputs = (self.token_ids, self._positions, self._slots, self._lengths, self._is_prompt)
        for target, source in zip(inputs, move(wide), strict=True):
            target[:size].copy_(source)
        prompts = np.zeros((2, MAX_PROMPTS + 2), dtype=np.int32)
        prompts[0, : 1 + rows - decodes] = decodes, *kv_lens[decodes:]
        prompts[1, 1:] = tokens
        prompts[1, 1 : 2 + rows - decodes] = decodes + np.cumsum([0, *batch.q_lens[decodes:]])
        lengths, firsts = move(prompts)
        self._prompt_lengths.copy_(lengths[:-1])
        self._first_queries.copy_(firsts)
        tables, width = move(batch.block_tables), batch.block_tables.shape[1]
        self._tables[:decodes, :width].copy_(tables[:decodes])
        self._prompt_tables[1 : 1 + rows - decodes, :width].copy_(tables[decodes:])
        places = np.zeros(self._max_rows, dtype=np.int64)
        places[: len(batch.logits_at)] = batch.logits_at
        self._logits_at.copy_(move(places))

    def run(self, size: int) -> None:
        """Compute the logits of a step padded to `size` tokens."""
        self._attention.begin_mixed(
            self._slots[:size],
            self._tables[:size],
            self._lengths[:size],
            self._prompt_tables,
            self._prompt_lengths,
            self._first_queries,
            self._is_prompt[:size],
        )
        places = self._logits_at[: min(size, self._max_rows)]
        logits = self._model.forward(self.token_ids[:size], self._positions[:size], self._attention, places)
        if logits is not None:
            assert self._logits is not None, "logits on a rank that draws nothing"
            self._logits[: len(places)].copy_(logits)
