"""The format of gpt-oss: messages in channels, which carry reasoning, tool calls and answers.

    <|channel|>analysis<|message|>REASONING<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
    <|constrain|>json<|message|>{...}<|call|>

(one line). The recipient may also precede `<|channel|>`. Text on `final`, and on `commentary` without a recipient (a
preamble), is content. A message to a recipient that is neither a function nor a tool of the request (gpt-oss calls a
browser from its training) stays text, including its header; so does a call whose arguments cannot be read.

Source: `docs/format.md` of openai/harmony. Its package `openai-harmony` is not used: it reads token ids and downloads
its own vocabulary, while parsers get text.
"""

import re
from collections.abc import Callable

from .calls import CallScanner
from .loose_json import object_text
from .scanner import Malformed, Markers, Steps

MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_ENDS = Markers("<|start|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=(functions\.)?([^\s<]+)")
_FENCE = re.compile(r"\s*```\w*\s*(.*?)\s*```\s*", re.DOTALL)


def harmony(p: CallScanner, *, in_reasoning: bool, reasoning: bool, unknown_names: bool) -> Steps[bool]:
    """Read a whole answer. Returns whether it did not end within a call.

    `in_reasoning`: the prompt opened `analysis`. `reasoning`: separate it from the content. `unknown_names`: whether a
    call counts whose function the request does not have.
    """
    sink: Callable[[str], None] = p.reasoning if in_reasoning and reasoning else p.content
    written: list[str] | None = None  #: the arguments of the call being read
    while True:
        found = yield from p.stream(_ENDS, sink)
        whole = written is None or _end_call(p, "".join(written), ended=found is None)
        if found is None:
            return whole
        sink, written = p.content, None
        if found not in ("<|start|>", "<|channel|>"):
            p.forget()
            continue
        try:
            yield from p.until("<|message|>")
            yield from p.expect("<|message|>")
            header = p.text[: p.at]
            channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
            if recipient is not None:
                p.any_name = unknown_names and recipient[1] is not None
                p.check_name(recipient[2])
                p.begin()
                written = []
                sink = written.append
            elif reasoning and channel is not None and channel[1] == "analysis":
                sink = p.reasoning
            p.forget()
        except Malformed:
            p.content(p.text[:1])
            p.text, p.at = p.text[1:], 0


def _end_call(p: CallScanner, arguments: str, *, ended: bool) -> bool:
    """Add the call being read, or give its text back. Returns whether it was a call. `ended`: the answer ended, too.

    The token that ends a call also ends the answer, so that a call without arguments may have no text.
    """
    fenced = _FENCE.fullmatch(arguments)
    at, p.at = p.at, 0  # the marker that ended the call is not part of it
    try:
        if ended and not arguments.strip() and not p.needs_nothing():
            raise Malformed
        p.call(p.name, object_text(fenced[1] if fenced else arguments))
        p.commit()
    except Malformed:
        p.content(p.give_back())
        return False
    finally:
        p.taken, p.at = None, at
    return True
