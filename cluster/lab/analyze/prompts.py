"""Converts requests to prompts: named blocks for the analysis, and texts for the advice on their order.

Uses tokenizers and block hashes; counts nothing. Prompts with different models or cache salts share nothing, as in a
running cluster. Tokenizing takes most of an analysis's time; the tokenizer's cache saves it for repeated text.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ....kvcache.hashing import BlockHash, BlockHasher, canonical, tenant_root, token_bytes
from ....router.errors import TemplateRefusal
from ....router.text.template import TemplateInput
from ....router.text.tokenizer import TextModel
from ...errors import LogUnreadable
from ..recorded_trace import TraceRequest
from .log_analysis import LoggedPrompt
from .order import Part
from .records import Record, TextRequest

_NO_MODEL = BlockHash(bytes(16))


@dataclass(slots=True, frozen=True)
class AnalyzedPrompt(LoggedPrompt):
    """One request, ready for both analyses."""

    parts: tuple[Part, ...] = ()  #: empty if the log has no text


def prefix_names(numbers: dict[tuple[int, int], int], block_ids: Iterable[int]) -> list[int]:
    """Return a number for each prefix of these blocks; new prefixes are numbered consecutively and kept in `numbers`.

    A trace may give equal ids to equal blocks after different prefixes, which cannot be shared in a cache.
    """
    names: list[int] = []
    name = -1
    for block_id in block_ids:
        name = numbers.setdefault((name, block_id), len(numbers))
        names.append(name)
    return names


class TracePrompts:
    """Prompts of a trace that contains block ids."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._names: dict[tuple[int, int], int] = {}
        self.refused = 0

    def prompts(self, records: Iterable[Record]) -> Iterator[AnalyzedPrompt]:
        """Yield the prompts in order. Raises LogUnreadable if the number of ids does not match the block size."""
        for number, request in enumerate(records, 1):
            assert isinstance(request, TraceRequest), f"{request} in a trace"
            ids, full = len(request.block_ids), request.input_tokens // self._block_size
            if not full <= ids <= full + 1:
                likely = 1 << max(0, (request.input_tokens // max(ids, 1)) - 1).bit_length()
                raise LogUnreadable(
                    f"request {number}: {ids} hash_ids for {request.input_tokens} tokens do not match blocks of "
                    f"{self._block_size}; give the number of tokens per id, such as --block-size {likely}"
                )
            blocks = prefix_names(self._names, request.full_blocks(self._block_size))
            yield AnalyzedPrompt(request.input_tokens, blocks, request.arrival_s)

    def close(self) -> None:
        """Do nothing: no tokenizer was loaded."""


class TextPrompts:
    """Prompts of an OpenAI log, tokenized with one tokenizer."""

    def __init__(self, text: TextModel, block_size: int, *, skip_malformed: bool = False) -> None:
        self._text = text
        self._hasher = BlockHasher(block_size, seed=0)
        self._roots: dict[tuple[str, str], BlockHash] = {}
        self._skip_malformed = skip_malformed
        self.refused = 0  #: requests that the chat template rejected

    def prompts(self, records: Iterable[Record]) -> Iterator[AnalyzedPrompt]:
        """Yield the prompts in order. Raises LogUnreadable if the chat template rejects a request."""
        for request in records:
            assert isinstance(request, TextRequest), f"{request} in a log of text"
            try:
                token_ids = self._token_ids(request.prompt)
            except TemplateRefusal as error:
                if not self._skip_malformed:
                    raise LogUnreadable(
                        f"line {request.line}: {error.message} (--skip-malformed counts such requests and continues)"
                    ) from error
                self.refused += 1
                continue
            key = (request.model, request.salt)
            if key not in self._roots:
                self._roots[key] = tenant_root(_NO_MODEL, salt=canonical(*(word.encode() for word in key)))
            blocks = self._hasher.chain(self._roots[key], token_bytes(token_ids))
            yield AnalyzedPrompt(len(token_ids), blocks, request.arrival_s, _parts(request.prompt))

    def close(self) -> None:
        """End the tokenizer's threads."""
        self._text.close()

    def _token_ids(self, prompt: TemplateInput | str | list[int]) -> Sequence[int]:
        match prompt:
            case TemplateInput() as chat:
                return self._text.encode_chat_now(chat)
            case str() as text:
                return self._text.encode_now([text], special_tokens=True)[0]
            case token_ids:
                return token_ids


PromptSource = TracePrompts | TextPrompts


def _parts(prompt: TemplateInput | str | list[int]) -> tuple[Part, ...]:
    if isinstance(prompt, str):
        return (Part("prompt", prompt),)
    if isinstance(prompt, list):
        return ()
    tools = [Part(f"tools[{index}]", _json(tool)) for index, tool in enumerate(prompt.tools or ())]
    messages = [
        Part(f"messages[{index}] ({message['role']})", _message_text(message))
        for index, message in enumerate(prompt.messages)
    ]
    return (*tools, *messages)


def _message_text(message: dict[str, Any]) -> str:
    text = message.get("content") or ""
    return text + _json(message["tool_calls"]) if message.get("tool_calls") else text


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
