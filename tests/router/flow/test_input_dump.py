"""Inputs kept, written after an error, and replayed."""

from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec
import pytest

from homing.events.follow.input_log import COUNTED_BYTES, InputLog, logged
from homing.events.follow.subscription import Subscription
from homing.events.wire.cache_events import Stored
from homing.events.wire.dialects import DecodedBatch
from homing.replica.messages import NO_LOGPROBS, Constraint, PositionLogprobs, TokenLogprob, TokenOutput
from homing.router.flow.input_dump import InputDumper
from homing.router.replicas.service import REPLAYED_SETTINGS
from homing.router.routing.policy.expected_ttft import ExpectedTtft

from ..fakes import BLOCK, LIMITS, request_of
from ..replay import Recording, replay_flow, replay_subscription
from .test_request_flow import World

SECRET = "launch code"


class Faulty(ExpectedTtft):
    """Fails when a replica gets its fifth request while it holds a hundred blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, int] = {}
        self.sent: dict[str, int] = {}

    def stored(self, replica: str, blocks: Sequence[int]) -> None:
        self.held[replica] = self.held.get(replica, 0) + len(blocks)

    def booked(self, replica: str, request_id: int, prompt: object) -> None:
        del prompt
        self.sent[replica] = self.sent.get(replica, 0) + 1
        held = self.held.get(replica, 0)
        assert held < 100 or self.sent[replica] < 5, f"request {request_id} is too much for {replica} with {held}"


def drive(world: World, folder: Path) -> Path:
    """Random requests until the bug shows; returns the file that was written."""
    written: list[Path | None] = []
    settings = msgspec.to_builtins(world.flow._settings)
    about = {
        "router_id": "me",
        "block_size": BLOCK,
        "limits": LIMITS,
        "settings": {name: settings[name] for name in REPLAYED_SETTINGS} | {"replica_silence_s": 1e9},
    }
    dumper = InputDumper(folder)
    world.flow.inputs.on_error = lambda inputs, name, error: written.append(
        dumper.write(inputs, name, error, about, world.flow.hashes_of)
    )
    rng = Random(7)

    def requests() -> None:
        for number in range(500):
            shared = list(range(BLOCK * rng.randrange(1, 12)))
            request = request_of([*shared, *(rng.randrange(1000) for _ in range(40))], seed=number, salt=b"pepper")
            world.submit(msgspec.structs.replace(request, session=SECRET, chat=SECRET.encode()))
            for name in world.replicas:
                if rng.random() < 0.7:
                    world.step(name)
            world.wait(0.01)

    with pytest.raises(AssertionError, match="too much"):
        requests()
    assert len(written) == 1
    assert written[0] is not None
    return written[0]


def test_an_error_in_the_flow_can_be_replayed_from_what_was_kept(tmp_path: Path) -> None:
    """The same input leads to the same error, with the same ids, draws and counts, although no prompt was kept."""
    world = World(replicas=0)
    world.placement.policy = Faulty()
    for index in range(3):
        world.join(f"r{index}")

    path = drive(world, tmp_path)

    replayed = replay_flow(path, Faulty())
    head = Recording(path).head
    assert replayed is not None
    assert (replayed[0], f"AssertionError: {replayed[1]}") == (head["input"], head["error"])
    assert replay_flow(path) is None, "without the bug, all inputs pass"


def test_a_dump_has_no_prompts_answers_or_names_of_sessions(tmp_path: Path) -> None:
    """Files of one tenant's prompts must not lie about, nor what would let others find them in a cache."""
    world = World(replicas=0)
    world.placement.policy = Faulty()
    world.join("r0")

    path = drive(world, tmp_path)

    text = path.read_text(encoding="utf-8")
    assert SECRET not in text
    assert "pepper" not in text
    prompts = [args[0] for name, args, _ in Recording(path).inputs if name == "submit"]
    assert {prompt.chat for prompt in prompts} == {bytes(len(SECRET))}
    assert path.stat().st_mode & 0o077 == 0, "others on the machine can read it"


class Machine:
    """Something with inputs."""

    def __init__(self, most: int) -> None:
        self.inputs = InputLog(most)
        self.inputs.begin(lambda: "described")

    @logged(len)
    def few(self, *args: int) -> None:
        """Take a few values."""

    @logged(lambda args: len(args[0]))
    def long(self, data: bytes) -> None:
        """Take a long value."""


def test_a_log_is_bounded_in_inputs_and_bytes() -> None:
    """Long prompts must not fill the memory, and what led to an error is among the last ones."""
    machine = Machine(most=100)
    for number in range(1000):
        machine.few(number)
    start, kept = machine.inputs.kept()
    assert (start, kept[-1]) == ("described", ("few", (999,), {}))
    assert 50 <= len(kept) <= 100

    for _ in range(20):
        machine.long(bytes(40 * COUNTED_BYTES))
    assert 1 <= len(machine.inputs.kept()[1]) <= 4


def test_logprobs_vectors_and_constraints_are_not_kept() -> None:
    """A thousand vectors, or the logprobs of a few echoed prompts, are gigabytes."""
    world, position = World(1), PositionLogprobs(TokenLogprob(1, -0.1), [])
    request_id = world.submit(request_of(list(range(40))))
    wire_id = world.sent("r0").request_id
    values = {"logprobs": [position], "prompt_logprobs": [NO_LOGPROBS] * 40, "embedding": bytes(4096)}
    world.reply("r0", TokenOutput(wire_id, 0, [7], **values))

    (delta,) = world.deltas[request_id]
    assert (delta.logprobs, delta.prompt_logprobs, delta.embedding) == tuple(values.values())
    name, (_, reply, _), _ = world.flow.inputs.recent[-1]
    assert (name, reply.outputs) == ("on_reply", [TokenOutput(wire_id, 0, [7])])

    left, constraint = world.flow.inputs.left, Constraint(kind="regex", source="a" * 3 * COUNTED_BYTES)
    world.submit(request_of(list(range(40)), constraint=constraint))
    assert world.flow.inputs.left == left - 4


def test_the_tokens_of_events_count() -> None:
    """Engines send them with each block, sixteen times what its hash takes."""
    subscription = Subscription()
    subscription.start()
    left = subscription.inputs.left

    subscription.on_batch(1, 0, DecodedBatch(0.0, [Stored(None, [1], token_ids=list(range(1000)))]))

    assert subscription.inputs.left < left - 1000 * 40 // COUNTED_BYTES


def test_a_subscription_can_be_replayed(tmp_path: Path) -> None:
    """Its own state machine, with the same gaps; the tokens of its events are not written."""
    subscription, written = Subscription(), []
    dumper = InputDumper(tmp_path)
    subscription.inputs.on_error = lambda inputs, name, error: written.append(
        dumper.write(inputs, name, error, {}, lambda _: b"")
    )
    subscription.start()
    subscription.on_tick()
    with pytest.raises(TypeError):
        subscription.on_batch(1, "seven", DecodedBatch(0.0, [Stored(None, [1, 2], token_ids=[77_001, 77_002])]))

    (path,) = written
    replayed = replay_subscription(path)
    assert replayed is not None
    assert (replayed[0], type(replayed[1])) == ("on_batch", TypeError)
    assert "77001" not in path.read_text(encoding="utf-8")


def test_only_a_few_files_are_written(tmp_path: Path) -> None:
    """An error that occurs with every request must not fill the disk."""
    dumper = InputDumper(tmp_path, most=2)
    for _ in range(5):
        dumper.write(InputLog(), "report", ValueError("no"), {}, lambda _: b"")
    assert len(list(tmp_path.iterdir())) == 2
