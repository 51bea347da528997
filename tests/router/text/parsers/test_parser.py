"""Properties of the answer parser, for all families."""

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from homing.router.text.parsers.calls import resolve_refs
from homing.router.text.parsers.deltas import Content, Delta, Reasoning, ToolCallArguments, ToolCallStart
from homing.router.text.parsers.families import NONE, TOOL_FAMILIES, choose_reasoning, choose_tools
from homing.router.text.parsers.parser import AnswerParser

TYPES = {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": ["string", "null"]}, "d": {"type": "object"}}
TOOLS = {"f": {"type": "object", "properties": TYPES}, "get_time": None}
#: Tool parser, reasoning parser, an answer that calls `f` and then `get_time` without arguments, and `f`'s arguments.
ANSWERS = {
    "hermes": (
        "hermes",
        "think",
        '<think>\nhm\n</think>\n\nok\n<tool_call>\n{"name": "f", "arguments": {"a": "}\\"<\\\\"}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {}, "name": "get_time"}\n</tool_call>',
        '{"a": "}\\"<\\\\"}',
    ),
    "qwen3_coder": (
        "qwen3_coder",
        "think",
        '<think>\nhm\n</think>\n\nok\n\n<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>\n<parameter=b>\n"1"\n\n'
        "2\n</parameter>\n<parameter=c>\nNone\n</parameter>\n<parameter=d>\n{'x': True}\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        '{"a": 12, "b": "\\"1\\"\\n\\n2", "c": null, "d": {"x": true}}',
    ),
    "glm 4.5": (
        "glm",
        "think",
        "\n<think>hm</think>\nok\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>12</arg_value>\n<arg_key>b</arg_key>\n"
        "<arg_value>北京</arg_value>\n</tool_call>\n<tool_call>get_time\n</tool_call>",
        '{"a": 12, "b": "北京"}',
    ),
    "glm 4.7": (
        "glm",
        "think",
        "<think>hm</think>ok<tool_call>f<arg_key>b</arg_key><arg_value> <b> </arg_value></tool_call>"
        "<tool_call>get_time</tool_call>",
        '{"b": " <b> "}',
    ),
    "deepseek v3": (
        "deepseek",
        "think",
        "<think>\nhm\n</think>\n\nok<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"a": [1,{"b":2}]}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{}\n'
        "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        '{"a": [1,{"b":2}]}',
    ),
    "deepseek v3.1": (
        "deepseek",
        "think",
        '<think>hm</think>ok<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        '{"a": 1}',
    ),
    "kimi": (
        "kimi",
        "think",
        "<think>hm</think>ok<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"a": 1}<|tool_call_end|><|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        '{"a": 1}',
    ),
    "mistral, array": (
        "mistral",
        "mistral",
        '[THINK]hm[/THINK]ok[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "get_time", "arguments": {}}]',
        '{"a": 1}',
    ),
    "mistral, version 11": (
        "mistral",
        "mistral",
        '[THINK]hm[/THINK]ok[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]"}[TOOL_CALLS]get_time{}',
        '{"a": "[TOOL_CALLS]"}',
    ),
    "harmony": (
        "harmony",
        "harmony",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>ok<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
        "<|start|>assistant to=functions.get_time<|channel|>commentary json<|message|>{}",
        '{"a": 1}',
    ),
    "llama3": (
        "llama3",
        "think",
        '<think>hm</think>{"name": "f", "parameters": {"a": 1}}; {"type": "function", "name": "get_time"}',
        '{"a": 1}',
    ),
    "llama3, tag": (
        "llama3",
        "think",
        '<think>hm</think>ok<|python_tag|>{"name": "f", "parameters": {"a": 1}};{"name": "get_time", "parameters": {}}',
        '{"a": 1}',
    ),
    "pythonic": (
        "pythonic",
        "think",
        "<think>hm</think>[f(a=-1, b='x)]', d={\"q\": [1, true, None]}), get_time()]",
        '{"a": -1, "b": "x)]", "d": {"q": [1, true, null]}}',
    ),
    "pythonic, tag": (
        "pythonic",
        "think",
        "<think>hm</think>ok<|python_start|>[f(a=1), get_time()]<|python_end|>",
        '{"a": 1}',
    ),
}
#: Fragments of the formats, from which the tests build random texts and corrupt valid answers.
PIECES = sorted(
    {marker for family in TOOL_FAMILIES for marker in (*family.markers, *family.openers, *family.bare)}
    | {"<think>", "</think>", "[THINK]", "[/THINK]", "<parameter=", "</parameter>", "</function>", "function"}
    | {'{"name": "f", "arguments": ', '"f"', '"arguments": {', "f", "get_time", "functions.f:0", "to=functions.f", "a="}
    | {
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        '"',
        "\\",
        "'",
        ",",
        ":",
        ";",
        " ",
        "\n",
        "\n\n",
        "<",
        ">",
        "1",
        "é",
        "a=",
        "```json",
    }
)


@st.composite
def spoilt(draw: st.DrawFn) -> str:
    """A valid answer, parts of which are replaced by fragments."""
    text = draw(st.sampled_from([text for _, _, text, _ in ANSWERS.values()]))
    start = draw(st.integers(0, len(text)))
    return text[:start] + draw(st.sampled_from(PIECES)) + text[start + draw(st.integers(0, 30)) :]


SOUPS = st.lists(st.sampled_from(PIECES), max_size=25).map("".join) | spoilt()
CUTS = st.lists(st.integers(0, 10_000), max_size=30)
FAMILIES = st.sampled_from([NONE, *(family.name for family in TOOL_FAMILIES)])
REASONING = st.sampled_from([NONE, "think", "mistral", "harmony"])


def parser_of(tools: str, reasoning: str = NONE, **options: bool) -> AnswerParser:
    return AnswerParser(
        choose_tools("", "", tools), choose_reasoning("", "", reasoning), TOOLS, "call_{:09}".format, **options
    )


def parse(text: str, tools: str, reasoning: str = NONE, cuts: Sequence[int] = (), **options: bool) -> list[Delta]:
    """The deltas that a client gets when `text` arrives in pieces cut at `cuts`."""
    parser = parser_of(tools, reasoning, **options)
    places = sorted({0, *(cut % (len(text) + 1) for cut in cuts), len(text)})
    deltas = [delta for start, end in pairwise(places) for delta in parser.feed(text[start:end])]
    return joined([*deltas, *parser.finish()])


def joined(deltas: Sequence[Delta]) -> list[Delta]:
    """The deltas, with adjacent ones of the same kind joined."""
    found: list[Delta] = []
    for delta in deltas:
        match found[-1] if found else None, delta:
            case (Content(before), Content(text)) | (Reasoning(before), Reasoning(text)):
                found[-1] = type(delta)(before + text)
            case ToolCallArguments(index, before), ToolCallArguments(same, text) if index == same:
                found[-1] = ToolCallArguments(index, before + text)
            case _:
                found.append(delta)
    return found


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_is_taken_apart(answer):
    """Whitespace around markers is part of the format. JSON arguments stay unchanged; XML and Python become JSON."""
    tools, reasoning, text, arguments = ANSWERS[answer]

    found = parse(text, tools, reasoning)

    starts = [delta for delta in found if isinstance(delta, ToolCallStart)]
    assert [(start.index, start.name) for start in starts] == [(0, "f"), (1, "get_time")]
    assert [delta for delta in found if not isinstance(delta, ToolCallStart)] == [
        Reasoning("hm"),
        *([Content("ok")] if "ok" in text else []),
        ToolCallArguments(0, arguments),
        ToolCallArguments(1, "{}"),
    ]


@given(answer=st.sampled_from(sorted(ANSWERS)), cuts=CUTS, end=st.integers(0, 400), parallel=st.booleans())
def test_where_an_answer_is_cut_makes_no_difference(answer, cuts, end, parallel):
    """Token boundaries are not marker boundaries, and a continuation on another replica is cut differently."""
    tools, reasoning, text, _ = ANSWERS[answer]

    assert parse(text[:end], tools, reasoning, cuts, parallel=parallel) == parse(
        text[:end], tools, reasoning, parallel=parallel
    )


@given(text=SOUPS, tools=FAMILIES, reasoning=REASONING, cuts=CUTS, starts_in_reasoning=st.booleans())
@example(text='{"name": "f", "arguments": 1}', tools="llama3", reasoning=NONE, cuts=[28], starts_in_reasoning=False)
def test_where_any_text_is_cut_makes_no_difference(text, tools, reasoning, cuts, starts_in_reasoning):
    """This includes broken, nested and unfinished calls; the parser must not raise."""
    whole = parse(text, tools, reasoning, starts_in_reasoning=starts_in_reasoning)

    assert parse(text, tools, reasoning, cuts, starts_in_reasoning=starts_in_reasoning) == whole
    assert parse(text, tools, reasoning, range(len(text)), starts_in_reasoning=starts_in_reasoning) == whole


@pytest.mark.parametrize("tools", ["hermes", "kimi", "mistral"])
def test_a_call_of_a_tool_that_is_not_there_is_a_call(tools: str):
    """The agent can answer that there is no such tool; raw markup would end its loop."""
    text = {
        "hermes": '<tool_call>{"name": "g", "arguments": {"a": 1}}</tool_call>',
        "kimi": '<|tool_call_begin|>functions.g:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>',
        "mistral": '[TOOL_CALLS][{"name": "g", "arguments": {"a": 1}}]',
    }[tools]

    found = parse(text, tools)

    assert [(type(each), getattr(each, "name", "")) for each in found] == [
        (ToolCallStart, "g"),
        (ToolCallArguments, ""),
    ]
    assert parse(text, tools, unknown_names=False) == [Content(text)]


@given(text=SOUPS, tools=FAMILIES.filter(lambda name: name != "harmony"), cuts=CUTS)
@example(text='<tool_call>{"name": "g", "arguments": {}}</tool_call>', tools="hermes", cuts=[])
@example(text=" \n\n" * 9 + "[", tools="pythonic", cuts=[])
def test_text_without_a_call_of_a_known_tool_passes_unchanged(text, tools, cuts):
    """Text that only resembles a call must arrive as content, byte for byte."""
    found = parse(text, tools, NONE, cuts)

    if not any(isinstance(delta, ToolCallStart) for delta in found):
        assert found == ([Content(text)] if text else [])


@given(cuts=CUTS)
def test_a_call_after_many_broken_ones_is_found(cuts):
    """No text is read twice, so that a text made of broken calls cannot block the router."""
    spoilt = '<tool_call>{"a": ["\\"' * 300 + '"<'
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'

    assert parse(spoilt + call, "hermes", NONE, cuts) == [
        Content(spoilt),
        ToolCallStart(0, "call_000000000", "f"),
        ToolCallArguments(0, "{}"),
    ]


@pytest.mark.parametrize("answer", ANSWERS)
def test_held_back_is_only_what_may_begin_a_marker(answer):
    """Holding back anything else would delay the client needlessly."""
    parser = parser_of(*ANSWERS[answer][:2])
    words = ["No", " marker", " here,", " 1 < 2", "\n\nand", " <b>", " [x]", " {y}", "."]

    assert [parser.feed(word) for word in words] == [[Content(word)] for word in words]


def test_the_beginning_of_a_marker_is_held_back_with_the_white_space_before_it():
    """The held text is released once it turns out not to be a marker."""
    parser = parser_of("hermes")

    assert [parser.feed(piece) for piece in ("so \n", "<tool", "_", "kit>")] == [
        [Content("so")],
        [],
        [],
        [Content(" \n<tool_kit>")],
    ]


@pytest.mark.parametrize("answer", ANSWERS)
def test_only_the_first_call_is_returned_where_calls_may_not_be_parallel(answer):
    """Further calls are dropped, as in vLLM; text is kept."""
    tools, reasoning, text, arguments = ANSWERS[answer]

    found = parse(text, tools, reasoning, parallel=False)

    assert [delta.name for delta in found if isinstance(delta, ToolCallStart)] == ["f"]
    assert [delta for delta in found if isinstance(delta, ToolCallArguments)] == [ToolCallArguments(0, arguments)]


def test_without_tools_calls_are_not_looked_for():
    """The prompt lists no tools, so everything that the model writes is its answer."""
    text = ANSWERS["hermes"][2].partition("\n\n")[2]
    parser = AnswerParser(choose_tools("", "", "hermes"), None, {}, str)

    assert joined([*parser.feed(text), *parser.finish()]) == [Content(text)]


def test_a_broken_call_is_text():
    """All of it: of the parts of a call, an agent would make another one."""
    for text in (
        '<tool_call>{"name": "f", oops}</tool_call>',
        '<tool_call>{"name": "f", "argum',
        '<tool_call>{"name": "f", "arguments": {"a',
        '<tool_call>{"name": "f',
    ):
        assert parse(text, "hermes") == [Content(text)]


def test_a_call_that_was_cut_off_may_quote_another():
    """What an agent writes into a file must not be run."""
    for quoted in ("<function=get_time>\n</function>", "<tool_call>\n<function=get_time>\n</function>\n</tool_call>"):
        text = f"<tool_call>\n<function=f>\n<parameter=b>\n{quoted}\n and"
        assert parse(text, "qwen3_coder") == [Content(text)]


def test_reasoning_that_the_prompt_opened_needs_no_marker():
    """Prompts of Qwen3 and DeepSeek-R1 end with `<think>`, and some models repeat it."""
    for text in ("hm</think>ok", "\nhm\n</think>\n\nok", "<think>hm</think>ok"):
        assert parse(text, NONE, "think", starts_in_reasoning=True) == [Reasoning("hm"), Content("ok")]
    assert parse("hm\n", NONE, "think", starts_in_reasoning=True) == [Reasoning("hm\n")]


def test_a_marker_of_reasoning_inside_of_the_answer_is_text():
    """An answer may mention such markers."""
    assert parse("Write <think> and </think>.", NONE, "think") == [Content("Write <think> and </think>.")]


@pytest.mark.parametrize(("tools", "ends"), [("qwen3_coder", True), ("kimi", True), ("hermes", True)])
def test_a_call_ends_open_reasoning_where_models_forget_to_close_it(tools, ends):
    """vLLM does the same for Qwen3.5 and Kimi. A marker that is only mentioned in reasoning does not end it."""
    call = ANSWERS[tools][2].partition("ok")[2]

    found = parse("<think>maybe <tool_call> or\n" + call, tools, "think")

    assert found[0] == Reasoning("maybe <tool_call> or" if ends else ("maybe <tool_call> or\n" + call))
    assert any(isinstance(delta, ToolCallStart) for delta in found) == ends


@pytest.mark.parametrize("written", ['{"a": 1}', r'"{\"a\": 1}"', "null", '""', "[]", "{}"])
@given(cuts=CUTS)
def test_arguments_are_an_object_however_the_model_wrote_them(written: str, cuts: list[int]):
    """Clients call `f(**arguments)`; models write objects in strings, and null or nothing for none."""
    wanted = {"a": 1} if "a" in written else {}
    for call in (f'{{"name": "f", "arguments": {written}}}', f'{{"arguments": {written}, "name": "f"}}'):
        found = parse(f"<tool_call>{call}</tool_call>", "hermes", NONE, cuts)

        assert [type(each) for each in found] == [ToolCallStart, ToolCallArguments]
        assert json.loads(found[1].text) == wanted  # type: ignore[union-attr]


@pytest.mark.parametrize("written", ["[1]", "3", '"text"'])
def test_other_arguments_are_no_call(written: str):
    """They could not be passed to any function."""
    text = f'<tool_call>{{"arguments": {written}, "name": "f"}}</tool_call>'
    assert parse(text, "hermes") == [Content(text)]

    text = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
    assert parse(text, "hermes") == [Content(text)]


def test_a_parameter_of_any_type_keeps_the_type_of_its_json():
    """`{}` allows every value; a parameter that the tool does not have stays text."""
    tools = {"f": {"type": "object", "properties": {"v": {}, "w": {"description": "any"}}}}
    parser = AnswerParser(choose_tools("", "", "qwen3_coder"), None, tools, str)
    values = {"v": '{"id": "abc"}', "w": "8", "x": "8"}
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())

    found = joined([*parser.feed(f"<function=f>\n{inner}</function>"), *parser.finish()])

    assert json.loads(found[1].text) == {"v": {"id": "abc"}, "w": 8, "x": "8"}  # type: ignore[union-attr]


def test_ids_have_the_form_that_a_family_needs():
    """Mistral's template requires ids of nine characters, and Kimi's shows the ids that the model wrote."""
    ids = {
        name: [delta.id for delta in parse(text, tools, reasoning) if isinstance(delta, ToolCallStart)]
        for name, (tools, reasoning, text, _) in ANSWERS.items()
    }

    assert ids["hermes"] == ["call_000000000", "call_000000001"]
    assert ids["mistral, array"] == ids["mistral, version 11"] == ["000000000", "000000001"]
    assert ids["kimi"] == ["functions.f:0", "functions.get_time:1"]
    assert parse("[TOOL_CALLS]f[CALL_ID]abc123456[ARGS]{}", "mistral")[0] == ToolCallStart(0, "abc123456", "f")


def test_what_is_addressed_to_no_tool_stays_text():
    """gpt-oss calls tools from its training, such as a browser, even if the request has none."""
    text = "<|channel|>commentary to=browser.search<|message|>{}"

    assert parse(text, "harmony", "harmony") == [Content(text)]


def test_a_schema_whose_references_multiply_is_not_followed_to_the_end():
    """A client's schema of twenty references would be one of millions, in the middle of everyone's streams."""
    again = {"anyOf": [{"$ref": "#/properties/a"}] * 20}
    schema = {"properties": {"a": again, "b": {"$ref": "#/properties/c"}, "c": {"type": "integer"}}}
    tools = {"f": schema}
    parser = AnswerParser(choose_tools("", "", "glm"), None, tools, str)
    call = "<tool_call>f<arg_key>a</arg_key><arg_value>[1]</arg_value><arg_key>b</arg_key><arg_value>2</arg_value>"

    found = joined(parser.feed(call + "</tool_call>"))

    assert found[1] == ToolCallArguments(0, '{"a": [1], "b": 2}')
    assert len(json.dumps(resolve_refs(again, schema))) < 100_000


@given(value=st.text(max_size=30), cuts=CUTS)
def test_strings_in_xml_arrive_as_they_were_written(value, cuts):
    """Quotes, escapes, line feeds and other families' markers are ordinary text in a string."""
    text = value.replace("</arg_value>", "").replace("</parameter>", "")

    for tools, call in {
        "glm": f"<tool_call>f<arg_key>b</arg_key><arg_value>{text}</arg_value></tool_call>",
        "qwen3_coder": f"<function=f><parameter=b>\n{text}\n</parameter></function>",
    }.items():
        _, arguments = parse(call, tools, NONE, cuts)
        assert json.loads(arguments.text) == {"b": text}
