"""Calls that models write with faults, in every family: each is the call that was meant, or text, and never a part."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.router.text.parsers.deltas import Content, Delta, ToolCallArguments, ToolCallStart
from homing.router.text.parsers.families import TOOL_FAMILIES, choose_tools
from homing.router.text.parsers.loose_json import MAX_PYTHON
from homing.router.text.parsers.parser import AnswerParser

PARAMETERS = {"a": {"type": "integer"}, "b": {"type": "string"}, "d": {"type": "object"}}
TOOLS = {"f": {"type": "object", "properties": PARAMETERS, "required": ["a"]}, "get_time": None}
ARGUMENTS = {"a": 1, "b": "it is {x}, </b> \n", "d": {"k": [True, None, -1.5]}}
JSON = json.dumps(ARGUMENTS)


@dataclass(frozen=True)
class Form:
    """How a family writes a call: `before`, the call, `after`."""

    family: str
    before: str
    call: Callable[[str, str], str]  #: of a name and the text of the arguments
    after: str = ""
    opener: str = ""  #: what a model may write twice at the beginning
    closer: str = ""  #: what a model may leave out or write twice at the end


def _xml(text: str) -> dict[str, str]:
    return {key: each if isinstance(each, str) else json.dumps(each) for key, each in json.loads(text).items()}


def _qwen(name: str, text: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in _xml(text).items())
    return f"<function={name}>\n{inner}</function>"


def _glm(name: str, text: str) -> str:
    pairs = (f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in _xml(text).items())
    return f"{name}\n" + "".join(pairs)


def _python(name: str, text: str) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in json.loads(text).items())})"


#: Formats with JSON arguments, which the tests spoil.
JSON_FORMS = {
    "hermes": Form(
        *("hermes", "<tool_call>\n", '{{"name": "{}", "arguments": {}}}'.format, "\n</tool_call>"),
        *("<tool_call>\n", "\n</tool_call>"),
    ),
    "llama3": Form("llama3", "", '{{"name": "{}", "parameters": {}}}'.format),
    "llama3, tag": Form(
        "llama3", "<|python_tag|>", '{{"name": "{}", "parameters": {}}}'.format, opener="<|python_tag|>"
    ),
    "mistral": Form(
        *("mistral", "[TOOL_CALLS][", '{{"name": "{}", "arguments": {}}}'.format, "]", "[TOOL_CALLS]"),
    ),
    "mistral 11": Form("mistral", "[TOOL_CALLS]", "{}[ARGS]{}".format, opener="[TOOL_CALLS]"),
    "deepseek v3": Form(
        *(
            "deepseek",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
            "function<｜tool▁sep｜>{}\n```json\n{}\n```".format,
        ),
        *("<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "deepseek v3.1": Form(
        *("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "{}<｜tool▁sep｜>{}".format),
        *("<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "kimi": Form(
        *("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>"),
        "functions.{}:0<|tool_call_argument_begin|>{}".format,
        *("<|tool_call_end|><|tool_calls_section_end|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "harmony": Form(
        "harmony",
        "<|channel|>commentary ",
        "to=functions.{} <|constrain|>json<|message|>{}".format,
        "<|call|>",
        closer="<|call|>",
    ),
}
FORMS = JSON_FORMS | {
    "qwen3_coder": Form("qwen3_coder", "<tool_call>\n", _qwen, "\n</tool_call>", "<tool_call>\n", "\n</tool_call>"),
    "glm": Form("glm", "<tool_call>", _glm, "</tool_call>", "<tool_call>"),
    "pythonic": Form("pythonic", "[", _python, "]", closer="]"),
    "pythonic, tag": Form(
        *("pythonic", "<|python_start|>[", _python, "]<|python_end|>", "<|python_start|>", "<|python_end|>"),
    ),
}
MARKERS = {
    family.name: [each for each in (*family.markers, "<parameter=", "</parameter>", "</function>") if len(each) > 1]
    for family in TOOL_FAMILIES
}


def parse(text: str, form: Form, cuts: Sequence[int] = (), **options: bool) -> tuple[str, list[tuple[str, str]], bool]:
    """The content, the name and arguments of each call, and whether the answer ends as one with calls."""
    parser = AnswerParser(choose_tools("", "", form.family), None, TOOLS, "call_{:09}".format, **options)
    places = sorted({0, *(cut % (len(text) + 1) for cut in cuts), len(text)})
    deltas: list[Delta] = [delta for start, end in pairwise(places) for delta in parser.feed(text[start:end])]
    deltas += parser.finish()
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        match delta:
            case ToolCallStart(name=name):
                calls.append((name, ""))
            case ToolCallArguments(text=more):
                calls[-1] = (calls[-1][0], calls[-1][1] + more)
    return "".join(each.text for each in deltas if isinstance(each, Content)), calls, parser.called


def check(text: str, form: Form, cuts: Sequence[int] = ()) -> tuple[str, list[tuple[str, str]], bool]:
    """What `parse` finds, after checking that it is the same in pieces and that every call is complete."""
    content, calls, called = found = parse(text, form)
    assert parse(text, form, range(len(text))) == found
    assert parse(text, form, cuts) == found
    for name, arguments in calls:
        assert name
        assert isinstance(json.loads(arguments), dict)
    assert calls or not called
    if not calls and form.family != "harmony":
        assert content == text
    return found


#: Faults in the text of the arguments that leave no doubt; `{}` stands for JSON.
UNDOUBTED = {
    "as it should be": "{}".format,
    "trailing comma": lambda text: text[:-1] + ",}",
    "trailing commas inside": lambda text: text.replace("]}", ",],}"),
    "Python": lambda text: repr(json.loads(text)),
    "Python's names in JSON": lambda text: text.replace("true", "True").replace("null", "None"),
    "JSON's names in Python": lambda text: repr(json.loads(text)).replace("True", "true").replace("None", "null"),
    "line feed in a string": lambda text: text.replace("\\n", "\n"),
    "in a string": json.dumps,
    "white space": lambda text: f"  {text}\n ",
    "code block": "```json\n{}\n```".format,
    "code block without a language": "```\n{}\n```".format,
}


@pytest.mark.parametrize("fault", UNDOUBTED)
@pytest.mark.parametrize("name", JSON_FORMS)
def test_arguments_whose_meaning_is_clear_are_mended(name: str, fault: str):
    """Models trained on Python write its literals, and small ones forget or repeat commas and quotes."""
    form = JSON_FORMS[name]
    if "block" in fault and ('"name"' in form.call("", "") or "```" in form.call("", "")):
        return  # a block belongs around the whole call, or is part of the format
    text = form.before + form.call("f", UNDOUBTED[fault](JSON)) + form.after

    content, calls, called = check(text, form)

    assert (content, [(each, json.loads(arguments)) for each, arguments in calls]) == ("", [("f", ARGUMENTS)])
    assert called


@pytest.mark.parametrize("written", ["null", '""', "[]", "{}", "None", ""])
@pytest.mark.parametrize("name", JSON_FORMS)
def test_no_arguments_are_an_empty_object(name: str, written: str):
    """Clients call `f(**arguments)`."""
    form = JSON_FORMS[name]
    text = form.before + form.call("get_time", written) + form.after

    if written or '"name"' not in form.call("", ""):
        assert check(text, form) == ("", [("get_time", "{}")], True)
    else:
        assert check(text, form) == (text, [], False)


@pytest.mark.parametrize("name", FORMS)
def test_a_marker_that_is_missing_or_written_twice_makes_no_difference(name: str):
    """Nor does one of its beginnings at the end of the text."""
    form = FORMS[name]
    call = form.call("f", JSON)
    whole = form.before + call + form.after
    texts = [whole, form.opener + whole, whole + form.closer, "\n" + whole]
    if form.closer and form.family != "harmony":  # its markers are single tokens
        texts += [whole[:-length] for length in range(1, len(form.closer) + 1)]
    if "</tool_call>" in form.closer:
        texts += [whole.replace("</tool_call>", each) for each in ("</tool_calls>", "</tool>", "</tool_call")]
        texts += [whole + "\n<tool_call>"]

    for text in texts:
        content, calls, called = check(text, form)
        assert [(each, json.loads(arguments)) for each, arguments in calls] == [("f", ARGUMENTS)], text
        assert content.strip() == ""
        assert called


@pytest.mark.parametrize("name", FORMS)
def test_a_call_of_a_tool_that_is_not_there_is_a_call_in_every_family(name: str):
    """The agent can answer that there is no such tool; raw markup would end its loop."""
    form = FORMS[name]
    text = form.before + form.call("other.tool-1", '{"a": 1}') + form.after

    [(called, arguments)] = check(text, form)[1]
    assert (called, list(json.loads(arguments))) == ("other.tool-1", ["a"])
    assert parse(text, form, unknown_names=False)[1] == []


@pytest.mark.parametrize("name", FORMS)
def test_text_before_and_after_a_call_stays(name: str):
    """Without the markers, wherever they are."""
    form = FORMS[name]
    if form.family == "harmony" or not form.before.startswith(("<", "[TOOL")):
        return
    whole = form.before + form.call("f", JSON) + form.after

    content, calls, _ = check(f"See: {whole} So. {form.closer}", form)

    assert [each for each, _ in calls] == ["f"]
    assert "".join(content.split()) == "See:So."


@pytest.mark.parametrize("name", FORMS)
@given(data=st.data())
def test_a_call_that_is_cut_anywhere_is_whole_or_text(name: str, data: st.DataObject):
    """A limit or a stop string may end the answer at each character."""
    form = FORMS[name]
    whole = form.before + form.call("f", JSON) + form.after
    text = whole[: data.draw(st.integers(0, len(whole)))]

    content, calls, called = check(text, form, data.draw(st.lists(st.integers(0, 999), max_size=9)))

    assert not calls or [(each, json.loads(arguments)) for each, arguments in calls] == [("f", ARGUMENTS)]
    assert called == bool(calls)
    if calls:
        assert content == ""
    elif form.family == "harmony" and "<|message|>" in text:
        assert content == text.removesuffix("<|call|>")


@pytest.mark.parametrize("name", FORMS)
@given(data=st.data())
def test_a_spoilt_call_is_a_call_or_text(name: str, data: st.DataObject):
    """A part is missing, doubled or overwritten: what comes of it is complete, and no marker of it is left over."""
    form = FORMS[name]
    whole = form.before + form.call("f", JSON) + form.after
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, min(len(whole), start + 30)))
    pieces = [*MARKERS[form.family], "", "", whole[start:end] * 2, "oops", "'", '"', "{", "}", "\n", ",", "```"]
    piece = data.draw(st.sampled_from(pieces))
    text = whole[:start] + piece + whole[end:]

    content, calls, _ = check(text, form, data.draw(st.lists(st.integers(0, 999), max_size=9)))

    if calls and piece == "":
        assert not any(marker in content for marker in MARKERS[form.family])


@pytest.mark.parametrize("name", FORMS)
@given(data=st.data())
def test_a_call_after_a_spoilt_one_is_found(name: str, data: st.DataObject):
    """Unless the first one has swallowed it; the order and completeness of calls hold in any case."""
    form = FORMS[name]
    first = form.before + form.call("f", JSON) + form.after
    second = form.before + form.call("get_time", "{}") + form.after
    start = data.draw(st.integers(0, len(first)))
    text = first[:start] + first[data.draw(st.integers(start, len(first))) :] + "\n" + second

    _, calls, _ = check(text, form, data.draw(st.lists(st.integers(0, 999), max_size=9)))

    assert [each for each, _ in calls if each in TOOLS] in ([], ["f"], ["get_time"], ["f", "get_time"])


BOTH = ["f", "get_time"]


@pytest.mark.parametrize(
    ("family", "text", "wanted"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}\n{"name": "get_time"}</tool_call>', BOTH),
        ("hermes", '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "get_time"}]</tool_call>', BOTH),
        ("hermes", '<tool_call>\n```json\n{"name": "f", "arguments": {"a": 1}}\n```\n</tool_call>', ["f"]),
        ("hermes", '<tool_call>{{"name": "f", "arguments": {"a": 1}}}</tool_call>', ["f"]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', ["f"]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call>', ["f"]),
        ("hermes", '<tool_call>{"function": {"name": "f", "arguments": {"a": 1}}}</tool_call>', ["f"]),
        ("hermes", "<tool_call>{'name': 'f', 'arguments': {'a': 1,}}</tool_call>", ["f"]),
        ("qwen3_coder", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', ["f"]),
        ("qwen3_coder", '<function="f"><parameter="a">1</parameter></function>', ["f"]),
        ("qwen3_coder", "<function=f><parameter=a>1</parameter></tool_call>", ["f"]),
        ("qwen3_coder", "<function=f><parameter=a>1</parameter></function><function=get_time></function>", BOTH),
        ("glm", "<tool_call>f<arg_key>a<arg_value>1</arg_value></tool_call>", ["f"]),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>", ["f"]),
        ("kimi", '<|tool_call_begin|>functions.f<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>', ["f"]),
        ("llama3", '```json\n{"name": "f", "parameters": {"a": 1}}\n```', ["f"]),
        ("llama3", '{"name": "f", "parameters": {"a": 1}};', ["f"]),
        ("pythonic", "[f(a=1),]", ["f"]),
        ("pythonic", "[[f(a=1)]]", ["f"]),
        ("hermes", '<tool_call>Sure! {"name": "f", "arguments": {"a": 1}}</tool_call>', []),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "one" "two"}}</tool_call>', []),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', []),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>', []),
        ("hermes", '<tool_call>{"name": "f g", "arguments": {}}</tool_call>', []),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}, "parameters": {}}</tool_call>', []),
        ("llama3", '{"name": "Bob"}', []),
        ("llama3", '{"name": "f", "age": 3}', []),
        ("llama3", "```python\nprint(1)\n```", []),
        ("pythonic", "[1, 2]", []),
        ("pythonic", "[see(here)]", []),
        ("pythonic", "[f(a=__import__('os').getcwd())]", []),
        ("mistral", "[TOOL_CALLS] is a marker", []),
    ],
)  # fmt: skip
def test_forms_seen_in_the_wild(family: str, text: str, wanted: list[str]):
    """From public reports about small and quantized models."""
    content, calls, _ = check(text, Form(family, "", "{}{}".format))

    assert [each for each, _ in calls] == wanted
    assert not wanted or (content == "" and json.loads(calls[0][1]) == {"a": 1})


@pytest.mark.parametrize(
    ("value", "after"),
    [
        ("<x><parameter>q</parameter></x>", "\n</parameter>\n</function>"),
        ("a </function> b", "\n</parameter>\n</function>"),
        ("<function=g>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>.", "\n</parameter>\n</function>"),
        ("<tool_call>\n{}\n</tool_call>\n", "\n</parameter>\n</function>"),
        ("<tool_call>{}</tool_call>", "\n</parameter>\n</function>"),
        ("<parameter=unknown>\n1\n</parameter>.", "\n</parameter>\n</function>"),
        ("hi", "\n</function>\n</tool_call>"),
        ("hi", "\n</tool_call>"),
        ("hi", "\n</parameters>\n</function>\n</tool_call>"),
        ("hi", "\n</b>\n</function>\n</tool_call>"),
        ("hi", "\n</parameter>\n</parameter>\n</function>"),
    ],
)
def test_tags_inside_of_values_and_missing_ones(value: str, after: str):
    """Values are not escaped: an agent that edits XML, or this parser, writes such values."""
    form = FORMS["qwen3_coder"]
    text = f"<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n{value}{after}"

    content, calls, _ = check(text, form)

    assert (content, [json.loads(arguments) for _, arguments in calls]) == ("", [{"a": 1, "b": value}])


@pytest.mark.parametrize("closer", ["", "</parameter1>\n", "</b>\n", "</param>\n"])
def test_a_value_without_its_closing_tag_does_not_swallow_the_next(closer: str):
    """The next parameter of the tool begins it."""
    text = f"<function=f>\n<parameter=b>\nx\n{closer}<parameter=a>\n1\n</parameter>\n</function>"

    assert check(text, FORMS["qwen3_coder"])[1] == [("f", '{"b": "x", "a": 1}')]


def test_a_call_that_python_would_read_for_seconds_is_text():
    """Reading it would hold up all other answers; a long string in it does not."""
    form = FORMS["hermes"]
    call = '<tool_call>{{"name": "f", "arguments": {{"a": 1, "b": {},}}}}</tool_call>'
    many, long = call.format("[" + "1," * MAX_PYTHON + "]"), call.format(json.dumps("[1, 2]" * MAX_PYTHON))

    assert parse(many, form)[:2] == (many, [])
    assert json.loads(parse(long, form)[1][0][1])["b"] == "[1, 2]" * MAX_PYTHON


@pytest.mark.parametrize("space", ["", " \n"])
def test_a_tag_that_is_repeated_without_end_takes_no_longer_than_other_text(space: str):
    """Models get stuck like this; each repetition was a search through all of them, seconds for 40,000."""
    text = "<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nhi\n" + f"</parameter>{space}" * 20_000

    _, calls, _ = parse(text + "</function>", FORMS["qwen3_coder"])

    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("f", {"a": 1, "b": "hi"})]
