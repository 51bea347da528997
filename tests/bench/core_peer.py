"""vLLM's hashing, block pool and events doing the work of core.py's rows, called as vLLM's scheduler calls them.

Needs vLLM's Python files (`make compat`), but no GPU. `tests/events/compat/engine.py` builds the parts.
"""

import importlib.util
import logging
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from time import thread_time_ns
from typing import Any

import msgspec

ALGORITHMS = {"xxh3_128": "xxhash", "sha256": "sha256"}


def engine_module() -> Any:
    """The module tests/events/compat/engine.py, loaded by path because benchmarks run as scripts."""
    path = Path(__file__).parents[1] / "events" / "compat" / "engine.py"
    spec = importlib.util.spec_from_file_location("engine", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spec.loader.exec_module(module)
    return module


class VllmPeer:
    """Each method prepares a run and returns it; the nanoseconds that a run returns leave preparation out."""

    def __init__(self, blocks: int, block_size: int, decoded: int) -> None:
        self.name = f"vLLM {version('vllm').rsplit('.', 1)[0]}"
        self._engine = engine_module()
        self._engine.enable_envs_cache()  # as vLLM's engine does; otherwise each hash in an event reads the environment
        self._blocks, self._block_size, self._decoded = blocks, block_size, decoded
        self._tokens = list(range(blocks * block_size))
        self._hash_blocks = self._engine.hasher("xxhash", block_size)
        self._made = 0

    def _request(self, first_token: int = 0) -> Any:
        self._made += 1
        tokens = [first_token, *self._tokens[1:]]
        return self._engine.request(f"r{self._made}", tokens, self._hash_blocks)

    def _manager(self, extra: int = 1, *, events: bool = False) -> Any:
        return self._engine.manager(self._blocks + extra, self._block_size, events=events)

    def hashing(self, algorithm: str) -> Callable[[], int]:
        hash_blocks = self._engine.hasher(ALGORITHMS[algorithm], self._block_size)
        asked = self._engine.request("unhashed", self._tokens, None)
        return lambda: _time(lambda: hash_blocks(asked))

    def hit(self) -> Callable[[], int]:
        cache, first = self._manager(), self._request()
        self._engine.admit(cache, first)
        cache.free(first)
        # One token more, because the last token of a prompt is never taken from the cache.
        again = self._engine.request("again", [*self._tokens, 1], self._hash_blocks)
        assert cache.get_computed_blocks(again)[1] == len(self._tokens), "not a full hit"
        return lambda: _time(lambda: cache.get_computed_blocks(again))

    def miss(self) -> Callable[[], int]:
        cache, first, other = self._manager(), self._request(), self._request(1)
        self._engine.admit(cache, first)
        cache.free(first)
        return lambda: _time(lambda: cache.get_computed_blocks(other))

    def cold(self, *, events: bool) -> Callable[[], int]:
        cache = self._manager(events=events)

        def run() -> int:
            asked = self._request()
            cache.reset_prefix_cache()
            cache.take_events()
            return _time(lambda: self._live(cache, asked, events=events))

        return run

    def evicting(self, *, events: bool) -> Callable[[], int]:
        cache = self._manager(events=events)
        self._live(cache, self._request(), events=events)

        def run() -> int:
            asked = self._request(self._made)
            return _time(lambda: self._live(cache, asked, events=events))

        return run

    def _live(self, cache: Any, asked: Any, *, events: bool) -> None:
        self._engine.admit(cache, asked)
        cache.free(asked)
        if events:
            cache.take_events()

    def _batches(self) -> tuple[Any, Any]:
        """The event batches that vLLM publishes for storing a prompt and for evicting it."""
        cache = self._manager(events=True)
        batch = self._engine.KVEventBatch
        first, second = self._request(), self._request(1)
        self._live(cache, first, events=False)
        stored = batch(ts=1.0, events=cache.take_events(), data_parallel_rank=0)
        self._live(cache, second, events=False)
        removals = [event for event in cache.take_events() if type(event).__name__ == "BlockRemoved"]
        return stored, batch(ts=1.0, events=removals, data_parallel_rank=0)

    def encoding(self) -> Callable[[], int]:
        stored, _ = self._batches()
        encoder = msgspec.msgpack.Encoder()
        return lambda: _time(lambda: encoder.encode(stored))

    def bytes_per_block(self) -> tuple[float, float]:
        stored, removed = (len(msgspec.msgpack.encode(batch)) / self._blocks for batch in self._batches())
        return stored, removed

    def decoding(self) -> Callable[[], int]:
        cache = self._manager(self._decoded)

        def run() -> int:
            asked = self._request()
            self._engine.admit(cache, asked)
            spent = _time(lambda: self._decode(cache, asked))
            cache.free(asked)
            cache.reset_prefix_cache()
            return spent

        return run

    def _decode(self, cache: Any, asked: Any) -> None:
        for token in range(self._decoded):
            asked.append_output_token_ids(token)
            assert cache.allocate_slots(asked, 1) is not None
            asked.num_computed_tokens += 1


def _time(work: Callable[[], object]) -> int:
    begin = thread_time_ns()
    work()
    return thread_time_ns() - begin
