"""Streams that lose their replica at any token continue with the same bytes: guided answers, tool calls and reasoning.

HTTP, dialects, parsers and request flow are the router's own, in this process. The replicas are fakes that follow real
grammars: as with a model, the token at a position depends on the seed, the position and the mask there. So the bytes
differ if another replica resumes a grammar wrongly, or the router a parser.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from homing.events.follow.subscription import FeedStatus
from homing.kvcache.hashing import token_array
from homing.replica.demo import demo_model_path
from homing.replica.messages import Abort, Generate, ModelLimits, TokenBatch, TokenOutput
from homing.replica.structured.guide import Guide, GuideCompiler, token_masks
from homing.router.backend import GenerationRequest, RouterCounters
from homing.router.config import RouterSettings
from homing.router.flow.dispatcher import ServedModel
from homing.router.flow.request_flow import RequestFlow
from homing.router.flow.request_state import Deliver, Ended, Instruction, RequestId, Send
from homing.router.flow.token_stream import RequestStream
from homing.router.http.app import App
from homing.router.http.front import Front
from homing.router.http.protocol.server import HttpServer
from homing.router.metrics import RouterMetrics
from homing.router.routing.placement import Placement
from homing.router.routing.policy.registry import make_policy
from homing.router.text import tokenizer
from homing.router.text.parsers.families import NONE
from homing.router.text.tokenizer import TextModel

from .fakes import BLOCK, HASHER, ROOT, description_of, replica_of
from .http.conftest import LoadedText
from .http.fakes import FakeBackend
from .text.parsers.test_parser import ANSWERS

END = 4
LIMITS = ModelLimits(name="demo", path="", vocab_size=4096, max_model_len=4096, eos_token_ids=(END,))
SAMPLE, ALL = range(48), range(1_000)
PROPERTIES = {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": ["string", "null"]}}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["a", "b"], "additionalProperties": False}
NESTED = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["river", "mountain"]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        "inner": {"$ref": "#/$defs/node"},
    },
    "required": ["kind", "sizes", "inner"],
    "additionalProperties": False,
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"x": {"type": "boolean"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["x", "next"],
            "additionalProperties": False,
        }
    },
}
THOUGHT = "The fox is quick, and so it goes.\n</think>\n\n"
PROSE = "Once a fox met 🦊 an owl by the river. It was late, and both of them were tired. The end."


@dataclass(frozen=True)
class Case:
    """A request, and the text that its model writes."""

    path: str
    body: Mapping[str, Any]
    said: str  #: the text that the model writes while no constraint is active
    tools: str = NONE
    reasoning: str = NONE
    thinks: bool = False  #: the template opens the reasoning


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def chat(text: str, /, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {
        "messages": messages(text),
        "max_tokens": 80,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }


def responses(text: str, /, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": text, "max_output_tokens": 80, "stream": True, **fields}


def claude(text: str, /, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"messages": messages(text), "max_tokens": 80, "stream": True, **fields}


def asked(rng: Random, output: Mapping[str, Any] | None = None, tools: bool = False, choice: str = "") -> Any:
    """Return a request in a random dialect: with an output schema, tools, both or neither."""
    text = f"Tell me about fox {rng.randrange(1000)}. " * rng.randint(1, 8)
    functions = {"f": PARAMETERS, "get_time": {"type": "object", "properties": {}}} if tools else {}
    match rng.choice(["chat", "responses", "messages"]):
        case "chat":
            fields: dict[str, Any] = {}
            if output is not None:
                wanted = {"name": "answer", "schema": output, "strict": True}
                fields["response_format"] = {"type": "json_schema", "json_schema": wanted}
            if functions:
                fields["tools"] = [
                    {"type": "function", "function": {"name": name, "parameters": each}}
                    for name, each in functions.items()
                ]
            if choice:
                named = {"type": "function", "function": {"name": "f"}}
                fields["tool_choice"] = "required" if choice == "any" else named
            return chat(text, **fields)
        case "responses":
            fields = {}
            if output is not None:
                fields["text"] = {"format": {"type": "json_schema", "name": "answer", "schema": output, "strict": True}}
            if functions:
                fields["tools"] = [
                    {"type": "function", "name": name, "parameters": each, "strict": False}
                    for name, each in functions.items()
                ]
            if choice:
                fields["tool_choice"] = "required" if choice == "any" else {"type": "function", "name": "f"}
            return responses(text, **fields)
        case _:
            fields = {}
            if output is not None:
                fields["output_config"] = {"format": {"type": "json_schema", "schema": output}}
            if functions:
                fields["tools"] = [{"name": name, "input_schema": each} for name, each in functions.items()]
            if choice:
                fields["tool_choice"] = {"type": "any"} if choice == "any" else {"type": "tool", "name": "f"}
            return claude(text, **fields)


def case_of(rng: Random) -> Case:
    """Return a random case of one of six kinds of answers."""
    match rng.randrange(6):
        case 0:
            return Case(*asked(rng, output=rng.choice([PARAMETERS, NESTED])), said="")
        case 1:
            output = rng.choice([PARAMETERS, NESTED])
            return Case(*asked(rng, output=output), said=THOUGHT, reasoning="think", thinks=True)
        case 2:
            wanted = rng.choice(
                [
                    {"regex": r"(river|fox)( [a-z]{2,8}){3,9}[.!]"},
                    {"choice": ["the river of the foxes", "the river of the owls", "a mountain"]},
                    {"json": NESTED},
                    {"json_object": True},
                ]
            )
            return Case(*chat(f"Which {rng.randrange(1000)}?", structured_outputs=wanted), said="")
        case 3:
            choice = rng.choice(["any", "named", ""])
            output = None if choice else NESTED  # tool calls, or an answer that follows the schema
            return Case(*asked(rng, output=output, tools=True, choice=choice), said="", tools="hermes")
        case 4:
            return Case(*asked(rng), said=f"<think>{PROSE}</think>{PROSE}", reasoning="think")
        case _:
            tools, reasoning, text, _ = ANSWERS[rng.choice(sorted(ANSWERS))]
            return Case(*asked(rng, tools=True), said=text, tools=tools, reasoning=reasoning)


@dataclass
class Work:
    request: Generate
    guide: Guide | None
    index: int


@dataclass
class Writer:
    """A replica's engine: each step generates one token of every request."""

    guides: GuideCompiler
    token_at: Callable[[Guide | None, int], int]
    work: dict[int, Work] = field(default_factory=dict)

    def take(self, message: Generate | Abort) -> None:
        if isinstance(message, Abort):
            for request_id in message.request_ids:
                self.work.pop(request_id, None)
            return
        generated = token_array(message.token_ids)[message.prompt_tokens :]
        guide = None if message.constraint is None else self.guides.compile(message.constraint, generated)
        self.work[message.request_id] = Work(message, guide, len(generated))

    def step(self) -> TokenBatch:
        outputs = []
        for request_id, work in list(self.work.items()):
            token_id = self.token_at(work.guide, work.index)
            if work.guide is not None:
                work.guide.accept([token_id])
                assert not work.guide.problem, work.guide.problem
            stop = token_id == END
            done = stop or (work.guide is not None and work.guide.ended)
            full = work.index + 1 >= work.request.sampling.max_tokens
            outputs.append(
                TokenOutput(
                    request_id=request_id,
                    index=work.index,
                    token_ids=[token_id],
                    finish_reason="stop" if done else "length" if full else None,
                    cached_tokens=0,
                    stop_token_id=token_id if stop else None,
                )
            )
            work.index += 1
            if outputs[-1].finish_reason:
                del self.work[request_id]
        return TokenBatch(step=0, outputs=outputs)


class World(FakeBackend):
    """Three replicas behind a request flow. `kills` lists the counts of delivered tokens at which a replica dies."""

    def __init__(self, writer: Callable[[], Writer], kills: tuple[int, ...] = ()) -> None:
        super().__init__(LIMITS, lambda _: [])
        placement = Placement(make_policy("expected-ttft"), router_id="me", silence_s=1e9, rng=Random(1))
        self.flow = RequestFlow(placement, RouterSettings(), block_size=BLOCK, counters=RouterCounters())
        self.flow.adopt(ServedModel(HASHER, ROOT, LIMITS))
        self.writers: dict[str, Writer] = {}
        self.running: dict[RequestId, RequestStream] = {}
        self.kills = list(kills)
        self.tokens = 0
        for name in ("r0", "r1", "r2"):
            self.writers[name] = writer()
            self.carry_out(self.flow.join(msgspec.structs.replace(description_of(name), model=LIMITS), 0.0))
            placement.set_feed(name, FeedStatus.LIVE)

    def generate(self, request: GenerationRequest) -> RequestStream:  # type: ignore[override]
        request_id, instructions = self.flow.submit(request, 0.0)
        state = self.flow.state_of(request_id)
        assert state is not None
        stream = self.running[request_id] = RequestStream(
            state, lambda gone, _: self.carry_out(self.flow.cancel(gone, 0.0))
        )
        self.carry_out(instructions)
        asyncio.get_running_loop().call_soon(self.turn, request_id)
        return stream

    def turn(self, request_id: RequestId) -> None:
        """Kill the request's replica if its time has come; otherwise step all replicas."""
        if request_id not in self.running:
            return
        asyncio.get_running_loop().call_soon(self.turn, request_id)
        home = replica_of(self.flow, request_id)
        assert home is not None, "with three replicas no request waits"
        if self.kills and self.tokens >= self.kills[0]:
            self.kills.pop(0)
            del self.writers[home]
            # Not a death by itself: a request that two of them meet at the same point would be blamed.
            self.carry_out(self.flow.set_unavailable(home, "draining", 0.0))
            self.carry_out(self.flow.replica_gone(home, 0.0)[1])
            return
        for name, writer in self.writers.items():
            self.carry_out(self.flow.on_reply(name, writer.step(), 0.0))

    def carry_out(self, instructions: list[Instruction]) -> None:
        for each in instructions:
            match each:
                case Send(replica, message):
                    assert isinstance(message, Generate | Abort)
                    self.writers[replica].take(message)
                case Deliver(request_id, delta, replica):
                    self.tokens += len(delta.token_ids)
                    self.running[request_id].put(delta, replica)
                case Ended(request, error):
                    self.running.pop(request.request_id).end(request.replica, error)


class Lab:
    """HTTP servers, one per combination of parsers and template. Every request runs in a new `World`."""

    def __init__(self, stack: AsyncExitStack, guides: GuideCompiler) -> None:
        parts = tokenizer.load_parts(demo_model_path())
        opened = "{{ messages[-1].content }}<think>\n"
        self._texts = {
            thinks: TextModel(
                msgspec.structs.replace(parts, chat_template=opened) if thinks else parts, cache_bytes=1_000_000
            )
            for thinks in (False, True)
        }
        for text in self._texts.values():
            stack.callback(text.close)
        self._stack, self._guides = stack, guides
        self._fronts: dict[tuple[str, str, bool], tuple[Front, httpx.AsyncClient]] = {}

    async def bytes_of(self, seed: int, case: Case, kills: tuple[int, ...] = ()) -> tuple[bytes, World]:
        """Return the body of the case's streamed answer, and the world that it ran in."""
        text = self._texts[case.thinks]
        said = [*text.encode_now([case.said], special_tokens=False)[0]]

        def token_at(guide: Guide | None, position: int) -> int:
            if guide is None or not guide.active:
                return (said[position:] or [END])[0]
            masks = token_masks([guide], LIMITS.vocab_size)
            assert masks is not None
            allowed = np.flatnonzero(np.unpackbits(masks.bits[0].view(np.uint8), bitorder="little")).tolist()
            rng = Random(f"{seed} {position}")
            if END in allowed and rng.random() < 0.5:
                return END
            # In a uniform choice, closing brackets and quotes would be so rare that few strings ended.
            ends = [each for each in allowed if set(text.piece(each)) & set(b'"]}')]
            return rng.choice(ends if ends and rng.random() < 0.3 else allowed)

        world = World(lambda: Writer(self._guides, token_at), kills)
        front, client = await self._front(case)
        front.backend, front.random_bits = world, Random(seed).getrandbits
        response = await client.post(case.path, json=case.body, headers={"x-request-id": "one"})
        assert response.status_code == 200, response.text
        world.flow.check()
        return response.content, world

    async def _front(self, case: Case) -> tuple[Front, httpx.AsyncClient]:
        key = case.tools, case.reasoning, case.thinks
        if key not in self._fronts:
            given = {"tool_call_parser": case.tools, "reasoning_parser": case.reasoning, "access_log": ""}
            front = Front(
                msgspec.convert(given, RouterSettings),
                World(lambda: Writer(self._guides, lambda *_: END)),
                RouterMetrics(),
                texts=LoadedText(self._texts[case.thinks]),
                wall=lambda: 1_700_000_000.0,
            )
            server = HttpServer(App(front), front.settings, clock=front.monotonic)
            port = await server.start("127.0.0.1", 0)
            self._stack.push_async_callback(server.stop, 1.0)
            client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False)
            self._fronts[key] = front, await self._stack.enter_async_context(client)
        return self._fronts[key]


@asynccontextmanager
async def lab() -> AsyncIterator[Lab]:
    async with AsyncExitStack() as stack:
        guides = GuideCompiler(demo_model_path(), LIMITS.vocab_size, LIMITS.eos_token_ids)
        stack.callback(guides.close)
        yield Lab(stack, guides)


@pytest.mark.parametrize(
    "seeds", [SAMPLE, pytest.param(ALL, marks=[pytest.mark.slow, pytest.mark.timeout(900)])], ids=len
)
async def test_broken_streams_go_on_with_the_same_bytes(seeds: range) -> None:
    """Replicas die once or twice per stream, after any number of its tokens from none to all but one."""
    kinds, lost = set(), 0
    async with lab() as made:
        for seed in seeds:
            rng = Random(seed)
            case = case_of(rng)
            whole, undisturbed = await made.bytes_of(seed, case)
            kills = tuple(sorted(rng.sample(range(undisturbed.tokens), min(undisturbed.tokens, rng.randint(1, 2)))))

            got, world = await made.bytes_of(seed, case, kills)

            assert got == whole, f"seed {seed}: {case}, lost after {kills} of {undisturbed.tokens} tokens"
            lost += world.flow.counters.continued
            assert world.flow.counters.continued == len(kills)
            kinds |= events_of(whole)
    print(f"{lost} replicas lost in {len(seeds)} streams; {sorted(kinds)}")
    assert {"tool_calls", "reasoning_content", "response.function_call_arguments.delta", "thinking_delta"} <= kinds


def events_of(body: bytes) -> set[str]:
    """Return the kinds of deltas in a stream."""
    found: set[str] = set()
    for line in body.decode().split("\n"):
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        found |= {name for choice in event.get("choices") or () for name, value in choice["delta"].items() if value}
        found |= (
            {event["type"], event.get("delta", {}).get("type", "") if type(event.get("delta")) is dict else ""}
            if ("type" in event)
            else set()
        )
    return found
