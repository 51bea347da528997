"""Measure parsing of an answer: one `feed` per token, in each state in which a long answer can be.

    python tests/bench/parsers.py [--out FILE] [--repeats N]

Figures are thread CPU time per token (4 characters), median of N answers of 2,000 tokens. "none" looks for nothing.
"""

import json
from collections.abc import Mapping
from statistics import median
from time import thread_time_ns
from typing import Any

from report import Row, arguments, publish

from homing.router.text.parsers.families import NONE, choose_reasoning, choose_tools
from homing.router.text.parsers.parser import AnswerParser

TOKENS = 2_000
GOAL_US = 2.0
PROSE = ("The quick brown fox, it is said, jumps over the lazy dog.\n" * 200)[: 4 * TOKENS]
ARGUMENTS = json.dumps({"edits": [{"line": n, "text": f'x = "{n}"'} for n in range(TOKENS // 8)]})
TOOLS: Mapping[str, Mapping[str, Any]] = {
    "edit": {"type": "object", "properties": {"edits": {"type": "array"}, "text": {"type": "string"}}}
}
#: Tool parser, reasoning parser, and the answer's text.
STATES = {
    "content: none": (NONE, NONE, PROSE),
    "content: hermes, think": ("hermes", "think", PROSE),
    "content: qwen3_coder, think": ("qwen3_coder", "think", PROSE),
    "content: deepseek, think": ("deepseek", "think", PROSE),
    "content: mistral, mistral": ("mistral", "mistral", PROSE),
    "content: llama3": ("llama3", NONE, PROSE),
    "content: harmony": ("harmony", "harmony", "<|channel|>final<|message|>" + PROSE),
    "reasoning: hermes, think": ("hermes", "think", "<think>" + PROSE),
    "reasoning: qwen3_coder, think": ("qwen3_coder", "think", "<think>" + PROSE),
    "reasoning: harmony": ("harmony", "harmony", "<|channel|>analysis<|message|>" + PROSE),
    "arguments: hermes": ("hermes", "think", '<tool_call>{"name": "edit", "arguments": ' + ARGUMENTS),
    "arguments: llama3": ("llama3", NONE, '{"name": "edit", "parameters": ' + ARGUMENTS),
    "arguments: mistral": ("mistral", "mistral", "[TOOL_CALLS]edit[ARGS]" + ARGUMENTS),
    "arguments: deepseek": ("deepseek", "think", "<｜tool▁call▁begin｜>edit<｜tool▁sep｜>" + ARGUMENTS),
    "arguments: harmony": ("harmony", "harmony", "<|channel|>commentary to=functions.edit<|message|>" + ARGUMENTS),
    "arguments: qwen3_coder, text": ("qwen3_coder", "think", "<function=edit>\n<parameter=text>\n" + PROSE),
    "arguments: qwen3_coder, array": ("qwen3_coder", "think", "<function=edit>\n<parameter=edits>\n" + ARGUMENTS),
    "arguments: glm, text": ("glm", "think", "<tool_call>edit\n<arg_key>text</arg_key><arg_value>" + PROSE),
    "arguments: pythonic": ("pythonic", NONE, "[edit(edits=" + ARGUMENTS),
}


def main() -> None:
    """Measure and print."""
    parser = arguments("Measure the cost of parsing tool calls and reasoning")
    parser.add_argument("--repeats", type=int, default=50)
    options = parser.parse_args()
    rows = [Row(name, "us", median_us(*state, options.repeats), GOAL_US) for name, state in STATES.items()]
    rows.append(Row("create and finish a parser: hermes, think", "us", creation_us(), None))
    publish(rows, options.out, ["msgspec"])


def median_us(tools: str, reasoning: str, text: str, repeats: int) -> float:
    """Median per token, including the first and the last."""
    pieces = [text[at : at + 4] for at in range(0, len(text), 4)]
    taken = []
    for _ in range(repeats):
        parser = AnswerParser(choose_tools("", "", tools), choose_reasoning("", "", reasoning), TOOLS, "call_{}".format)
        started = thread_time_ns()
        for piece in pieces:
            parser.feed(piece)
        parser.finish()
        taken.append((thread_time_ns() - started) / 1_000 / len(pieces))
    return median(taken)


def creation_us(count: int = 10_000) -> float:
    """Microseconds to create and finish a parser, without any tokens."""
    tools, reasoning = choose_tools("", "", "hermes"), choose_reasoning("", "", "think")
    started = thread_time_ns()
    for _ in range(count):
        AnswerParser(tools, reasoning, TOOLS, "call_{}".format).finish()
    return (thread_time_ns() - started) / 1_000 / count


if __name__ == "__main__":
    main()
