"""A run's plan as values: the questions, the clients and the order of faults, all derived from one seed.

Independent of clusters, sockets and clocks: the same seed gives the same plan everywhere.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

#: Topics of the questions. Each topic gives a shared prefix of a few blocks.
SUBJECTS = ("a fox", "a river", "an old clock", "the sea in winter")
SHARED_SENTENCES = 6


@dataclass(slots=True, frozen=True)
class Question:
    """A request whose answer is deterministic: greedy, or sampled with a seed."""

    number: int
    prompt: str
    max_tokens: int
    temperature: float
    seed: int

    def body(self, *, streamed: bool, timeout_s: float) -> dict[str, Any]:
        """The request body for `/v1/completions`. `logprobs` makes the response list each token separately."""
        body = {
            "model": "demo",
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "ignore_eos": True,
            "logprobs": 0,
            "timeout": timeout_s,
            "stream": streamed,
        }
        return body | ({"stream_options": {"include_usage": True}} if streamed else {})


@dataclass(slots=True, frozen=True)
class Client:
    """Asks its questions one after the other, in an endless cycle; the next one when the previous is answered."""

    number: int
    streamed: bool
    questions: tuple[int, ...]


@dataclass(slots=True, frozen=True)
class Strike:
    """One fault, and its time after the start of the load."""

    fault: str
    after_s: float
    draw: float  #: 0 ≤ draw < 1: selects the victim among the candidates
    quiet_s: float = 0.0  #: light load for this long before `after_s` starts


@dataclass(slots=True, frozen=True)
class Plan:
    """All questions and clients of a run."""

    questions: tuple[Question, ...]
    clients: tuple[Client, ...]


def make_plan(
    seed: int, *, questions: int = 12, clients: int = 4, least_tokens: int = 40, most_tokens: int = 200
) -> Plan:
    """Draw a plan in which half of the clients stream and half of the questions are greedy."""
    rng = Random(seed)
    asked = tuple(_question(rng, number, rng.randint(least_tokens, most_tokens)) for number in range(questions))
    order = list(range(questions))
    asking = []
    for number in range(clients):
        rng.shuffle(order)
        asking.append(Client(number, streamed=number % 2 == 0, questions=tuple(order)))
    return Plan(asked, tuple(asking))


def strikes(seed: int, faults: Sequence[str]) -> Iterator[Strike]:
    """All faults in random order, over and over, each cycle in a new order."""
    rng = Random(seed)
    order = list(faults)
    while order:
        rng.shuffle(order)
        for fault in order:
            yield Strike(fault, after_s=rng.uniform(1.0, 2.0), draw=rng.random())


def spread(drawn: Iterable[Strike], quiet_s: float, spared: Collection[str]) -> Iterator[Strike]:
    """Add a quiet time before each strike; faults in `spared` never hit the first replica (of two).

    The first replica then lives from the first strike to the last, so that its memory can be followed throughout.
    """
    for strike in drawn:
        draw = (1 + strike.draw) / 2 if strike.fault in spared else strike.draw
        yield replace(strike, quiet_s=quiet_s, draw=draw)


def _question(rng: Random, number: int, max_tokens: int) -> Question:
    subject = SUBJECTS[number % len(SUBJECTS)]
    prompt = f"This is a story about {subject}. " * SHARED_SENTENCES + f"Part {number}:"
    return Question(number, prompt, max_tokens, temperature=float(number % 2), seed=rng.getrandbits(32))
