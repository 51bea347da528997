"""The choice of a model's parsers from its template, type and settings."""

import pytest

from homing.router.text.parsers.families import (
    REASONING_FAMILIES,
    TOOL_FAMILIES,
    UnknownFamily,
    choose_reasoning,
    choose_tools,
)

#: Excerpts of chat templates, with the expected parsers for tool calls and reasoning.
TEMPLATES = {
    "Qwen2.5": ('<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args>}\\n</tool_call>', "hermes", None),
    "Qwen3": ("content.split('</think>') <tool_call>\\n{\\\"name\\\": ", "hermes", "think"),
    "Qwen3-Coder": ("<tool_call>\\n<function=example_function_name>\\n<parameter=", "qwen3_coder", None),
    "Qwen3.5": ("<|im_start|>assistant\\n<think>\\n <tool_call>\\n<function=", "qwen3_coder", "think"),
    "GLM-4.5": ("'\\n<tool_call>' + tc.name <arg_key>{{ k }}</arg_key> </think>", "glm", "think"),
    "DeepSeek-V3": ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "deepseek", None),
    "DeepSeek-R1": ("<｜tool▁calls▁begin｜> content.split('</think>')", "deepseek", "think"),
    "Kimi-K2": ("<|tool_calls_section_begin|>", "kimi", None),
    "Mistral-7B": ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral", None),
    "Magistral": ("[THINK] [TOOL_CALLS]", "mistral", "mistral"),
    "Llama-3.1": ("<|python_tag|>", "llama3", None),
    "Llama-3.2": ('Respond in the format {"name": function name, "parameters": dictionary', "llama3", None),
    "Llama-4": ("Use exact format: [func_name1(param1=value1), func_name2(...)]", "pythonic", None),
    "gpt-oss": ("<|start|>assistant<|channel|>analysis<|message|>", "harmony", "harmony"),
    "without tools": ("{{ message.content }}", None, None),
}


def name_of(family) -> str | None:
    return family and family.name


@pytest.mark.parametrize("model", TEMPLATES)
def test_a_template_tells_the_family(model):
    """A model writes the format that its template shows."""
    template, tools, reasoning = TEMPLATES[model]

    assert name_of(choose_tools(template, "llama")) == tools
    assert name_of(choose_reasoning(template, "llama")) == reasoning


def test_without_a_template_the_type_of_the_model_tells():
    """A template without tools means that no calls are expected, so the type counts only without a template."""
    assert name_of(choose_tools("", "qwen3")) == "hermes"
    assert name_of(choose_tools("", "gpt_oss")) == "harmony"
    assert choose_tools("", "gpt2") is None
    assert choose_reasoning("", "gpt2") is None


def test_a_setting_comes_before_the_template():
    """The setting accepts our name of a family as well as vLLM's and SGLang's."""
    template = TEMPLATES["Qwen3"][0]

    assert name_of(choose_tools(template, "", "qwen3_coder")) == "qwen3_coder"
    assert name_of(choose_tools(template, "", "llama3_json")) == "llama3"
    assert name_of(choose_reasoning(template, "", "deepseek_r1")) == "think"
    assert choose_tools(template, "", "none") is None
    assert choose_reasoning(template, "", "none") is None


def test_an_unknown_setting_is_an_error_with_the_nearest_spelling():
    """The message also lists all names."""
    with pytest.raises(UnknownFamily, match=r"--tool-call-parser: no parser 'hermess'; did you mean 'hermes'\?"):
        choose_tools("", "", "hermess")
    with pytest.raises(UnknownFamily, match=r"--reasoning-parser: no parser 'thinking'; did you mean 'think'\?"):
        choose_reasoning("", "", "thinking")


def test_names_are_unique():
    """A setting must identify exactly one family."""
    for families in (TOOL_FAMILIES, REASONING_FAMILIES):
        names = [name for family in families for name in (family.name, *family.aliases)]
        assert len(names) == len(set(names))


def test_a_prompt_that_ends_with_an_opener_begins_reasoning():
    """With thinking turned off, templates close the reasoning block again, and the answer starts outside of it."""
    think = choose_reasoning("", "", "think")

    assert think.leaves_open("<|im_start|>assistant\n<think>\n")
    assert not think.leaves_open("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_the_guided_part_of_an_answer_begins_behind_its_reasoning():
    """Reasoning may be opened by the prompt, by the model or not at all; harmony marks the start of the answer."""
    think, harmony = choose_reasoning("", "", "think"), choose_reasoning("", "", "harmony")

    def found(family, prompt, *, calls=False, may_open=True):
        return family.guided_from(prompt, calls=calls, may_open=may_open)

    assert found(think, "<|im_start|>assistant\n<think>\n") == ("", "</think>")
    assert found(think, "<|im_start|>assistant\n") == ("<think>", "</think>")
    assert found(think, "<|im_start|>assistant\n", may_open=False) == ("", "")
    assert found(think, "<think>\n\n</think>\n\n") == ("", "")
    assert found(harmony, "<|start|>assistant") == ("", "<|channel|>final<|message|>")
    assert found(harmony, "<|start|>assistant", calls=True) == ("", "")
    assert found(harmony, "<|channel|>analysis<|message|>", calls=True) == ("", "<|end|><|start|>assistant")
