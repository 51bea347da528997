"""Properties of the parser of answers, for all families."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from homing.router.text.parsers.deltas import Content, Delta, Reasoning, ToolCallArguments, ToolCallStart
from homing.router.text.parsers.families import choose_reasoning, choose_tools
from homing.router.text.parsers.parser import AnswerParser

TOOLS = {
    "f": {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "string"},
            "c": {"type": ["string", "null"]},
            "d": {"type": "object"},
        },
    },
    "get_time": None,
}
#: One answer of each family with all that its format has: reasoning, content, and two calls.
ANSWERS = {
    "hermes": '<think>\nhm\n</think>\n\nok\n<tool_call>\n{"name": "f", "arguments": {"a": "}\\"<"}}\n</tool_call>\n'
    '<tool_call>\n{"arguments": {}, "name": "get_time"}\n</tool_call>',
    "llama3": '{"name": "f", "parameters": {"a": "}\\"<"}}; {"type": "function", "name": "get_time", "parameters": {}}',
}


def joined(deltas: Sequence[Delta]) -> list[Delta]:
    """With neighbours of one kind joined, as a client sees them."""
    found: list[Delta] = []
    for delta in deltas:
        last = found[-1] if found else None
        match last, delta:
            case (Content(before), Content(text)) | (Reasoning(before), Reasoning(text)):
                found[-1] = type(delta)(before + text)
            case ToolCallArguments(index, before), ToolCallArguments(same, text) if index == same:
                found[-1] = ToolCallArguments(index, before + text)
            case _:
                found.append(delta)
    return found


def parse(family: str, text: str, cuts: Sequence[int] = (), *, reasoning: str = "none", **options: bool) -> list[Delta]:
    parser = AnswerParser(
        choose_tools("", "", family), choose_reasoning("", "", reasoning), TOOLS, "call_{:09}".format, **options
    )
    places = sorted({0, *(cut % (len(text) + 1) for cut in cuts), len(text)})
    return joined(
        [*(delta for start, end in pairwise(places) for delta in parser.feed(text[start:end])), *parser.finish()]
    )


@given(family=st.sampled_from(sorted(ANSWERS)), cuts=st.lists(st.integers(0, 10_000), max_size=30))
def test_where_the_text_is_cut_makes_no_difference(family, cuts):
    """Tokens do not end where markers do, and a stream that continues on another replica is divided differently."""
    text = ANSWERS[family]

    assert parse(family, text, cuts, reasoning="think") == parse(family, text, reasoning="think")


def test_a_hermes_answer_is_taken_apart():
    """White space around markers belongs to the format; arguments are the model's own bytes."""
    assert parse("hermes", ANSWERS["hermes"], reasoning="think") == [
        Reasoning("hm"),
        Content("ok"),
        ToolCallStart(0, "call_000000000", "f"),
        ToolCallArguments(0, '{"a": "}\\"<"}'),
        ToolCallStart(1, "call_000000001", "get_time"),
        ToolCallArguments(1, "{}"),
    ]


@given(text=st.text(alphabet='<tool_cal>{}"nme:f \n', max_size=60), cuts=st.lists(st.integers(0, 60), max_size=20))
@example(text="<tool_call>", cuts=[])
def test_text_without_a_call_of_a_known_tool_passes_unchanged(text, cuts):
    """Nothing is lost: what looked like a call is content."""
    assert parse("hermes", text, cuts) == ([Content(text)] if text else [])
