"""Model families: how each writes tool calls and reasoning, and how to recognise a model's family."""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from . import formats, guided
from .calls import CallScanner
from .guided import CallShape
from .harmony import MARKERS
from .scanner import Steps

#: Values of the settings that are not families.
AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """How a family of models writes tool calls."""

    name: str
    shapes: tuple[CallShape, ...]  #: formats of calls, chosen by template; the last is for all other templates
    #: Reads one call or one list of calls, starting at its opener; None: `harmony` reads the whole answer.
    read: Callable[[CallScanner], Steps[None]] | None = None
    #: Literals that open a call or a list of calls anywhere in the text.
    openers: tuple[str, ...] = ()
    #: Literals that end calls; dropped wherever they follow one.
    closers: tuple[str, ...] = ()
    #: Literals that open a call only at the beginning of the content.
    bare: tuple[str, ...] = ()
    #: Other literals of the format that may be special tokens.
    others: tuple[str, ...] = ()
    #: Whether a call also ends reasoning that the model left open.
    ends_reasoning: bool = False
    #: Length in characters that the template requires of a call's id; 0: any.
    id_length: int = 0
    #: The family's names in other servers.
    aliases: tuple[str, ...] = ()
    #: A model belongs to the family if its template contains all parts of one of these...
    templates: tuple[tuple[str, ...], ...] = ()
    #: ... or if it has no template and one of these types.
    model_types: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """The literals of the format. The detokenizer must not skip those that are special tokens."""
        return (*self.openers, *self.closers, *self.others)


@dataclass(frozen=True, slots=True)
class ReasoningFamily:
    """How a family of models marks reasoning."""

    name: str
    opener: str
    closer: str
    markers: tuple[str, ...]
    answer: str = ""  #: literal that begins the answer after the reasoning; empty: the answer follows the closer
    reply: str = ""  #: literal that begins a whole reply, and with which prompts usually end
    aliases: tuple[str, ...] = ()
    templates: tuple[tuple[str, ...], ...] = ()
    model_types: tuple[str, ...] = ()

    def guided_from(self, prompt: str, *, calls: bool, may_open: bool) -> tuple[str, str]:
        """The opener and the end marker of the unguided part that precedes an answer's guided part; each may be empty.

        With an opener, only answers that begin with it have an unguided part. `prompt`: the end of the prompt. `calls`:
        calls are guided; their shape describes a whole reply. `may_open`: the model may start reasoning by itself.
        """
        opened = self.leaves_open(prompt)
        if self.answer:
            if calls:
                return "", self.closer + self.reply if opened else ""
            return "", self.answer
        if opened:
            return "", self.closer
        closed = prompt.rstrip().endswith(self.closer)
        return (self.opener, self.closer) if may_open and not closed else ("", "")

    def leaves_open(self, prompt: str) -> bool:
        """Whether a prompt ends with the opener, so that the answer begins inside reasoning."""
        return prompt.rstrip().endswith(self.opener)


#: In the order in which templates are tried: specific ones before common ones.
TOOL_FAMILIES = (
    ToolFamily(
        "harmony",
        guided.HARMONY,
        others=MARKERS,
        aliases=("openai", "gpt-oss", "gpt_oss"),
        templates=(("<|channel|>", "<|message|>"),),
        model_types=("gpt_oss",),
    ),
    ToolFamily(
        "qwen3_coder",
        guided.QWEN3_CODER,
        formats.qwen3_coder,
        ("<tool_call>", "<function="),
        ("</function>", "</tool_call>"),
        ends_reasoning=True,
        aliases=("qwen3_xml",),
        templates=(("<tool_call>", "<function="),),
        model_types=("qwen3_next", "qwen3_5", "qwen3_5_moe"),
    ),
    ToolFamily(
        "glm",
        guided.GLM,
        formats.glm,
        ("<tool_call>",),
        ("</tool_call>",),
        others=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ends_reasoning=True,
        aliases=("glm45", "glm47"),
        templates=(("<tool_call>", "<arg_key>"),),
        model_types=("glm4_moe",),
    ),
    ToolFamily(
        "hermes",
        guided.HERMES,
        formats.hermes,
        ("<tool_call>",),
        ("</tool_call>",),
        ends_reasoning=True,
        aliases=("qwen", "qwen25"),
        templates=(("<tool_call>",),),
        model_types=("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    ),
    ToolFamily(
        "deepseek",
        guided.DEEPSEEK,
        formats.deepseek,
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        others=("<｜tool▁sep｜>",),
        ends_reasoning=True,
        aliases=("deepseek_v3", "deepseek_v31", "deepseekv3", "deepseekv31"),
        templates=(("<｜tool▁calls▁begin｜>",),),
        model_types=("deepseek_v3",),
    ),
    ToolFamily(
        "kimi",
        guided.KIMI,
        formats.kimi,
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        ("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        others=("<|tool_call_argument_begin|>",),
        ends_reasoning=True,
        aliases=("kimi_k2",),
        templates=(("<|tool_calls_section_begin|>",),),
        model_types=("kimi_k2",),
    ),
    ToolFamily(
        "mistral",
        guided.MISTRAL,
        formats.mistral,
        ("[TOOL_CALLS]",),
        others=("[CALL_ID]", "[ARGS]"),
        id_length=9,
        templates=(("[TOOL_CALLS]",),),
        model_types=("mistral", "mixtral", "mistral3", "ministral3"),
    ),
    ToolFamily(
        "pythonic",
        guided.PYTHONIC,
        formats.pythonic,
        ("<|python_start|>",),
        ("<|python_end|>",),
        bare=("[", "```python"),
        aliases=("llama4_pythonic",),
        templates=(("[func_name1(",), ("<|python_start|>",)),
        model_types=("llama4",),
    ),
    ToolFamily(
        "llama3",
        guided.LLAMA3,
        formats.llama3,
        ("<|python_tag|>",),
        bare=("{", "```json"),
        aliases=("llama3_json", "llama4_json"),
        templates=(("<|python_tag|>",), ('{"name": function name, "parameters":',)),
        model_types=("llama",),
    ),
)
REASONING_FAMILIES = (
    ReasoningFamily(
        "harmony",
        "<|channel|>analysis<|message|>",
        "<|end|>",
        MARKERS,
        answer="<|channel|>final<|message|>",
        reply="<|start|>assistant",
        aliases=("openai", "gpt-oss", "gpt_oss", "openai_gptoss"),
        templates=(("<|channel|>", "<|message|>"),),
        model_types=("gpt_oss",),
    ),
    ReasoningFamily("mistral", "[THINK]", "[/THINK]", ("[THINK]", "[/THINK]"), templates=(("[THINK]",),)),
    ReasoningFamily(
        "think",
        "<think>",
        "</think>",
        ("<think>", "</think>"),
        aliases=("qwen3", "deepseek_r1", "deepseek_v3", "glm45", "kimi_k2"),
        templates=(("</think>",), ("<think>",)),
        model_types=("qwen3", "qwen3_moe"),
    ),
)
Family = TypeVar("Family", bound=ToolFamily | ReasoningFamily)


class UnknownFamily(ValueError):  # noqa: N818 - says what is wrong with the setting
    """A setting names an unknown family; the message suggests the nearest spelling."""


def choose_tools(template: str, model_type: str, setting: str = AUTO) -> ToolFamily | None:
    """The tool family named by `setting`, else found by the model's templates (joined), else by its type.

    None: tool calls stay text. Raises UnknownFamily.
    """
    return _choose(TOOL_FAMILIES, "--tool-call-parser", template, model_type, setting)


def choose_reasoning(template: str, model_type: str, setting: str = AUTO) -> ReasoningFamily | None:
    """Like `choose_tools`, for reasoning. None: reasoning stays in the content."""
    return _choose(REASONING_FAMILIES, "--reasoning-parser", template, model_type, setting)


def _choose(families: Iterable[Family], flag: str, template: str, model_type: str, setting: str) -> Family | None:
    if setting == NONE:
        return None
    if setting != AUTO:
        return _named(families, flag, setting)
    for family in families:
        if any(all(part in template for part in parts) for parts in family.templates):
            return family
    return next((family for family in families if not template and model_type in family.model_types), None)


def _named(families: Iterable[Family], flag: str, setting: str) -> Family:
    names: dict[str, Family] = {}
    for family in families:
        names |= dict.fromkeys((family.name, *family.aliases), family)
    if setting not in names:
        near = difflib.get_close_matches(setting, [AUTO, NONE, *names], n=1, cutoff=0.0)
        known = ", ".join([AUTO, NONE, *names])
        raise UnknownFamily(f"{flag}: no parser {setting!r}; did you mean {near[0]!r}? Known: {known}")
    return names[setting]
