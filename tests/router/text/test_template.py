"""Chat templates render exactly as in transformers, with or without torch installed."""

import pytest

from homing.router.errors import TemplateRefusal
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
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_what_cannot_be_rendered_is_the_callers_error(template, said):
    """The 400 states the reason; the sandbox stops hostile templates."""
    with pytest.raises(TemplateRefusal, match=said):
        ChatTemplate(template, {}).render(TemplateInput(MESSAGES[:1]))
