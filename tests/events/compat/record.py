"""Record another engine's own event stream as a fixture for the tests that run without that engine.

    python tests/events/compat/record.py vllm|sglang OUT.jsonl [--bytes] [--engine]

Requires that engine's package (see the README of the fixtures). The first line names package and version; each further
line is one message as a SUB or DEALER socket received it, with the events that the engine was given. `--engine` records
vLLM's block pool at work instead of the scenario, `--bytes` makes hashes 32 bytes long.
"""

import argparse
import importlib
import importlib.util
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import zmq

MODULES = {"vllm": "vllm.distributed.kv_events", "sglang": "sglang.srt.disaggregation.kv_events"}
END = b"\xff" * 8


def neighbour(name: str) -> ModuleType:
    """Import a module of this folder: the recorder runs as a script, possibly without homing and pytest."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def as_bytes(value: int) -> bytes:
    """A hash of SHA-256's size whose last 8 bytes are `value`."""
    return b"\xaa" * 24 + value.to_bytes(8, "big")


def with_bytes(event: Mapping[str, Any]) -> dict[str, Any]:
    """The event with its hashes converted to bytes."""
    changed = dict(event)
    for name in event.keys() & {"block_hashes", "parent_block_hash"}:
        value = event[name]
        changed[name] = [as_bytes(v) for v in value] if isinstance(value, list) else value and as_bytes(value)
    return changed


def struct_of(module: Any, event: Mapping[str, Any]) -> Any:
    """The engine's own struct, without fields that this version does not have."""
    kind = getattr(module, event["type"])
    if event.get("cache_salt") and hasattr(module, "BlockStoredWithMetadata"):
        kind = module.BlockStoredWithMetadata
        event = {**event, "metadata": module.BlockStoredMetadata(cache_salt=event["cache_salt"])}
    return kind(**{name: value for name, value in event.items() if name in kind.__struct_fields__})


def batches(module: Any, *, bytes_hashes: bool) -> Iterator[tuple[str, Any, None]]:
    """The scenario as the engine's structs."""
    for number, (name, events) in enumerate(neighbour("scenario").SCENARIO.items()):
        spelled = map(with_bytes, events) if bytes_hashes else events
        yield name, module.KVEventBatch(ts=1000.0 + number, events=[struct_of(module, e) for e in spelled]), None


def said(batch: Any) -> dict[str, Any]:
    """A batch's content as JSON types; bytes become hex digits with the prefix `0x`."""
    events = [
        {"type": type(event).__struct_config__.tag} | {name: getattr(event, name) for name in event.__struct_fields__}
        for event in batch.events
    ]
    rank = batch.data_parallel_rank if hasattr(batch, "data_parallel_rank") else batch.attn_dp_rank
    return {"ts": batch.ts, "rank": rank, "events": _plain(events)}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return "0x" + value.hex()
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


class Recorder:
    """An engine's publisher, with a SUB and a DEALER socket that receive its messages."""

    def __init__(self, module: Any, folder: Path) -> None:
        events, replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        rank = "attn_dp_rank" if module.__name__.startswith("sglang") else "data_parallel_rank"
        self.publisher = module.ZmqEventPublisher(
            **{rank: 0}, endpoint=events, replay_endpoint=replay, topic="kv-events"
        )
        self._context = zmq.Context()
        self._sub, self._dealer = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        for socket, address in ((self._sub, events), (self._dealer, replay)):
            socket.rcvtimeo = 10_000
            socket.connect(address)
        self._sub.subscribe(b"")
        time.sleep(0.5)  # the subscription takes a moment to reach the publisher

    def live(self, batch: Any) -> Sequence[bytes]:
        """Publish a batch and return the frames that arrive."""
        self.publisher.publish(batch)
        return self._sub.recv_multipart()

    def replayed(self, since: int) -> Iterator[Sequence[bytes]]:
        """The answers to a replay request, including the end marker."""
        self._dealer.send_multipart([b"", since.to_bytes(8, "big")])
        answer: Sequence[bytes] = []
        while END not in answer:
            answer = self._dealer.recv_multipart()
            yield answer

    def close(self) -> None:
        self.publisher.shutdown()
        self._context.destroy(linger=0)


def lines(
    package: str, recorder: Recorder, told: Iterator[tuple[str, Any, list[int] | None]], command: str
) -> Iterator[dict[str, Any]]:
    """The lines of the fixture: origin, live messages, and the answers to one replay request."""
    yield {"package": package, "version": version(package), "command": command}
    for name, batch, cached in told:
        line = {"socket": "events", "name": name, "frames": [frame.hex() for frame in recorder.live(batch)]}
        yield line | {"said": said(batch)} | ({} if cached is None else {"cached": cached})
    for frames in recorder.replayed(2):
        yield {"socket": "replay", "since": 2, "frames": [frame.hex() for frame in frames]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Record another engine's event stream.")
    parser.add_argument("package", choices=MODULES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bytes", action="store_true", help="record hashes as bytes instead of ints")
    parser.add_argument("--engine", action="store_true", help="record vLLM's block pool instead of the scenario")
    options = parser.parse_args()
    module = importlib.import_module(MODULES[options.package])
    told = neighbour("engine").batches() if options.engine else batches(module, bytes_hashes=options.bytes)
    flags = [f"--{flag}" for flag in ("bytes", "engine") if getattr(options, flag)]
    command = " ".join(["record.py", options.package, options.out.name, *flags])
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(module, Path(folder))
        found = [json.dumps(line) for line in lines(options.package, recorder, told, command)]
        recorder.close()
    options.out.write_text("\n".join(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
