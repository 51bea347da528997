"""Whole answers: every step of a generation joined by choice, then one body."""

from collections.abc import Callable
from dataclasses import dataclass, field

from ...replica.messages import PositionLogprobs
from ..errors import RouterError
from ..text.logprobs import TokenAt
from .answers import ENCODER, Usage
from .exchange import Exchange
from .generation import Answer, Choice, Generation, Step


@dataclass(slots=True)
class Collected:
    """One choice's whole answer."""

    choice: Choice
    parts: list[str] = field(default_factory=list)
    tokens: list[TokenAt] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None

    @property
    def text(self) -> str:
        """The answer's text."""
        return "".join(self.parts)

    def add(self, step: Step) -> None:
        """Append what a step brought."""
        self.parts.append(step.text)
        self.tokens.extend(step.tokens)
        if step.prompt_logprobs is not None:
            self.prompt_logprobs = step.prompt_logprobs


#: Makes the body from the choices in order and the usage.
Compose = Callable[[list[Collected], Usage], object]


class WholeAnswer(Answer):
    """The answer of a generation that is not streamed."""

    def __init__(self, exchange: Exchange, compose: Compose) -> None:
        self._exchange = exchange
        self._compose = compose
        self._collected: dict[int, Collected] = {}

    def step(self, step: Step) -> None:
        """See `Answer.step`."""
        collected = self._collected.get(step.choice.index)
        if collected is None:
            collected = self._collected[step.choice.index] = Collected(step.choice)
        collected.add(step)

    def end(self, generation: Generation) -> None:
        """See `Answer.end`."""
        collected = [self._collected[choice.index] for choice in generation.choices]
        body = ENCODER.encode(self._compose(collected, generation.usage()))
        self._exchange.respond(body, headers=generation.headers())

    def fail(self, generation: Generation, error: RouterError) -> bool:  # noqa: ARG002
        """See `Answer.fail`."""
        return False
