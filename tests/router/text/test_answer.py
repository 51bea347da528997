"""Properties of an answer's text and the tokens behind it."""

from homing.replica.messages import PositionLogprobs, TokenLogprob
from homing.router.backend import TokenDelta
from homing.router.text.answer import AnswerText
from homing.router.text.tokenizer import TextModel


def with_logprobs(ids: list[int]) -> list[PositionLogprobs]:
    return [PositionLogprobs(TokenLogprob(each, -0.5), [TokenLogprob(each, -0.5)]) for each in ids]


def test_a_stop_token_gives_no_text_and_no_logprobs(text_model: TextModel):
    """It ends the answer and is no part of it, also when it is an ordinary token."""
    ids = list(text_model.encode_now(["a fox."], special_tokens=False)[0])
    answer = AnswerText(text_model.detokenizer())

    delta = answer.push(
        TokenDelta(token_ids=ids, logprobs=with_logprobs(ids), finish_reason="stop", stop_token_id=ids[-1])
    )

    assert delta.text + text_model.piece(ids[-1]).decode() == "a fox."
    assert [token.token_id for token in delta.tokens] == ids[:-1]
    assert delta.ending == "stop"


def test_tokens_come_with_their_text_and_not_before(text_model: TextModel):
    """Clients align logprobs with text: a held or cut text must hold or cut its tokens."""
    ids = list(text_model.encode_now(["one STOP two"], special_tokens=False)[0])
    answer = AnswerText(text_model.detokenizer(), ["STOP"])
    text, shown = "", []

    for each in ids:
        delta = answer.push(TokenDelta(token_ids=[each], logprobs=with_logprobs([each])))
        text += delta.text
        shown += delta.tokens
        assert all(token.offset < len(text) for token in shown)
        if delta.ending:
            break

    assert (text, delta.ending) == ("one ", "stop")
    assert b"".join(text_model.piece(token.token_id) for token in shown).decode().strip() in ("one", "one S")


def test_an_answer_that_ends_inside_a_character_shows_it_as_broken(text_model: TextModel):
    """The limit of tokens may fall anywhere; what was generated is still accounted for."""
    ids = list(text_model.encode_now(["🦊"], special_tokens=False)[0])
    answer = AnswerText(text_model.detokenizer())

    delta = answer.push(TokenDelta(token_ids=ids[:1], finish_reason="length"))

    assert (delta.text, delta.ending) == ("\ufffd", "length")
