"""Whole steps as CUDA graphs, one per padded size; other devices call the same steps directly.

A captured step is a function without arguments whose tensors keep their addresses; its inputs are written before each
replay. The choice of a batch's size is pure.
"""

import gc
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch


def graph_sizes(max_rows: int) -> list[int]:
    """Batch sizes to capture: densest among small batches, where a padding row costs most in proportion."""
    sizes = [1, 2, 4, *range(8, min(max_rows, 64), 8), *range(64, max_rows, 16), max_rows]
    return sorted({size for size in sizes if size <= max_rows})


def padded_size(rows: int, sizes: Sequence[int]) -> int | None:
    """The smallest captured size that holds this many rows; None if there is none."""
    place = bisect_left(sizes, rows)
    return sizes[place] if place < len(sizes) else None


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect garbage once, then not again while the context is open: a tensor freed during a capture would break it.

    One collection takes 0.2 to 0.3 s in a replica's process (measured on a CPU), and a runner captures about 50 graphs.
    """
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class NotCaptured(Exception):  # noqa: N818
    """A step does something that a graph cannot hold, such as reading a value back. The message is the device's."""


class EagerSteps:
    """Parts of steps by name and size; `replay` calls them."""

    #: Whether replays are so much cheaper than calls that steps with prompts are worth padding, too.
    pads_mixed: ClassVar[bool] = False

    def __init__(self) -> None:
        self._replays: dict[Hashable, Callable[[], None]] = {}

    def capture(self, key: Hashable, run: Callable[[], None]) -> None:
        """Keep `run` for replays. May call it several times now, with any input contents. Raises NotCaptured."""
        self._replays[key] = run

    def replay(self, key: Hashable) -> None:
        self._replays[key]()

    def clear(self) -> None:
        """Free all captured steps and their memory."""
        self._replays.clear()


class CudaGraphs(EagerSteps):
    """Parts of steps as CUDA graphs that share one stream and one memory pool. Not run on a GPU yet.

    torch reuses a pool's memory only for captures on the same stream, and allocates a cuBLAS workspace per stream.
    Captures must run while the garbage collector is paused (`collector_paused`).
    """

    pads_mixed: ClassVar[bool] = True

    def __init__(self, cuda: Any = torch.cuda) -> None:
        """`cuda`: torch.cuda, or a stand-in for tests."""
        super().__init__()
        self._cuda = cuda
        self._stream: Any = None
        self._pool: Any = None

    def capture(self, key: Hashable, run: Callable[[], None]) -> None:
        """Run twice on the capture stream, so that all libraries and kernels are loaded and compiled, then capture."""
        cuda = self._cuda
        stream = self._stream = self._stream or cuda.Stream()
        current = cuda.current_stream()
        stream.wait_stream(current)
        with cuda.stream(stream):
            run()
            run()
        current.wait_stream(stream)
        cuda.synchronize()
        graph = cuda.CUDAGraph()
        try:
            # Another thread of this process (a metrics reader, say) may touch CUDA meanwhile.
            with cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                run()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            cuda.set_stream(current)  # a failed capture leaves its own stream current
            raise NotCaptured(f"{type(error).__name__}: {error}") from error
        self._pool = graph.pool()
        self._replays[key] = graph.replay

    def clear(self) -> None:
        super().clear()
        self._stream = self._pool = None
