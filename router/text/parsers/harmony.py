"""The format of gpt-oss: messages in channels, which carry reasoning, tool calls and answers.

    <|channel|>analysis<|message|>REASONING<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
    <|constrain|>json<|message|>{...}<|call|>

(one line). The recipient may also precede `<|channel|>`. Text on `final`, and on `commentary` without a recipient (a
preamble), is content. A message to a recipient that is not a tool of the request stays text, including its header.

Source: `docs/format.md` of openai/harmony. Its package `openai-harmony` is not used: it reads token ids and downloads
its own vocabulary, while parsers get text.
"""

import re

from .calls import CallScanner, is_object
from .scanner import Malformed, Markers, Steps

MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_ENDS = Markers("<|start|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")


def harmony(p: CallScanner, *, in_reasoning: bool, reasoning: bool) -> Steps[None]:
    """Read a whole answer. `in_reasoning`: the prompt opened `analysis`. `reasoning`: separate it from the content."""
    sink = p.reasoning if in_reasoning and reasoning else p.content
    while True:
        found = yield from p.stream(_ENDS, sink)
        if found is None:
            if p.open and is_object("".join(p.written)):  # the token that ends a call also ends the answer
                p.end()
            return
        if p.open:
            p.end()
        sink = p.content
        if found not in ("<|start|>", "<|channel|>"):
            p.forget()
            continue
        try:
            yield from p.until("<|message|>")
            yield from p.expect("<|message|>")
            header = p.text[: p.at]
            channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
            if recipient is not None:
                p.start(recipient[1])
                sink = p.arguments
            elif reasoning and channel is not None and channel[1] == "analysis":
                sink = p.reasoning
            p.forget()
        except Malformed:
            p.content(p.text[:1])
            p.text, p.at = p.text[1:], 0
