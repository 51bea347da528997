"""The input that a chat template gets for a conversation."""

from homing.router.text.conversation import (
    CacheMark,
    Conversation,
    Message,
    ReasoningRequest,
    Tool,
    ToolCall,
    ToolChoice,
    function_tool,
    merge_messages,
)

USER = Message("user", "Weather?")
WEATHER = function_tool("weather", None, {"type": "object"})


def test_absent_fields_are_left_out_of_messages():
    """Templates print every field that is present."""
    call = Message("assistant", None, tool_calls=[ToolCall("weather", {"city": "Ulm"}, "c1")])
    result = Message("tool", "rain", name="weather", tool_call_id="c1")

    rendered = Conversation(messages=[USER, call, result]).template_input()

    assert rendered.messages == [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
            ],
        },
        {"role": "tool", "content": "rain", "name": "weather", "tool_call_id": "c1"},
    ]


def test_tools_that_may_not_be_called_are_not_shown():
    """A model that sees tools may call them."""
    shown = Conversation(messages=[USER], tools=[WEATHER])
    hidden = Conversation(messages=[USER], tools=[WEATHER], tool_choice=ToolChoice("none"))

    assert shown.template_input().tools == [WEATHER.definition]
    assert hidden.template_input().tools is None


def test_reasoning_becomes_arguments_of_the_template_that_others_overrule():
    """`chat_template_kwargs` take precedence; if the request sets neither, the template decides."""

    def arguments(reasoning: ReasoningRequest, **given: object) -> object:
        asked = Conversation(messages=[USER], reasoning=reasoning, template_arguments=given)
        return asked.template_input().template_arguments

    assert arguments(ReasoningRequest()) == {}
    assert arguments(ReasoningRequest(True, "high")) == {"reasoning_effort": "high", "enable_thinking": True}
    assert arguments(ReasoningRequest(effort="none")) == {"enable_thinking": False}
    assert arguments(ReasoningRequest(False), enable_thinking=True) == {"enable_thinking": True}


def test_neighbours_of_one_role_become_one_message():
    """Merging loses no text, and marks keep their place in the text."""
    thought = Message("assistant", "Oh.", reasoning="Hm.", marks=[CacheMark("a"), CacheMark("b", end=1)])
    call = Message("assistant", None, reasoning="So", tool_calls=[ToolCall("weather", {})])
    last = Message("assistant", "Rain.", marks=[CacheMark("c"), CacheMark("d", end=2)])

    [user, again, made] = merge_messages([USER, USER, thought, call, last], ("assistant",), "\n")

    assert (user, again) == (USER, USER)
    assert (made.content, made.reasoning, made.tool_calls) == ("Oh.\nRain.", "Hm.So", call.tool_calls)
    assert [(mark.param, mark.end) for mark in made.marks] == [("a", 3), ("b", 1), ("c", None), ("d", 6)]


def test_marks_name_their_message():
    """A mark on a tool counts as before all messages."""
    mark = CacheMark("tools[0].cache_control")
    tool = Tool(WEATHER.name, WEATHER.definition, mark)
    marked = Message("user", "Weather?", marks=[CacheMark("messages[1].cache_control", 60.0, 4)])

    found = Conversation(messages=[USER, marked], tools=[tool]).marks()

    assert found == [(-1, mark), (1, marked.marks[0])]
