"""Whole answers: the text of a generation kept by choice, then one body."""

from collections.abc import Callable, Sequence

from ...errors import RouterError
from ...text.answer import TextDelta
from ..protocol.exchange import Exchange
from .answers import ENCODER, Usage
from .generation import Answer, Choice, Generation

#: Makes the body from the choices in order and the usage.
Compose = Callable[[Sequence[Choice], Usage], object]


class WholeAnswer(Answer):
    """The answer of a generation that is not streamed."""

    def __init__(self, exchange: Exchange, compose: Compose) -> None:
        self._exchange = exchange
        self._compose = compose

    def add(self, choice: Choice, shown: TextDelta, *, first: bool) -> None:  # noqa: ARG002
        """See `Answer.add`."""
        choice.parts.append(shown.text)
        if shown.tokens:
            choice.tokens += shown.tokens

    def end(self, generation: Generation) -> None:
        """See `Answer.end`."""
        body = ENCODER.encode(self._compose(generation.choices, generation.usage()))
        self._exchange.respond(body, headers=generation.headers())

    def fail(self, generation: Generation, error: RouterError) -> bool:  # noqa: ARG002
        """See `Answer.fail`."""
        return False
