"""A whole router in this process over a replica that plays back recorded answers: real sockets, no Ray, no model.

The replica's answer depends on the prompt alone: a prompt with k earlier assistant turns gets turn k of the recording,
token by token. A client may therefore repeat a request or send others in between. The replica also compiles a request's
constraint and refuses to play an answer that violates it, because a real engine could not have written that.
"""

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import msgspec
from tokenizers import Tokenizer

from homing.kvcache.hashing import BlockHash, token_array
from homing.replica.demo import demo_model_path
from homing.replica.messages import Abort, Generate, ModelLimits, Refused, Request, TokenBatch, TokenOutput
from homing.replica.structured.guide import GuideCompiler
from homing.router.config import RouterSettings
from homing.router.replicas.membership import text_digests
from homing.router.replicas.service import RouterService
from homing.router.server import RouterServer

from ..router.fakes import CACHE, SEED, FakeReplica, SocketReplica, parity_of, until

NAME = "scripted"
VOCABULARY, END = 4096, 4
CONTEXT = 262_144
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
ASSISTANT = "<|im_start|>assistant\n"
#: Only to catch hangs.
PATIENCE_S = 120.0


def call(name: str, /, **arguments: object) -> str:
    """A tool call as the model writes it, which is also how the template renders it into the next prompt."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass(frozen=True, slots=True)
class Recording:
    """The model's answers."""

    turns: Sequence[str] = ()  #: by the number of earlier assistant turns
    aside: str | None = None  #: answer to prompts without tools, such as one for a title; None: the turn
    any_constraint: bool = False  #: whether to play answers that violate a constraint

    def answer(self, prompt: str) -> str:
        """The answer to a prompt. Raises AssertionError if nothing was recorded for its turn."""
        if self.aside is not None and "<tools>" not in prompt:
            return self.aside
        turn = prompt.count(ASSISTANT) - 1
        assert 0 <= turn < len(self.turns), f"no answer was recorded for turn {turn}"
        return self.turns[turn]


@dataclass(slots=True)
class _Playing:
    request: Generate
    token_ids: list[int]
    cached: int


@dataclass(slots=True)
class ScriptedReplica(FakeReplica):
    """Plays the recording; each step emits whole answers as outputs of one token."""

    recording: Recording = field(default_factory=Recording)
    tokenizer: Tokenizer | None = None
    guides: GuideCompiler | None = None
    prompts: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    playing: list[_Playing] = field(default_factory=list)

    def take(self, message: Request) -> Refused | None:
        if isinstance(message, Abort):
            self.playing = [each for each in self.playing if each.request.request_id not in message.request_ids]
        if not isinstance(message, Generate):
            return None
        try:
            self.playing.append(self._chosen(message))
        except Exception as error:
            self.faults.append(f"{type(error).__name__}: {error}")
            return Refused(request_id=message.request_id, reason="internal", message=self.faults[-1])
        return None

    def step(self) -> tuple[TokenBatch, list[tuple[bytes | None, list[BlockHash], bytes]]]:
        outputs = [output for each in self.playing for output in self._outputs(each)]
        stored = [blocks for each in self.playing for blocks in self._store(each.request)]
        self.playing = []
        return TokenBatch(step=0, outputs=outputs), stored

    def _chosen(self, message: Generate) -> _Playing:
        assert self.tokenizer is not None
        assert self.guides is not None
        self.highest = message.request_id
        assert self._hashes_fit(message), "block hashes do not match the tokens"
        self.prompts.append(self.tokenizer.decode(list(token_array(message.token_ids)), skip_special_tokens=False))
        text = self.recording.answer(self.prompts[-1])
        ids = [*self.tokenizer.encode(text, add_special_tokens=False).ids, END]
        if message.constraint is not None and not self.recording.any_constraint:
            self.guides.compile(message.constraint, ids)
        cached, _ = self._cached_tokens(message)
        return _Playing(message, ids, cached)

    def _outputs(self, playing: _Playing) -> Iterator[TokenOutput]:
        sampling = playing.request.sampling
        shown = playing.token_ids[: sampling.max_tokens]
        for index, token_id in enumerate(shown):
            stops = token_id == END
            last = "stop" if stops else "length" if index == len(shown) - 1 else None
            yield TokenOutput(
                request_id=playing.request.request_id,
                index=index,
                token_ids=[token_id],
                finish_reason=last,
                cached_tokens=playing.cached if index == 0 else None,
                stop_token_id=token_id if stops else None,
            )


@dataclass
class Engine:
    """The router and its replica, as seen by a test."""

    url: str
    _replica: ScriptedReplica
    _submit: Callable[[Callable[[], object]], object]

    def play(self, *turns: str, aside: str | None = None, any_constraint: bool = False) -> None:
        """Use these answers from now on, and clear the recorded prompts."""

        def change() -> None:
            self._replica.recording = Recording(turns, aside, any_constraint)
            self._replica.prompts, self._replica.faults = [], []

        self._submit(change)

    @property
    def prompts(self) -> list[str]:
        """The prompts received since the last `play`."""
        return self._replica.prompts

    def check(self) -> None:
        """Assert that every request had a recorded answer that its constraint allows."""
        assert not self._replica.faults, self._replica.faults


def model_folder(at: Path) -> Path:
    """Copy the demo model's tokenizer, with a template that renders tools."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(demo_model_path() / name, at / name)
    shutil.copy(TEMPLATE, at / "chat_template.jinja")
    return at


@contextmanager
def scripted(folder: Path, **settings: object) -> Iterator[Engine]:
    """Serve in a thread for the duration of the block. `folder` must be empty; it receives the model."""
    started: Future[tuple[Engine, asyncio.Event]] = Future()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(model_folder(folder), settings, started)))
    thread.start()
    try:
        engine, done = started.result(PATIENCE_S)
        yield engine
        engine._submit(done.set)
    finally:
        thread.join(PATIENCE_S)
    assert not thread.is_alive()


async def _serve(folder: Path, given: Mapping[str, object], started: "Future[tuple[Engine, asyncio.Event]]") -> None:
    try:
        async with asyncio.timeout(None):
            with ExitStack() as stack:
                await _run(folder, given, started, stack)
    except BaseException as error:
        if not started.done():
            started.set_exception(error)
            return
        raise


async def _run(
    folder: Path, given: Mapping[str, object], started: "Future[tuple[Engine, asyncio.Event]]", stack: ExitStack
) -> None:
    settings = msgspec.convert({"replica_silence_s": 60.0, "reasoning_parser": "think", **given}, RouterSettings)
    guides = GuideCompiler(folder, VOCABULARY, (END,))
    stack.callback(guides.close)
    core = ScriptedReplica("r0", tokenizer=Tokenizer.from_file(str(folder / "tokenizer.json")), guides=guides)
    replica = _socket_replica(core, folder)
    service = RouterService(settings, CACHE, router_id="me", model_dir=folder, heartbeat_interval_s=0.05, rng=Random(1))
    stack.callback(service.close)
    server = RouterServer(settings, service, grace_s=1.0)
    replica.start()
    service.apply_membership([replica.description], SEED, {})
    await server.load_text(folder)
    await until(lambda: any(each.state == "serving" for each in service.view().replicas))
    port, loop, done = await server.start("127.0.0.1", 0), asyncio.get_running_loop(), asyncio.Event()

    def submit(action: Callable[[], object]) -> object:
        async def act() -> object:
            return action()

        return asyncio.run_coroutine_threadsafe(act(), loop).result(PATIENCE_S)

    started.set_result((Engine(f"http://127.0.0.1:{port}", core, submit), done))
    await done.wait()
    await server.stop()
    service.check()
    await replica.stop()


def _socket_replica(core: ScriptedReplica, folder: Path) -> SocketReplica:
    limits = ModelLimits(
        name=NAME, path=str(folder), vocab_size=VOCABULARY, max_model_len=CONTEXT, eos_token_ids=(END,)
    )
    replica = SocketReplica("r0")
    replica.core = core
    replica.description = msgspec.structs.replace(
        replica.description, parity=parity_of(text_digests(folder)), model=limits, num_blocks=4 * CONTEXT // 16
    )
    return replica
