"""Whole answers: every step of a generation joined by choice, then one body."""

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...replica.messages import PositionLogprobs
from ..text.logprobs import TokenAt
from .answers import ENCODER, Usage, usage
from .connection import while_connected
from .generation import Choice, Generation, Step
from .headers import answer_headers


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
        self.tokens += step.tokens
        if step.prompt_logprobs is not None:
            self.prompt_logprobs = step.prompt_logprobs


#: Makes the body from the choices in order and the usage.
Compose = Callable[[list[Collected], Usage], object]


class WholeAnswer(Response):
    """The response of a generation that is not streamed."""

    media_type = "application/json"

    def __init__(self, generation: Generation, compose: Compose) -> None:
        super().__init__()
        self._generation = generation
        self._compose = compose

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate, then send. Raises RouterError, and ClientGoneError when the client leaves meanwhile."""
        generation = self._generation
        collected = [Collected(choice) for choice in generation.choices]
        with generation.closing():
            await while_connected(receive, self._collect(collected))
        counts = usage(generation.prompt_tokens, generation.generated_tokens, generation.cached_tokens)
        response = Response(
            ENCODER.encode(self._compose(collected, counts)),
            headers=answer_headers(generation.replicas, generation.cached_tokens, generation.pinned_tokens),
            media_type=self.media_type,
        )
        await response(scope, receive, send)

    async def _collect(self, collected: list[Collected]) -> None:
        async with aclosing(self._generation.steps()) as steps:
            async for step in steps:
                collected[step.choice.index].add(step)
