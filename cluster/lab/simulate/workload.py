"""Requests of a simulation: from a recorded trace, compressed in time, or generated. Pure iterators, no whole lists.

A block is named by an int that identifies its whole prefix, as the wire hash does.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import accumulate, count
from math import exp, log
from random import Random

from ..recorded_trace import MOONCAKE_BLOCK_TOKENS, TraceRequest

#: Block ids of a round are below this, so adding a multiple of it per round gives unique names.
ROUND = 1 << 40


@dataclass(slots=True, frozen=True)
class Arrival:
    at_s: float
    tokens: int  #: prompt tokens, at least 1
    output_tokens: int  #: at least 1
    blocks: tuple[int, ...]  #: names of the prompt's full blocks
    #: the names as seen by a router that knows only the text (no tenant, no adapter); None: the same as `blocks`
    text: tuple[int, ...] | None = None
    session: str | None = None


def from_trace(requests: Iterable[TraceRequest], block_tokens: int = MOONCAKE_BLOCK_TOKENS) -> Iterator[Arrival]:
    """The requests of a recorded trace. Prompts and answers have at least one token."""
    for request in requests:
        yield Arrival(
            at_s=request.arrival_s,
            tokens=max(1, request.input_tokens),
            output_tokens=max(1, request.output_tokens),
            blocks=request.full_blocks(block_tokens),
        )


def compress(arrivals: Iterable[Arrival], factor: float) -> Iterator[Arrival]:
    """The same requests, arriving `factor` times as fast."""
    if factor == 1:
        return iter(arrivals)
    return (replace(arrival, at_s=arrival.at_s / factor) for arrival in arrivals)


@dataclass(slots=True, frozen=True)
class WorkloadFacts:
    """The number of requests of a workload and the seconds from its first to its last arrival."""

    requests: int
    span_s: float

    @property
    def rate_per_s(self) -> float:
        return self.requests / self.span_s if self.span_s else float("inf")


def facts(arrivals: Iterable[Arrival]) -> WorkloadFacts:
    requests = 0
    first = last = 0.0
    for requests, arrival in enumerate(arrivals, 1):
        last = arrival.at_s
        if requests == 1:
            first = last
    return WorkloadFacts(requests, last - first)


def repeated(one_round: Callable[[], Iterator[Arrival]], count: int) -> Iterator[Arrival]:
    """A workload repeated `count` times, with different blocks in each round; it is read again for each round."""
    start_s = 0.0
    for number in range(count):
        last_s = gap_s = 0.0
        for arrival in one_round():
            gap_s, last_s = max(gap_s, arrival.at_s - last_s), arrival.at_s
            if number:
                blocks = tuple([number * ROUND + block for block in arrival.blocks])
                arrival = replace(arrival, at_s=start_s + arrival.at_s, blocks=blocks, text=None)
            yield arrival
        start_s += last_s + gap_s


@dataclass(slots=True, frozen=True, kw_only=True)
class Chats:
    """Generated conversations with assistants, each of which has a system prompt that all its users share."""

    requests: int = 4000
    seed: int = 0
    block_tokens: int = 512
    rate_per_s: float = 4.0
    assistants: int = 20
    system_tokens: int = 2048
    turn_tokens: int = 1500  #: mean number of tokens that a turn adds, including the answer
    turns: int = 5  #: mean
    pause_s: float = 30.0  #: mean, between two turns
    output_tokens: int = 200  #: mean


def conversations(chats: Chats) -> Iterator[Arrival]:
    """Requests in order of time: users arrive at random, choose an assistant by popularity, and stay for some turns."""
    rng = Random(chats.seed)
    names = count(chats.assistants * 1_000_000)
    systems = [range(n * 1_000_000, n * 1_000_000 + chats.system_tokens) for n in range(chats.assistants)]
    weights = list(accumulate([1 / (rank + 1) for rank in range(chats.assistants)]))
    due: list[tuple[float, int, _Chat]] = []
    opens_s = 0.0
    for _ in range(chats.requests):
        while not due or opens_s <= due[0][0]:
            assistant = rng.choices(range(chats.assistants), cum_weights=weights)[0]
            shared = list(systems[assistant][: chats.system_tokens // chats.block_tokens])
            heappush(due, (opens_s, next(names), _Chat(f"chat{next(names)}", chats.system_tokens, shared)))
            opens_s += rng.expovariate(chats.rate_per_s / chats.turns)
        at_s, _, chat = heappop(due)
        chat.tokens += max(1, round(rng.expovariate(1 / chats.turn_tokens)))
        while len(chat.blocks) < chat.tokens // chats.block_tokens:
            chat.blocks.append(next(names))
        output = max(1, round(rng.expovariate(1 / chats.output_tokens)))
        yield Arrival(at_s, chat.tokens, output, tuple(chat.blocks), session=chat.name)
        if rng.random() > 1 / chats.turns:
            heappush(due, (at_s + rng.expovariate(1 / chats.pause_s), next(names), chat))


@dataclass(slots=True)
class _Chat:
    name: str
    tokens: int
    blocks: list[int]


@dataclass(slots=True, frozen=True, kw_only=True)
class Agents:
    """Long conversations of programs: each answer leads to a tool call, whose result is the next turn.

    Ranges are uniform. The figures come from recorded traffic of coding agents: long system parts with tools, short
    pauses, contexts that grow until they are compacted to a summary.
    """

    requests: int = 2000
    seed: int = 0
    block_tokens: int = 512
    conversations: int = 40  #: concurrent ones; sets the load
    kinds: int = 8  #: kinds of agents, each with a system part that all its conversations share
    system_tokens: tuple[int, int] = (14_000, 23_000)
    turn_tokens: tuple[int, int] = (500, 3_000)  #: tokens that a turn adds, including the previous answer
    turns: tuple[int, int] = (20, 60)
    output_tokens: int = 489  #: mean; log-normal with a sigma of 1
    context_tokens: int = 60_000  #: beyond this, the conversation is compacted to a summary
    summary_tokens: tuple[int, int] = (1_000, 3_000)
    sub_agents: float = 0.04  #: share of turns that start a sub-agent, which begins with the system part
    sub_turns: tuple[int, int] = (5, 15)
    first_token_s: float = 1.0  #: answer times are part of the workload and do not react to waiting
    token_s: float = 0.02


def agents(drawn: Agents) -> Iterator[Arrival]:
    """Turns in order of time. When a conversation ends, another one starts at once."""
    rng = Random(f"agents {drawn.seed}")
    names = count(1)
    systems: list[tuple[int, list[int]]] = []
    for _ in range(drawn.kinds):
        tokens = rng.randint(*drawn.system_tokens)
        systems.append((tokens, [next(names) for _ in range(tokens // drawn.block_tokens)]))
    order = count()
    numbers = count()

    def opened(kind: int, turns: tuple[int, int], parent: _Agent | None) -> _Agent:
        tokens, blocks = systems[kind]
        return _Agent(f"agent{next(numbers)}", kind, tokens, list(blocks), rng.randint(*turns), parent)

    due: list[tuple[float, int, _Agent]] = []
    for _ in range(drawn.conversations):
        agent = opened(rng.randrange(drawn.kinds), drawn.turns, None)
        agent.turns = rng.randint(1, agent.turns)  # conversations start at a random point of their course
        agent.grow(min(drawn.context_tokens - agent.tokens, agent.turns * sum(drawn.turn_tokens) // 2), names, drawn)
        heappush(due, (rng.uniform(0.0, 30.0), next(order), agent))
    for _ in range(drawn.requests):
        at_s, _, agent = heappop(due)
        agent.grow(rng.randint(*drawn.turn_tokens), names, drawn)
        if agent.tokens > drawn.context_tokens:
            agent.tokens, agent.blocks = systems[agent.kind][0], list(systems[agent.kind][1])
            agent.grow(rng.randint(*drawn.summary_tokens), names, drawn)
        output = max(1, round(rng.lognormvariate(log(drawn.output_tokens) - 0.5, 1.0)))
        yield Arrival(at_s, agent.tokens, output, tuple(agent.blocks), session=agent.name)
        at_s += drawn.first_token_s + output * drawn.token_s + _tool_s(rng)
        agent.turns -= 1
        if agent.turns <= 0:
            agent = agent.parent or opened(rng.randrange(drawn.kinds), drawn.turns, None)
        elif agent.parent is None and rng.random() < drawn.sub_agents:
            agent = opened(agent.kind, drawn.sub_turns, agent)
        heappush(due, (at_s, next(order), agent))


def _tool_s(rng: Random) -> float:
    """Duration of a tool call: 86 % below a second, 95 % below ten, the rest up to three minutes."""
    share = rng.random()
    low, high = (0.05, 1.0) if share < 0.86 else (1.0, 10.0) if share < 0.95 else (10.0, 180.0)
    return exp(rng.uniform(log(low), log(high)))


@dataclass(slots=True)
class _Agent:
    name: str
    kind: int
    tokens: int
    blocks: list[int]
    turns: int  #: remaining turns
    parent: "_Agent | None"  #: continues when this one ends

    def grow(self, tokens: int, names: Iterator[int], drawn: Agents) -> None:
        self.tokens += tokens
        while len(self.blocks) < self.tokens // drawn.block_tokens:
            self.blocks.append(next(names))


@dataclass(slots=True, frozen=True, kw_only=True)
class Siblings:
    """Requests at random times, in groups that share a prefix; each request has its own tail."""

    requests: int
    seed: int = 0
    block_tokens: int = 512
    rate_per_s: float = 10.0  #: 0: all at once
    groups: int = 64
    prefix_tokens: int = 4096
    tail_tokens: int = 512
    output_tokens: int = 100
    spread: float = 0.0  #: sigma of the log-normal lengths of tails and answers about their means
    burst: int = 1  #: requests of one group that arrive at once
    skew: float = 1.0  #: a group's popularity is its rank to the power of minus this
    tenants: int = 1  #: all have the same texts; each has its own cache
    shift_every_s: float = 0.0  #: interval at which the least popular groups become the most popular; 0: never


def siblings(drawn: Siblings) -> Iterator[Arrival]:
    rng = Random(drawn.seed)
    weights = [(rank + 1) ** -drawn.skew for rank in range(drawn.groups)]
    prefix_blocks = drawn.prefix_tokens // drawn.block_tokens
    own = count(1 << 32)  # above all names of prefixes
    now_s = 0.0
    rank = 0
    for number in range(drawn.requests):
        if number % drawn.burst == 0:
            rank = rng.choices(range(drawn.groups), weights)[0]
        shifts = int(now_s / drawn.shift_every_s) if drawn.shift_every_s else 0
        group = (rank - shifts * max(1, drawn.groups // 8)) % drawn.groups
        tenant = rng.randrange(drawn.tenants)
        tokens = drawn.prefix_tokens + _spread(rng, drawn.tail_tokens, drawn.spread)
        output = max(1, _spread(rng, drawn.output_tokens, drawn.spread))
        tail = [next(own) for _ in range(tokens // drawn.block_tokens - prefix_blocks)]
        text = [group * prefix_blocks + block for block in range(prefix_blocks)]
        held = [tenant * drawn.groups * prefix_blocks + block for block in text]
        yield Arrival(now_s, tokens, output, (*held, *tail), (*text, *tail))
        if drawn.rate_per_s and (number + 1) % drawn.burst == 0:
            now_s += rng.expovariate(drawn.rate_per_s / drawn.burst)


def _spread(rng: Random, mean: int, sigma: float) -> int:
    return round(rng.lognormvariate(log(mean) - sigma * sigma / 2, sigma)) if sigma and mean else mean


@dataclass(slots=True, frozen=True, kw_only=True)
class Documents:
    """Questions about a few documents each (RAG); the documents precede the question, in random order."""

    requests: int = 2000
    seed: int = 0
    block_tokens: int = 512
    rate_per_s: float = 5.0
    system_tokens: int = 1024
    documents: int = 300
    document_blocks: tuple[int, int] = (1, 10)
    picked: tuple[int, int] = (1, 5)
    topics: int = 60  #: a question's documents are neighbours, so that questions about a topic share them
    skew: float = 0.9  #: a topic's popularity is its rank to the power of minus this
    question_tokens: int = 150
    output_tokens: int = 250  #: mean; log-normal with a sigma of 1


def questions(drawn: Documents) -> Iterator[Arrival]:
    """Questions at random times. Prefixes are equal only if the documents are the same from the first one on."""
    rng = Random(f"documents {drawn.seed}")
    lengths = [rng.randint(*drawn.document_blocks) for _ in range(drawn.documents)]
    weights = [(rank + 1) ** -drawn.skew for rank in range(drawn.topics)]
    names = count(1)
    tree: dict[tuple[int, int], list[int]] = {}  # (preceding block, document number) -> names of its blocks
    system = [next(names) for _ in range(drawn.system_tokens // drawn.block_tokens)]
    now_s = 0.0
    for _ in range(drawn.requests):
        topic = rng.choices(range(drawn.topics), weights)[0] * drawn.documents // drawn.topics
        near = [(topic + offset) % drawn.documents for offset in range(6)]
        blocks = list(system)
        for document in rng.sample(near, rng.randint(*drawn.picked)):
            place = (blocks[-1], document)
            if place not in tree:
                tree[place] = [next(names) for _ in range(lengths[document])]
            blocks += tree[place]
        tokens = len(blocks) * drawn.block_tokens + max(1, round(rng.expovariate(1 / drawn.question_tokens)))
        blocks += [next(names) for _ in range(tokens // drawn.block_tokens - len(blocks))]
        output = max(1, _spread(rng, drawn.output_tokens, 1.0))
        yield Arrival(now_s, tokens, output, tuple(blocks))
        now_s += rng.expovariate(drawn.rate_per_s)


@dataclass(slots=True, frozen=True, kw_only=True)
class Trees:
    """Searches for a problem's solution: `width` next steps are requested at once, then each of them is continued.

    With a depth of 1 this is self-consistency: several answers to one prompt.
    """

    requests: int = 2000
    seed: int = 0
    block_tokens: int = 512
    rate_per_s: float = 1.0  #: problems per second
    prompt_tokens: int = 4096  #: instructions and examples, shared by all problems of a kind
    kinds: int = 1
    problem_tokens: int = 1024
    step_tokens: int = 512  #: tokens that each level adds to the prompt
    width: int = 3
    depth: int = 3
    level_s: float = 5.0  #: mean time until the children of a step are requested


def searches(drawn: Trees) -> Iterator[Arrival]:
    """Requests in order of time. The children of a step have equal prompts and arrive at once."""
    rng = Random(f"trees {drawn.seed}")
    names = count(1)
    size = drawn.block_tokens
    heads = [[next(names) for _ in range(drawn.prompt_tokens // size)] for _ in range(drawn.kinds)]
    due: list[tuple[float, int, int, int, list[int]]] = []  # time, order, level, tokens, blocks of a step
    order, opens_s, sent = count(), 0.0, 0
    while True:
        while not due or opens_s <= due[0][0]:
            heappush(due, (opens_s, next(order), 1, drawn.prompt_tokens + drawn.problem_tokens, rng.choice(heads)))
            opens_s += rng.expovariate(drawn.rate_per_s)
        at_s, _, level, tokens, parent = heappop(due)
        blocks = [*parent, *(next(names) for _ in range(tokens // size - len(parent)))]
        for _ in range(drawn.width):
            if sent == drawn.requests:
                return
            sent += 1
            yield Arrival(at_s, tokens, drawn.step_tokens, tuple(blocks))
            if level < drawn.depth:
                later_s = at_s + rng.expovariate(1 / drawn.level_s)
                heappush(due, (later_s, next(order), level + 1, tokens + drawn.step_tokens, blocks))
