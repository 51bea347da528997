"""Fakes that we own: a model whose tokens can be computed by hand and that detects wrong KV."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from zlib import crc32

import numpy as np

from homing.kvcache.hashing import BlockHash, BlockHasher, join_hashes, token_bytes
from homing.replica.engine.request import RequestKey, RequestState
from homing.replica.engine.step_plan import StepPlan, lay_out
from homing.replica.messages import Generate, SamplingParams

VOCAB = 97
ROOT = BlockHash(b"r" * 16)


def kv_entries(tokens: Sequence[int], before: Sequence[int] = ()) -> list[int]:
    """The "KV" of tokens that follow `before`: one number per token, which depends on all tokens up to it."""
    entries = list(before)
    for token in tokens:
        entries.append(crc32(token.to_bytes(4, "little"), entries[-1] if entries else 1))
    return entries[len(before) :]


def next_token(entries: Sequence[int]) -> int:
    """The model's next token. It depends on every entry, so a single wrong block changes it."""
    return crc32(array("Q", entries).tobytes()) % VOCAB


def undisturbed(prompt: Sequence[int], count: int, stop: Sequence[int] = ()) -> list[int]:
    """The tokens generated without other requests, chunks, cache or preemption."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < count:
        tokens.append(next_token(kv_entries(tokens)))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


@dataclass(frozen=True)
class Guesses:
    """A `Drafter` of preset accuracy that drafts as many tokens as it likes, also more than asked for."""

    right: float
    seed: int = 0
    following: Callable[[Sequence[int]], int] = lambda tokens: next_token(kv_entries(tokens))

    def __call__(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        chance = Random(crc32(array("I", tokens).tobytes(), self.seed))
        guessed = list(tokens)
        for _ in range(chance.randint(0, most + 1)):
            true = chance.random() < self.right
            guessed.append(self.following(guessed) if true else chance.randrange(VOCAB))
        return guessed[len(tokens) :]


@dataclass
class FakeModel:
    """Paged KV with one number per token; reads the history through the block tables, as attention does."""

    num_blocks: int
    block_size: int
    memory: list[int | None] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory = [None] * (self.num_blocks * self.block_size)

    def run(self, plan: StepPlan) -> list[int]:
        """The token that follows each position in `plan.logits_at`."""
        self.plans.append(plan)
        batch = lay_out(plan, self.block_size)
        sources, targets = batch.copied_slots.tolist()
        for slot, entry in zip(targets, [self.memory[source] for source in sources], strict=True):
            assert entry is not None, "copied KV that was never written"
            self.memory[slot] = entry
        followers: list[int] = []
        first = 0
        for row, count in enumerate(batch.q_lens):
            span = slice(first, first + count)
            history = self.read(batch.block_tables[row], batch.kv_lens[row] - count)
            entries = history + kv_entries([int(token) for token in batch.token_ids[span]], history)
            for slot, entry in zip(batch.slots[span], entries[len(history) :], strict=True):
                assert slot >= self.block_size, "wrote into the null block"
                self.memory[int(slot)] = entry
            followers += [next_token(entries[: len(history) + i + 1]) for i in range(count)]
            first += count
        return [followers[int(index)] for index in batch.logits_at]

    def read(self, table: np.ndarray, count: int) -> list[int]:
        slots = [int(table[i // self.block_size]) * self.block_size + i % self.block_size for i in range(count)]
        values = [self.memory[slot] for slot in slots]
        assert None not in values, "read KV that was never written"
        return [value for value in values if value is not None]


@dataclass
class FakeExecutor:
    """The fake model behind the engine's executor protocol. The next `fail_next` steps raise."""

    model: FakeModel
    fail_next: int = 0
    error: type[Exception] = RuntimeError
    #: By slot: a generation, and the KV that was saved as it.
    host: dict[int, tuple[int, list[int | None]]] = field(default_factory=dict)
    #: Why the next loads fail; None: the load succeeds.
    load_failures: list[str | None] = field(default_factory=list)

    def move(self, saves, loads):
        size = self.model.block_size
        for save in saves:
            begin = save.block_id * size
            self.host[save.slot] = save.generation, self.model.memory[begin : begin + size]
        return [self._load(load) for load in loads]

    def _load(self, load) -> str | None:
        generation, entries = self.host[load.slot]
        assert generation == load.generation, f"slot {load.slot} holds {generation}, not {load.generation}"
        if self.load_failures and (failure := self.load_failures.pop(0)):
            return failure
        begin = load.block_id * self.model.block_size
        self.model.memory[begin : begin + len(entries)] = entries
        return None

    def forward(self, plan: StepPlan):
        import torch

        if self.fail_next:
            self.fail_next -= 1
            raise self.error("the fake model fails as configured")
        followers = self.model.run(plan)
        logits = torch.zeros(len(followers), VOCAB)
        logits[torch.arange(len(followers)), torch.tensor(followers, dtype=torch.long)] = 10.0
        return logits


class FakeClock:
    """A clock that advances only when told to, or by a fixed step per reading."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self.tick = 1000.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def generate(
    request_id: int, tokens: Sequence[int], hasher: BlockHasher, *, prompt_tokens: int | None = None, **sampling
) -> Generate:
    """A well-formed greedy request."""
    data = token_bytes(tokens)
    params = {"max_tokens": 4, "temperature": 0.0, **sampling}
    return Generate(
        request_id=request_id,
        token_ids=data,
        prompt_tokens=len(tokens) if prompt_tokens is None else prompt_tokens,
        root=ROOT,
        block_hashes=join_hashes(hasher.chain(ROOT, data)),
        sampling=SamplingParams(**params),
    )


def request_state(
    number: int,
    tokens: Sequence[int],
    hasher: BlockHasher,
    *,
    priority: int = 0,
    tenant: bytes = b"",
    weight: float = 1.0,
    **sampling,
):
    params = {"max_tokens": 4, "temperature": 0.0, **sampling}
    return RequestState(
        key=RequestKey("a", number),
        tokens=array("I", tokens),
        prompt_tokens=len(tokens),
        root=ROOT,
        hashes=hasher.chain(ROOT, token_bytes(tokens)),
        sampling=SamplingParams(**params),
        priority=priority,
        tenant=tenant,
        weight=weight,
    )
