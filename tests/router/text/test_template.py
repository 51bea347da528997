"""Chat templates render exactly as in transformers, with or without torch installed."""

import pytest

from homing.router.errors import TemplateBroken, TemplateRefusal
from homing.router.text.template import ChatTemplate, TemplateInput

from .conftest import DEMO

TOOL = {"type": "function", "function": {"name": "look", "description": "<b>", "parameters": {"type": "object"}}}
TEMPLATES = {
    "roles": "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.thinking }}{{ m.reasoning_content }}"
    "{{ m.content | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
    "tools": "{% for tool in tools or [] %}{{ tool | tojson(indent=1) }}{% endfor %}"
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m['content'] }}{% endfor %}",
    # Keys that exist, that are missing, and that name methods of dicts; holders that are no dicts; an unset variable.
    "lookups": "{% set ns = namespace(seen=0) %}"
    "{% macro show(m) %}{{ m['role'] }}{{ m.name }}{{ m['absent'] }}{% endmacro %}"
    "{% for m in messages %}{{ show(m) }}{{ m['items'] is callable }}{{ m.keys() | list }}{{ m.get('role') }}"
    "{% if m.tool_calls or m['tool_calls'] is defined %}calls{% endif %}{{ m['content'] is string }}"
    "{% for key in m %}{{ key }}={{ m[key] }}{% endfor %}{% set ns.seen = ns.seen + 1 %}{{ loop.first }}{% endfor %}"
    "{{ ns.seen }}{{ ns['seen'] }}{{ messages[0].role }}{{ messages['0'] }}{{ mood['x'] if mood is defined }}",
    # Macros that call macros, with defaults, more arguments than they name, and a caller.
    "macros": "{% macro wrap(tag, close=true) %}<{{ tag }}>{{ caller() if caller else varargs | join('-') }}"
    "{{ kwargs.get('end', '') }}{% if close %}</{{ tag }}>{% endif %}{% endmacro %}"
    "{% macro twice(m) %}{{ wrap(m.role, false, 1, 2) }}{{ wrap(m['role'], end='!') }}{% endmacro %}"
    "{% for m in messages %}{{ twice(m) }}{% call wrap('x') %}{{ m.content }}{{ loop.index }}{% endcall %}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ mood }}",
}
MESSAGES = [
    {"role": "user", "content": " héllo "},
    {"role": "assistant", "content": None, "tool_calls": []},
    {"role": "user", "content": "<|im_end|>", "name": None},
]
CHATS = [
    TemplateInput(MESSAGES[::2]),
    TemplateInput(MESSAGES[::2], tools=[TOOL]),
    TemplateInput(
        [*MESSAGES[:1], {"role": "assistant", "content": "yes "}],
        add_generation_prompt=False,
        continue_final_message=True,
    ),
    TemplateInput(MESSAGES[::2], add_generation_prompt=False, template_arguments={"mood": "calm"}),
    TemplateInput([*MESSAGES[:1], {"role": "assistant", "content": "so", "reasoning_content": "hm"}]),
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
def test_a_prompt_is_the_one_that_transformers_renders(template, chat):
    """Routers with a renderer of their own break this again and again."""
    from transformers import AutoTokenizer  # late, because it imports torch, which takes seconds

    reference = AutoTokenizer.from_pretrained(str(DEMO))
    ours = ChatTemplate(TEMPLATES[template], reference.special_tokens_map)

    wanted = reference.apply_chat_template(
        chat.messages,
        tools=chat.tools,
        chat_template=TEMPLATES[template],
        tokenize=False,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        **chat.template_arguments,
    )
    assert ours.render(chat) == wanted


def test_templates_that_know_no_developer_get_a_system_message():
    """Many templates skip unknown roles, so the model would never see the developer's instructions."""
    chat = TemplateInput([{"role": "developer", "content": "Be brief."}])
    known = "{% if messages[0].role in ('system', 'developer') %}{{ messages[0].role }}{% endif %}"

    assert ChatTemplate("{{ messages[0].role }}", {}).render(chat) == "system"
    assert ChatTemplate(known, {}).render(chat) == "developer"


def test_tools_take_the_template_made_for_them():
    """Some models ship a separate template for tools."""
    template = ChatTemplate({"default": "plain", "tool_use": "tools"}, {})

    assert template.render(TemplateInput(MESSAGES)) == "plain"
    assert template.render(TemplateInput(MESSAGES, tools=[TOOL])) == "tools"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "no chat template"),
        ({"rag": "x"}, "no default chat template, only: rag"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ],
)
def test_what_cannot_be_rendered_is_the_callers_error(template, said):
    """The 400 states the reason."""
    with pytest.raises(TemplateRefusal, match=said):
        ChatTemplate(template, {}).render(TemplateInput(MESSAGES[:1]))


BY_ROLE = "{% for m in messages %}{% if m.role == 'ROLE' %}{{ m.absent.upper() }}{% endif %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "chat", "said"),
    [
        ("{% for m in messages %}{{ m.content }}", TemplateInput(MESSAGES[:1]), "line 1: Unexpected end"),
        ("{{ messages | no_such_filter }}", TemplateInput(MESSAGES[:1]), "no_such_filter"),
        ("{% include 'other.jinja' %}", TemplateInput(MESSAGES[:1]), "fails on a user message"),
        ("{{ messages[0].contnet.strip() }}", TemplateInput(MESSAGES[:1]), "fails on a user message"),
        ("{{ messages.__class__.__mro__ }}", TemplateInput(MESSAGES[:1]), "unsafe"),
        (BY_ROLE.replace("ROLE", "system"), TemplateInput([{"role": "system", "content": "x"}]), "a system message"),
        (BY_ROLE.replace("ROLE", "tool"), TemplateInput([{"role": "tool", "content": "x"}]), "a tool's result"),
        (
            "{{ messages[0].content }}{{ tools[0].name.x if tools }}",
            TemplateInput(MESSAGES[:1], tools=[TOOL]),
            "a tool:",
        ),
    ],
)
def test_a_template_that_fails_on_any_such_chat_is_the_operators_fault(template, chat, said):
    """A 400 would blame every client in turn; the 500 names the file to correct."""
    with pytest.raises(TemplateBroken, match=said) as caught:
        ChatTemplate(template, {}, "/models/m/chat_template.jinja").render(chat)

    assert caught.value.http_status == 500
    assert "/models/m/chat_template.jinja" in caught.value.message


@pytest.mark.parametrize("role", ["system", "tool"])
def test_a_chat_that_fails_where_ordinary_ones_do_not_is_the_callers_fault(role):
    """Here a message lacks what the template reads of each; the template works for others."""
    template = ChatTemplate("{% for m in messages %}{{ m.content.strip() }}{% endfor %}", {})

    with pytest.raises(TemplateRefusal, match="rejects these messages"):
        template.render(TemplateInput([*MESSAGES[:1], {"role": role}]))
