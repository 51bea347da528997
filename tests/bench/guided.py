"""Measure what structured output costs: masks, the time from a schema to its first mask, and a guided row in a batch.

    python tests/bench/guided.py [--out FILE]

The vocabulary is synthetic: all bytes, and the most frequent words and word beginnings of this Python's standard
library. Masks are filled and tokens accepted along valid answers, in thread CPU time. A schema is received in one
thread, compiled in another and never seen before; that is wall-clock time. Goals: 20 us for a mask on average, 200 us
at the 99th percentile; 3 ms from a schema to its first mask.

Batches: steps of 16 rows of bench-engine's model (125 M parameters, 32,000 tokens), alternately without a guided row
and with one, on one thread, in CPU time, which other work disturbs less. Goal: a step takes at most 3 % longer.
"""

import copy
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import torch
from engine_model import library_texts, random_model
from llguidance import LLTokenizer
from report import Row, arguments, publish
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from homing.kvcache.hashing import BlockHash, BlockHasher, join_hashes, token_bytes
from homing.kvcache.prefix_cache import PrefixCache
from homing.replica.config import ReplicaSettings
from homing.replica.engine.engine import Engine
from homing.replica.engine.scheduler import SchedulerLimits
from homing.replica.engine.throughput import SmoothedRates
from homing.replica.execute.runner import ModelRunner
from homing.replica.messages import Constraint, Generate, SamplingParams
from homing.replica.server import mask_of
from homing.replica.structured.guide import Guide, GuideCompiler, TokenMasks, token_masks

VOCABULARY, SMALL_VOCABULARY = 131_072, 32_000
ROWS, CONTEXT, STEPS = 16, 32, 60
BLOCK_SIZE = 16
ROOT = BlockHash(bytes(16))
HASHER = BlockHasher(BLOCK_SIZE, seed=7)

TEXT = "The quick brown fox, which jumps over the lazy dog; and so on until \\u00e9 the end."
#: Ten fields of common types.
FLAT: dict[str, Any] = {
    "type": "object",
    "properties": {
        **{f"text_{i}": {"type": "string"} for i in range(4)},
        **{f"number_{i}": {"type": "number"} for i in range(2)},
        "whole": {"type": "integer"},
        "yes": {"type": "boolean"},
        "kind": {"enum": ["first kind", "second kind", "another"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "additionalProperties": False,
}
FLAT["required"] = list(FLAT["properties"])
FLAT_ANSWER = {
    **{f"text_{i}": TEXT for i in range(4)},
    **{f"number_{i}": -12.5e3 for i in range(2)},
    "whole": 1234567,
    "yes": True,
    "kind": "second kind",
    "tags": ["one", "another tag", TEXT],
}
#: Patterns, enumerations, recursion and arrays.
NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4,6}$"},
        "root": {"$ref": "#/$defs/node"},
    },
    "required": ["id", "root"],
    "additionalProperties": False,
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "state": {"enum": ["open", "closed", "waiting for review"]},
                "when": {"type": "string", "format": "date-time"},
                "weights": {"type": "array", "items": {"type": "number", "minimum": 0}, "maxItems": 8},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["name", "state", "when", "weights", "children"],
            "additionalProperties": False,
        }
    },
}


def node(depth: int) -> dict[str, Any]:
    children = [node(depth - 1) for _ in range(2)] if depth else []
    when, weights = "2026-11-22T10:00:00Z", [0.25, 12, 3.5]
    return {"name": TEXT, "state": "waiting for review", "when": when, "weights": weights, "children": children}


NESTED_ANSWER = {"id": "AB-12345", "root": node(3)}
#: The same schema with a length limit on its texts, which llguidance has to count in every mask.
LIMITED = copy.deepcopy(NESTED)
LIMITED["$defs"]["node"]["properties"]["name"]["maxLength"] = 200
CASES = {
    "flat": (FLAT, FLAT_ANSWER),
    "nested": (NESTED, NESTED_ANSWER),
    "nested with maxLength": (LIMITED, NESTED_ANSWER),
}


def save_tokenizer(folder: Path, words: Sequence[str], size: int) -> Path:
    """Save a byte-level vocabulary of `size` tokens, the last of which is the end-of-text token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens = dict.fromkeys(alphabet)
    for word in words:
        if len(tokens) == size - 1:
            break
        tokens["".join(piece for piece, _ in spelled.pre_tokenize_str(word))] = None
    assert len(tokens) == size - 1, f"{len(tokens)} words, {size} wanted"
    tokenizer = Tokenizer(models.BPE(vocab={token: place for place, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = spelled, decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def library_words() -> list[str]:
    """Words with their leading space, word beginnings, and runs of other characters; the most frequent first."""
    counts: Counter[str] = Counter()
    for text in library_texts():
        counts.update(re.findall(r" ?[^\W_]+| ?[^\s\w]{1,8}|\s+", text))
    for word, times in list(counts.items()):
        for end in range(2, min(len(word), 9)):
            counts[word[:end]] += times // 4
    return [word for word, _ in counts.most_common() if len(word.encode()) < 40]


def follow(guide: Guide, tokens: Sequence[int], size: int) -> Iterator[tuple[float, float]]:
    """Fill a mask before each token, then accept the token; yields the microseconds of each."""
    words = np.empty(-(-size // 32), dtype=np.int32)
    address = words.ctypes.data
    for token in tokens:
        started = time.thread_time_ns()
        guide.fill(words, address)
        filled = time.thread_time_ns()
        guide.accept((token,))
        yield (filled - started) / 1e3, (time.thread_time_ns() - filled) / 1e3
        assert not guide.problem, guide.problem


def renamed(schema: dict[str, Any], number: int) -> Constraint:
    """The schema with an additional property, so that it has not been compiled yet."""
    properties = {**schema["properties"], f"extra_{number}": {"type": "integer"}}
    return Constraint(kind="json_schema", source=json.dumps({**schema, "properties": properties}))


def masks(folder: Path) -> Iterator[Row]:
    compiler = GuideCompiler(folder, VOCABULARY, (VOCABULARY - 1,))
    tokenizer = LLTokenizer((folder / "tokenizer.json").read_text(), n_vocab=VOCABULARY, eos_token=VOCABULARY - 1)
    for name, (schema, answer) in CASES.items():
        tokens = tokenizer.greedy_tokenize(json.dumps(answer))
        constraint = Constraint(kind="json_schema", source=json.dumps(schema))
        both = [us for _ in range(5) for us in follow(compiler.compile(constraint), tokens, VOCABULARY)]
        found = sorted(mask for mask, _ in both)
        yield Row(f"mask, {name}: mean of {len(tokens)} tokens", "us", mean(found), 20)
        yield Row(f"mask, {name}: 99th percentile", "us", found[len(found) * 99 // 100], 200)
        yield Row(f"token accepted, {name}: mean", "us", mean(accepted for _, accepted in both))
    for name, (schema, _) in CASES.items():
        times = []
        for number in range(30):
            started = time.perf_counter()
            guide = compiler.start(renamed(schema, number), ()).result()
            token_masks([guide], VOCABULARY)
            times.append((time.perf_counter() - started) * 1e3)
        yield Row(f"schema to first mask, cold, {name}: median", "ms", median(times), 3)
        yield Row(f"schema to first mask, cold, {name}: greatest of {len(times)}", "ms", max(times))
    constraint = Constraint(kind="json_schema", source=json.dumps(NESTED))
    copies = [compiler.compile(constraint) for _ in range(ROWS)]
    yield Row(f"masks of {ROWS} rows, nested", "us", median_us(lambda: token_masks(copies, VOCABULARY)))
    allowed = token_masks(copies[:1], VOCABULARY)
    assert isinstance(allowed, TokenMasks)
    logits, mask = torch.zeros(ROWS, VOCABULARY), mask_of(torch.device("cpu"))
    rows, bits = torch.from_numpy(allowed.rows), torch.from_numpy(allowed.bits)
    yield Row("mask applied to the logits of one row", "us", median_us(lambda: mask(logits, rows, bits)))
    compiler.close()


def median_us(call: Callable[[], object]) -> float:
    found = []
    for _ in range(200):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return median(found) * 1e6


def batches(folder: Path) -> Iterator[Row]:
    torch.set_num_threads(1)
    compiler = GuideCompiler(folder, SMALL_VOCABULARY, (SMALL_VOCABULARY - 1,))
    random_model().save_pretrained(folder)
    settings = ReplicaSettings(device="cpu", max_running_requests=ROWS, max_model_len=2048)
    runner = ModelRunner(settings, folder, BLOCK_SIZE)
    runner.allocate_kv(ROWS * 64 + 1)
    #: An array too long to be completed within a run.
    items = {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    }
    source = json.dumps({"type": "array", "items": items, "minItems": 100_000})
    constraint = Constraint(kind="json_schema", source=source)
    for temperature in (0.0, 1.0):
        plain = engine_of(runner, compiler, None, temperature)
        guided = engine_of(runner, compiler, constraint, temperature)
        times: dict[int, list[float]] = {id(plain): [], id(guided): []}
        for number in range(STEPS):
            for engine in (plain, guided) if number % 2 else (guided, plain):
                started = time.process_time()
                result = engine.step()
                times[id(engine)].append(time.process_time() - started)
                assert result.rows == ROWS, f"{result.rows} of {ROWS} rows"
        before = median(times[id(plain)])
        more = median([late / early for early, late in zip(times[id(plain)], times[id(guided)], strict=True)])
        how = f"{ROWS} rows, temperature {temperature:g}"
        yield Row(f"step of {how}", "ms", before * 1e3)
        yield Row(f"longer with one guided row, {how}", "%", (more - 1) * 100, 3)
    compiler.close()


def engine_of(
    runner: ModelRunner, compiler: GuideCompiler, constraint: Constraint | None, temperature: float
) -> Engine:
    """An engine with `ROWS` requests past their prompts; the first is guided if there is a constraint."""
    engine = Engine(
        limits=SchedulerLimits(ROWS, ROWS * CONTEXT, 1024),
        vocab_size=SMALL_VOCABULARY,
        eos_token_ids=(),
        cache=PrefixCache(ROWS * 64 + 1, BLOCK_SIZE),
        hasher=HASHER,
        executor=runner,
        rates=SmoothedRates(1000.0, 0.01),
        epoch=1,
        mask=mask_of(torch.device("cpu")),
    )
    for number in range(ROWS):
        data = token_bytes([(number * 977 + place) % 1000 + 300 for place in range(CONTEXT)])
        request = Generate(
            request_id=number,
            token_ids=data,
            prompt_tokens=CONTEXT,
            root=ROOT,
            block_hashes=join_hashes(HASHER.chain(ROOT, data)),
            sampling=SamplingParams(max_tokens=800, temperature=temperature, seed=number, ignore_eos=True),
        )
        guide = None
        if number == 0 and constraint is not None:
            request, guide = msgspec.structs.replace(request, constraint=constraint), compiler.compile(constraint)
        engine.add("r", request, guide)
    while engine.step().rows != ROWS or engine.scheduler.backlog().queued_prefill.tokens:
        pass
    return engine


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    with TemporaryDirectory() as folder:
        words = library_words()
        large = save_tokenizer(Path(folder, "large"), words, VOCABULARY)
        small = save_tokenizer(Path(folder, "small"), words, SMALL_VOCABULARY)
        rows = [*masks(large), *batches(small)]
    publish(rows, options.out, ["llguidance", "numpy", "torch"])


if __name__ == "__main__":
    main()
