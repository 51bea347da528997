"""One decode step from the request table and back into it: embedding, layers, sampler, write-back.

Its only input besides the table is the slots in `rows`. It allocates only through torch and reads nothing back to the
host, so that a CUDA graph can hold it.
"""

import torch

from ..attention.paged import DecodeRows, PagedAttention
from ..kernels.base import Kernels
from ..models.base import Model
from ..parallel.rank_group import RankGroup
from .request_table import RequestTable


class DecodeStep:
    """Steps of up to `most` rows; a smaller batch uses the front of the buffers."""

    def __init__(
        self,
        model: Model,
        attention: PagedAttention,
        kernels: Kernels,
        table: RequestTable,
        *,
        most: int,
        block_size: int,
        group: RankGroup | None,
    ) -> None:
        device = table.seq_lens.device
        self._model, self._attention, self._kernels, self._table = model, attention, kernels, table
        self._block_size = block_size
        self._group = group
        #: Slots of the rows; 0 behind the last one.
        self.rows = torch.zeros(most, dtype=torch.int64, device=device)
        #: The tokens drawn last; `NO_TOKEN` where the logits were not finite.
        self.tokens = torch.zeros(most, dtype=torch.int64, device=device)
        self._every = torch.arange(most, device=device)

    def run(self, size: int) -> None:
        """Compute and draw one token for each of the first `size` rows."""
        table, rows, tokens = self._table, self.rows[:size], self.tokens[:size]
        starts = table.seq_lens[rows]
        seq_lens = torch.where(rows > 0, starts + 1, 0).int()
        tables, positions = table.block_tables[rows], starts.long()
        blocks = tables.gather(1, (positions // self._block_size)[:, None])[:, 0].long()
        slots = blocks * self._block_size + positions % self._block_size
        self._attention.begin_decode(DecodeRows(torch.where(rows > 0, slots, 0), tables, seq_lens))
        logits = self._model.forward(table.last_tokens[rows], positions, self._attention, self._every[:size])
        if logits is not None:
            self._kernels.sample(logits.float(), table.sampling(rows, seq_lens), tokens)
        if self._group is not None:
            self._group.broadcast(tokens)
        table.last_tokens.index_copy_(0, rows, tokens.clamp(min=0))  # the next step may run on any token
        table.seq_lens.index_copy_(0, rows, seq_lens)
