"""Properties of OpenAI's logprob shapes."""

import msgspec
from openai.types.chat.chat_completion import ChoiceLogprobs
from openai.types.completion_choice import Logprobs

from homing.replica.messages import PositionLogprobs, TokenLogprob
from homing.router.text.logprobs import (
    LOWEST_LOGPROB,
    TokenAt,
    chat_logprobs,
    completion_logprobs,
    prompt_tokens,
    unique_name,
)
from homing.router.text.tokenizer import TextModel

PIECES = [b" fox", b"\xf0\x9f", b"."]
POSITION = PositionLogprobs(TokenLogprob(1, -3.0), [TokenLogprob(0, -0.1), TokenLogprob(2, float("-inf"))])


def as_json(value: object) -> object:
    return msgspec.json.decode(msgspec.json.encode(value))


def test_chat_logprobs_are_openais():
    """The shape is validated strictly; infinite numbers do not exist in JSON."""
    shape = chat_logprobs([TokenAt(1, 0, POSITION)], 2, PIECES.__getitem__)

    parsed = ChoiceLogprobs.model_validate(as_json(shape), strict=True)
    assert parsed.content is not None
    assert parsed.content[0].bytes == [0xF0, 0x9F]
    assert [top.logprob for top in parsed.content[0].top_logprobs] == [-0.1, LOWEST_LOGPROB]


def test_completion_logprobs_are_openais():
    """The token itself is always among its alternatives: evaluation tools take the greatest of them."""
    shape = completion_logprobs([TokenAt(1, 7, POSITION)], 1, PIECES.__getitem__)

    parsed = Logprobs.model_validate(as_json(shape), strict=True)
    assert parsed.text_offset == [7]
    assert parsed.top_logprobs == [{" fox": -0.1, "bytes:\\xf0\\x9f": -3.0}]


def test_parts_of_characters_keep_different_names():
    """A replacement character for each would fold them into one key."""
    assert unique_name(b"\xf0") != unique_name(b"\xf1")


def test_offsets_of_an_echoed_prompt_are_those_of_its_text(text_model: TextModel):
    """The first token has no logprob, since nothing stands before it."""
    text = "Tell me a story about a fox."
    ids = list(text_model.encode_now([text], special_tokens=True)[0])

    tokens = prompt_tokens(ids, [None] + [POSITION] * (len(ids) - 1), text_model.detokenizer())

    for token in tokens[1:]:
        assert text[token.offset :].startswith(text_model.piece(token.token_id).decode())
    assert completion_logprobs(tokens, 0, text_model.piece).token_logprobs[0] is None
