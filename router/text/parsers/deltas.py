"""The output of a parser: parts of an answer, in the order in which the model wrote them."""

import msgspec


class Content(msgspec.Struct, frozen=True, gc=False):
    """Text of the answer itself."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """Text of the model's reasoning."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True, gc=False):
    """A call of a known tool begins; `index` counts the calls of the answer from 0."""

    index: int
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True, gc=False):
    """The next piece of the JSON text of a call's arguments."""

    index: int
    text: str


Delta = Content | Reasoning | ToolCallStart | ToolCallArguments
