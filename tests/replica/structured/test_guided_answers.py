"""The demo model's constrained answers match their grammar on every engine, and continue unchanged elsewhere."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
from llguidance import LLTokenizer

from homing.kvcache.hashing import BlockHasher
from homing.kvcache.prefix_cache import PrefixCache
from homing.replica import demo
from homing.replica.config import ReplicaSettings
from homing.replica.engine.drafts import Drafter
from homing.replica.engine.engine import Engine
from homing.replica.engine.overlapped import OverlappedEngine
from homing.replica.engine.scheduler import SchedulerLimits
from homing.replica.engine.throughput import SmoothedRates
from homing.replica.errors import InvalidRequest
from homing.replica.execute.gpu_runner import GpuRunner
from homing.replica.execute.runner import ModelRunner
from homing.replica.messages import Constraint
from homing.replica.structured.guide import Guide, GuideCompiler

from ..fakes import Guesses, generate

MODEL = Path(demo.__file__).parent / "model"
BLOCK_SIZE, BLOCKS = 16, 120
EOS = (4, 2)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["river", "mountain"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "maxItems": 3},
        "inner": {"$ref": "#/$defs/point"},
    },
    "required": ["name", "kind", "sizes", "inner"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "boolean"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
JSON = Constraint(kind="json_schema", source=json.dumps(SCHEMA))
ENGINES = {"plain": (Engine, ModelRunner), "overlapped": (OverlappedEngine, GpuRunner)}


@cache
def tokenizer() -> LLTokenizer:
    return LLTokenizer((MODEL / "tokenizer.json").read_text(), n_vocab=4096, eos_token=list(EOS))


PROMPT = tokenizer().tokenize_str("Tell me about a river, in JSON.")


@cache
def runner_of(kind: type[ModelRunner]) -> ModelRunner:
    runner = kind(ReplicaSettings(device="cpu", max_running_requests=8, max_model_len=512), MODEL, BLOCK_SIZE)
    runner.allocate_kv(BLOCKS + 1)
    return runner


@pytest.fixture(scope="module")
def guides() -> Iterator[GuideCompiler]:
    compiler = GuideCompiler(MODEL, 4096, EOS)
    yield compiler
    compiler.close()


@dataclass
class Got:
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_token_id: int | None = None

    @property
    def text(self) -> str:
        return tokenizer().decode_str(self.tokens if self.stop_token_id is None else self.tokens[:-1])


class Rig:
    """An engine on the demo model."""

    def __init__(self, kind: str, guides: GuideCompiler, drafter: Drafter | None = None) -> None:
        engine, runner = ENGINES[kind]
        self.guides = guides
        self.hasher = BlockHasher(BLOCK_SIZE, seed=3)
        self.engine: Engine = engine(
            limits=SchedulerLimits(8, 64, 512),
            vocab_size=4096,
            eos_token_ids=EOS,
            cache=PrefixCache(BLOCKS + 1, BLOCK_SIZE),
            hasher=self.hasher,
            executor=runner_of(runner),
            rates=SmoothedRates(1000.0, 0.01),
            epoch=11,
            drafter=drafter,
        )
        self.got: dict[int, Got] = defaultdict(Got)
        self.refused: dict[int, str] = {}

    def add(self, number: int, constraint: Constraint | None, generated: Sequence[int] = (), **sampling: Any) -> None:
        tokens = [*PROMPT, *generated]
        given = {"max_tokens": 150, **sampling}
        request = generate(number, tokens, self.hasher, prompt_tokens=len(PROMPT), **given)
        guide = None if constraint is None else self.guides.compile(constraint, generated)
        self.engine.add("a", msgspec.structs.replace(request, constraint=constraint), guide)

    def run(self) -> dict[int, Got]:
        while self.engine.has_work:
            self.step()
        return self.got

    def step(self) -> None:
        result = self.engine.step()
        for output in result.outputs["a"]:
            got = self.got[output.request_id]
            got.tokens += output.token_ids
            got.finish_reason, got.stop_token_id = output.finish_reason, output.stop_token_id
        self.refused.update((refused.request_id, refused.message) for refused in result.refused["a"])
        self.engine.scheduler.check()


def answer(kind: str, guides: GuideCompiler, constraint: Constraint | None, **sampling: Any) -> Got:
    rig = Rig(kind, guides)
    rig.add(0, constraint, **sampling)
    return rig.run()[0]


DRAWS = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}, {"temperature": 2.0, "seed": 8, "top_k": 50}]


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("sampling", DRAWS)
def test_an_answer_matches_its_schema(guides: GuideCompiler, kind: str, sampling: dict[str, Any]) -> None:
    """Validated by another library, whatever the model would prefer to generate."""
    got = answer(kind, guides, JSON, **sampling)

    jsonschema.validate(json.loads(got.text), SCHEMA)
    assert (got.finish_reason, got.stop_token_id) == ("stop", None)


@pytest.mark.parametrize("kind", ENGINES)
def test_guided_rows_and_others_share_steps_and_change_no_token_of_each_other(guides: GuideCompiler, kind: str) -> None:
    """Each row has its own mask, also as rows join and leave; all engines draw the same tokens."""
    asks: dict[int, tuple[Constraint | None, dict[str, Any]]] = {
        0: (JSON, DRAWS[1]),
        1: (None, {"temperature": 1.0, "seed": 3, "max_tokens": 40}),
        2: (Constraint(kind="regex", source="[a-z]{3} [0-9]{30}"), DRAWS[1]),
        3: (None, {"max_tokens": 3}),
        4: (Constraint(kind="choice", source='["a river", "a mountain"]'), {}),
        5: (JSON, {"temperature": 1.0, "seed": 9, "logprobs": 1}),
    }
    alone = {number: answer("plain", guides, constraint, **sampling) for number, (constraint, sampling) in asks.items()}
    rig = Rig(kind, guides)

    for number, (constraint, sampling) in asks.items():
        rig.add(number, constraint, **sampling)
        rig.step()
    together = rig.run()

    assert {number: got.tokens for number, got in together.items()} == {
        number: got.tokens for number, got in alone.items()
    }
    assert re.fullmatch("[a-z]{3} [0-9]{30}", alone[2].text)
    assert alone[4].text in ("a river", "a mountain")


@pytest.mark.parametrize("kind", ENGINES)
def test_an_answer_goes_on_elsewhere_from_every_token(guides: GuideCompiler, kind: str) -> None:
    """After a replica is killed, the next one follows the tokens so far and gives the same tokens and end."""
    whole = answer(kind, guides, JSON, **DRAWS[1])
    rig = Rig(kind, guides)

    for start in range(0, len(whole.tokens) - 1, 4):
        cuts = range(start, min(start + 4, len(whole.tokens)))
        for cut in cuts:
            rig.add(cut, JSON, whole.tokens[:cut], **DRAWS[1])
        rig.run()
        for cut in cuts:
            got = rig.got[cut]
            assert (whole.tokens[:cut] + got.tokens, got.finish_reason) == (whole.tokens, whole.finish_reason), cut


def test_choices_of_one_request_are_guided_each_by_itself(guides: GuideCompiler) -> None:
    rig = Rig("plain", guides)

    for choice in range(4):
        rig.add(choice, JSON, temperature=1.5, seed=100 + choice)
    got = rig.run()

    for choice in range(4):
        jsonschema.validate(json.loads(got[choice].text), SCHEMA)
    assert len({each.text for each in got.values()}) > 1


def test_the_end_of_text_comes_only_where_the_grammar_is_complete(guides: GuideCompiler) -> None:
    """A biased model stops no earlier, and an answer that cannot continue ends despite `min_tokens`."""
    long = answer("plain", guides, Constraint(kind="regex", source="[a-z ]{80,}"), logit_bias={EOS[0]: 50.0})
    exact = answer("plain", guides, Constraint(kind="regex", source="[a-z ]{20}"), min_tokens=100)

    assert len(long.text) >= 80
    assert (long.finish_reason, long.stop_token_id) == ("stop", EOS[0])
    assert (len(exact.text), exact.finish_reason, exact.stop_token_id) == (20, "stop", None)


def test_a_limit_of_tokens_ends_an_answer_as_ever(guides: GuideCompiler) -> None:
    got = answer("plain", guides, JSON, max_tokens=3)

    assert (len(got.tokens), got.finish_reason) == (3, "length")


@pytest.mark.parametrize("kind", ENGINES)
def test_a_grammar_may_begin_behind_the_reasoning(guides: GuideCompiler, kind: str) -> None:
    """Text is free until the marker but does not end; then, also in a continued answer, it follows the schema."""
    marker = tokenizer().tokenize_str("x</done>")
    constraint = msgspec.structs.replace(JSON, after=tuple(marker))
    free = answer(kind, guides, None, max_tokens=20, logit_bias=NO_END)
    thinks = answer(kind, guides, constraint, max_tokens=20)
    rig = Rig(kind, guides)

    rig.add(0, constraint, [*free.tokens[:5], *marker])
    rig.add(1, constraint, [*free.tokens[:5], *marker[:-1]], logit_bias={marker[-1]: 100.0})
    got = rig.run()

    assert thinks.tokens == free.tokens
    jsonschema.validate(json.loads(got[0].text), SCHEMA)
    assert got[1].tokens[0] == marker[-1]
    jsonschema.validate(json.loads(tokenizer().decode_str(got[1].tokens[1:])), SCHEMA)


#: Before what must match, no answer ends.
NO_END = dict.fromkeys(EOS, -100.0)


def think(text: str = "hm") -> list[int]:
    return list(tokenizer().tokenize_str(f"<think>{text}</think>"))


#: For a model that may open reasoning although its prompt does not.
THOUGHTFUL = msgspec.structs.replace(
    JSON, opener=tuple(tokenizer().tokenize_str("<think>")), after=tuple(tokenizer().tokenize_str("</think>"))
)


@pytest.mark.parametrize("kind", ENGINES)
def test_a_model_may_open_reasoning_itself(guides: GuideCompiler, kind: str) -> None:
    """Tokens that start the opener must complete it, unless the grammar allows them; then text is free."""
    opener = list(THOUGHTFUL.opener)
    rig = Rig(kind, guides)

    rig.add(0, THOUGHTFUL, logit_bias={opener[0]: 100.0}, max_tokens=len(opener))
    rig.add(1, THOUGHTFUL, logit_bias={opener[0]: -100.0})
    rig.add(2, THOUGHTFUL, think())
    rig.add(3, THOUGHTFUL, [*opener, *tokenizer().tokenize_str("well")], max_tokens=20)
    rig.add(4, None, [*opener, *tokenizer().tokenize_str("well")], max_tokens=20, logit_bias=NO_END)
    got = rig.run()

    assert len(opener) > 1
    assert got[0].tokens == opener
    jsonschema.validate(json.loads(got[1].text), SCHEMA)
    jsonschema.validate(json.loads(got[2].text), SCHEMA)
    assert got[3].tokens == got[4].tokens


def test_the_state_behind_any_token_follows_from_the_tokens(guides: GuideCompiler) -> None:
    """Includes the opener, the reasoning and its end, so that a lost answer continues with the same bytes."""

    def mask(guide: Any) -> list[int] | None:
        words = np.zeros(4096 // 32, dtype=np.int32)
        if guide.active and not guide.ended:
            guide.fill(words, words.ctypes.data)
            return list(words)
        return None

    for start in (think(), think("")):
        rig = Rig("plain", guides)
        rig.add(0, THOUGHTFUL, start, **DRAWS[1])
        whole = [*start, *rig.run()[0].tokens]
        followed = guides.compile(THOUGHTFUL)

        for cut, token_id in enumerate(whole):
            assert mask(guides.compile(THOUGHTFUL, whole[:cut])) == mask(followed), cut
            followed.accept([token_id])
        assert not followed.problem


def test_reasoning_ends_however_its_end_is_spelled(guides: GuideCompiler) -> None:
    """The tokenization of a text depends on its surroundings."""
    spelled = [token for byte in b"so</think>" for token in tokenizer().tokenize_bytes(bytes([byte]))]

    guide = guides.compile(THOUGHTFUL, [*THOUGHTFUL.opener, *spelled])
    unfinished = guides.compile(THOUGHTFUL, [*THOUGHTFUL.opener, *spelled[:-1]])

    assert list(THOUGHTFUL.after) != spelled[-len(THOUGHTFUL.after) :]
    assert (guide.active, unfinished.active) == (True, False)


@pytest.mark.parametrize("kind", ENGINES)
def test_an_answer_does_not_end_before_what_must_match(guides: GuideCompiler, kind: str) -> None:
    """It would be empty, and say that it is complete."""
    likely_end = {EOS[0]: 100.0}
    close = tokenizer().tokenize_str("</think>")
    reasoning = msgspec.structs.replace(JSON, after=close)
    rig = Rig(kind, guides)

    rig.add(0, reasoning, max_tokens=12, logit_bias=likely_end)
    rig.add(1, reasoning, [*tokenizer().tokenize_str("hm"), *close], logit_bias=likely_end)
    got = rig.run()

    assert (got[0].finish_reason, len(got[0].tokens)) == ("length", 12)
    assert not set(EOS) & set(got[0].tokens)
    jsonschema.validate(json.loads(got[1].text), SCHEMA)


class Merged:
    """A vocabulary whose third token ends the reasoning and contains text after it."""

    def __init__(self, rest: bytes) -> None:
        self.pieces = [b"</", b"think>", b"</think>" + rest]

    def piece(self, token_id: int) -> bytes:
        return self.pieces[token_id]

    def tokenize(self, text: bytes) -> list[int]:
        return list(tokenizer().tokenize_bytes(text))


@pytest.mark.parametrize(("rest", "problem"), [(b"\n\n", False), (b'\n{"', False), (b"Sure", True)])
def test_text_behind_the_end_of_reasoning_in_one_token_with_it_counts(
    guides: GuideCompiler, rest: bytes, problem: bool
) -> None:
    """Whitespace is ignored; any other text must match the grammar."""
    vocabulary: Any = Merged(rest)
    guide = Guide(guides._matcher(JSON), vocabulary, after=(0, 1))

    guide.accept([0, 2])

    assert guide.active
    assert bool(guide.problem) == problem


def test_a_drafter_changes_no_guided_token(guides: GuideCompiler) -> None:
    """A guided row gets no drafts; other rows in its batch do."""
    rig = Rig("plain", guides, drafter=Guesses(0.0, seed=1, following=lambda tokens: 7))

    rig.add(0, JSON, **DRAWS[1])
    rig.add(1, None, max_tokens=10)
    got = rig.run()

    assert got[0].tokens == answer("plain", guides, JSON, **DRAWS[1]).tokens
    assert got[1].tokens == answer("plain", guides, None, max_tokens=10).tokens


class Failing:
    """A guide whose grammar fails at its third token."""

    restricts, ended = False, False

    def __init__(self) -> None:
        self.seen = 0

    @property
    def problem(self) -> str:
        return "ParserTooComplex" if self.seen == 3 else ""

    def accept(self, token_ids: Sequence[int]) -> None:
        self.seen += len(token_ids)


@pytest.mark.parametrize("kind", ENGINES)
def test_a_grammar_that_fails_ends_its_request_and_no_other(guides: GuideCompiler, kind: str) -> None:
    """llguidance may reach its limits in mid-answer; the rest could not match the grammar."""
    rig = Rig(kind, guides)
    request = msgspec.structs.replace(generate(0, PROMPT, rig.hasher, max_tokens=20), constraint=JSON)
    guide: Any = Failing()

    rig.engine.add("a", request, guide)
    rig.add(1, JSON)
    got = rig.run()

    assert rig.refused == {0: "constraint: ParserTooComplex"}
    assert len(got[0].tokens) == 2
    jsonschema.validate(json.loads(got[1].text), SCHEMA)


def test_tokens_that_do_not_match_are_refused(guides: GuideCompiler) -> None:
    """For example, a continued answer that was generated under another grammar."""
    with pytest.raises(InvalidRequest, match="do not match"):
        guides.compile(JSON, tokenizer().tokenize_str("Hello"))


def test_a_model_without_a_tokenizer_refuses_constraints_by_name(tmp_path: Path) -> None:
    """All other requests are served."""
    compiler = GuideCompiler(tmp_path, 100, (2,))

    with pytest.raises(InvalidRequest, match="structured output cannot use"):
        compiler.compile(JSON)
    compiler.close()
