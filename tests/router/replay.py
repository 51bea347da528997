"""Replays a file of inputs that a router wrote after an internal error (router/flow/input_dump.py).

    python -m tests.router.replay FILE

makes the calls again, in order, and prints the error that they lead to. The file has hashes instead of prompts, so the
replay's prompts are made of these hashes, and its hasher reads them back. It is exact if no input was dropped before
the first kept one; otherwise the blocks held and the requests in flight at that time are missing.
"""

import base64
import hashlib
import json
import sys
import traceback
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from homing.events.follow.subscription import Subscription
from homing.kvcache.hashing import HASH_BYTES, TOKEN_BYTES, BlockHash
from homing.router.backend import GenerationRequest, RouterCounters
from homing.router.config import RouterSettings
from homing.router.errors import RouterClosed, RouterError
from homing.router.flow.dispatcher import ServedModel
from homing.router.flow.request_flow import FlowStart, RequestFlow
from homing.router.routing.placement import Placement
from homing.router.routing.policy.base import Policy
from homing.router.routing.policy.registry import make_policy

#: Inputs of the placement that the flow does not pass on.
OF_PLACEMENT = frozenset("set_feed set_adapters stored removed reset stage install computed".split())


class RecordedHasher:
    """Reads each block's hash from its first tokens. Blocks that end with unknown tokens get a hash of their own."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def digest(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()

    def chain(self, root: BlockHash, tokens: bytes) -> list[BlockHash]:
        size, parent, found = self.block_size * TOKEN_BYTES, root, []
        for start in range(0, len(tokens) - size + 1, size):
            named = tokens[start : start + HASH_BYTES]
            parent = BlockHash(named if any(named) else self.digest(parent + tokens[start : start + size]))
            found.append(parent)
        return found


class Recording:
    """The lines of a file as Python values."""

    def __init__(self, path: Path) -> None:
        head, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        self._structs = {each.__name__: each for each in _subclasses(msgspec.Struct)}
        self._enums = {each.__name__: each for each in _subclasses(Enum)}
        self._block_bytes = head.get("block_size", 16) * TOKEN_BYTES
        self.head: dict[str, Any] = {name: self._value(each) for name, each in head.items()}
        self.inputs = [(line["input"], self._value(line["args"]), self._value(line["named"])) for line in lines]

    def _value(self, plain: Any) -> Any:
        match plain:
            case list():
                return [self._value(each) for each in plain]
            case {"bytes": text}:
                return base64.b64decode(text)
            case {"tuple": parts}:
                return tuple(self._value(each) for each in parts)
            case {"set": parts}:
                return frozenset(self._value(each) for each in parts)
            case {"map": pairs}:
                return {self._value(name): self._value(each) for name, each in pairs}
            case {"enum": name, "value": value}:
                return self._enums[name](value)
            case {"hidden": kind, "length": length}:
                return {"bytes": bytes(length), "str": "?" * length}.get(kind, [0] * length)
            case {"object": _}:
                return lambda: RouterClosed("replayed")
            case {"struct": name, "fields": fields}:
                found = {field: self._value(each) for field, each in fields.items()}
                if name == GenerationRequest.__name__:
                    hashes = base64.b64decode(found.pop("block_hashes"))
                    found["token_ids"] = self._prompt(hashes, len(found["token_ids"]))
                return self._structs[name](**found)
            case _:
                return plain

    def _prompt(self, hashes: bytes, size: int) -> bytes:
        blocks = [hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)]
        return b"".join([block.ljust(self._block_bytes, b"\0") for block in blocks]).ljust(size, b"\1")


def replay_flow(path: Path, policy: Policy | None = None) -> tuple[str, Exception] | None:
    """Replay a request flow. Returns the first input that fails, with its error; None: none does.

    `policy`: by default, that of the settings.
    """
    recording = Recording(path)
    head, start = recording.head, recording.head["start"]
    assert isinstance(start, FlowStart)
    settings = RouterSettings(**head["settings"])
    rng = Random()
    rng.setstate(start.draws)
    placement = Placement(
        policy or make_policy(settings.policy),
        router_id=head["router_id"],
        silence_s=settings.replica_silence_s,
        rng=rng,
    )
    flow = RequestFlow(placement, settings, block_size=head["block_size"], counters=RouterCounters())
    flow.continue_ids(start.next_request, start.next_wire)
    model = ServedModel(RecordedHasher(head["block_size"]), BlockHash(bytes(HASH_BYTES)), head["limits"])
    if "adopt" not in [name for name, _, _ in recording.inputs]:
        flow.adopt(model)
    for description, unavailable, feed, report in start.replicas:
        flow.join(description, 0.0, unavailable)
        placement.set_feed(description.replica_id, feed)
        if report is not None:
            flow.report(description.replica_id, report, 0.0)
    for name, args, named in recording.inputs:
        machine = placement if name in OF_PLACEMENT else flow
        if name != "set_hit_rule":  # the engine's own rule is not in the file: the index takes its place
            try:
                getattr(machine, name)(*((model,) if name == "adopt" else args), **named)
            except RouterError:
                continue
            except Exception as error:
                return name, error
    return None


def replay_subscription(path: Path) -> tuple[str, Exception] | None:
    """Replay a subscription to one of homing's own publishers, like `replay_flow`."""
    subscription = Subscription()
    for name, args, named in Recording(path).inputs:
        try:
            getattr(subscription, name)(*args, **named)
        except Exception as error:
            return name, error
    return None


def _subclasses(base: type) -> Iterator[type]:
    for each in base.__subclasses__():
        yield each
        yield from _subclasses(each)


if __name__ == "__main__":
    file = Path(sys.argv[1])
    with file.open(encoding="utf-8") as opened:
        of_flow = "draws" in opened.readline()
    failed = replay_flow(file) if of_flow else replay_subscription(file)
    if failed is None:
        print("no input fails")
    else:
        print(f"input {failed[0]}:")
        traceback.print_exception(failed[1])
