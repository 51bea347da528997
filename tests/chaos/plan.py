"""What a run does, as values: questions, clients that ask them in turn, and the order of faults. Drawn from one seed.

Knows nothing of clusters, sockets or clocks: the same seed gives the same plan anywhere.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

#: Texts that questions begin with, of a few blocks each: prefixes that requests share.
SUBJECTS = ("a fox", "a river", "an old clock", "the sea in winter")
SHARED_SENTENCES = 6


@dataclass(slots=True, frozen=True)
class Question:
    """A request whose answer is fixed: greedy, or drawn with a seed."""

    number: int
    prompt: str
    max_tokens: int
    temperature: float
    seed: int

    def body(self, *, streamed: bool, timeout_s: float) -> dict[str, Any]:
        """For `/v1/completions`. `logprobs` makes every token visible by itself."""
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
    """Asks one question after another, each when the answer before is over, round and round."""

    number: int
    streamed: bool
    questions: tuple[int, ...]


@dataclass(slots=True, frozen=True)
class Strike:
    """One fault, and when it comes after the load has begun."""

    fault: str
    after_s: float
    draw: float  #: 0 ≤ draw < 1: which of those that it could hit
    quiet_s: float = 0.0  #: before that, the clients take their time for so long


@dataclass(slots=True, frozen=True)
class Plan:
    """Everything that is asked."""

    questions: tuple[Question, ...]
    clients: tuple[Client, ...]


def make_plan(
    seed: int, *, questions: int = 12, clients: int = 4, least_tokens: int = 40, most_tokens: int = 200
) -> Plan:
    """Half of the clients stream, and half of the questions are greedy."""
    rng = Random(seed)
    asked = tuple(_question(rng, number, rng.randint(least_tokens, most_tokens)) for number in range(questions))
    order = list(range(questions))
    asking = []
    for number in range(clients):
        rng.shuffle(order)
        asking.append(Client(number, streamed=number % 2 == 0, questions=tuple(order)))
    return Plan(asked, tuple(asking))


def strikes(seed: int, faults: Sequence[str]) -> Iterator[Strike]:
    """All faults in a drawn order, again and again."""
    rng = Random(seed)
    order = list(faults)
    while order:
        rng.shuffle(order)
        for fault in order:
            yield Strike(fault, after_s=rng.uniform(1.0, 2.0), draw=rng.random())


def spread(drawn: Iterable[Strike], quiet_s: float, spared: Collection[str]) -> Iterator[Strike]:
    """Strikes with rests between them; those of the `spared` kinds always hit the last of those they could.

    So the first replica lives from the first strike to the last one, and the course of its memory can be read.
    """
    for strike in drawn:
        draw = (1 + strike.draw) / 2 if strike.fault in spared else strike.draw
        yield replace(strike, quiet_s=quiet_s, draw=draw)


def _question(rng: Random, number: int, max_tokens: int) -> Question:
    subject = SUBJECTS[number % len(SUBJECTS)]
    prompt = f"This is a story about {subject}. " * SHARED_SENTENCES + f"Part {number}:"
    return Question(number, prompt, max_tokens, temperature=float(number % 2), seed=rng.getrandbits(32))
