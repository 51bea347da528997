"""The checks that an engine must pass before it joins."""

import asyncio
from dataclasses import replace

import pytest

from homing.router.errors import ParityMismatch
from homing.router.replicas.external.http_client import Address, Answer, Client
from homing.router.replicas.external.probe import Card, EngineRequirements, examine, renders_alike

TERMS = EngineRequirements(
    model_names=("org/m", "m"), max_model_len=4096, block_size=16, canary_ids=(1, 2), max_running_requests=8
)


def examined(**fields: object) -> str:
    """Examine a matching engine with the given fields replaced; return the name of its model."""
    values: dict[str, object] = {"cards": [Card("m", None, 8192)], "canary_ids": [1, 2], "block_size": 16}
    return examine("b0", TERMS, **(values | fields))


def test_what_an_engine_does_not_tell_is_not_held_against_it() -> None:
    """SGLang has no /tokenize with ids, and not every server has metrics."""
    assert examined(cards=[Card("m")], canary_ids=None, block_size=None) == "m"


def test_a_model_is_known_by_the_path_it_was_loaded_from_and_called_by_its_name() -> None:
    """vLLM's --served-model-name may be anything."""
    assert examined(cards=[Card("x"), Card("alias", "org/m")]) == "alias"


@pytest.mark.parametrize(
    ("fields", "field", "remedy"),
    [
        ({"cards": [Card("other")]}, "model", "--backend-model"),
        ({"cards": []}, "model", "--backend-model"),
        ({"cards": [Card("m", None, 2048)]}, "max_model_len", "--max-model-len 2048"),
        ({"canary_ids": [1, 3]}, "tokenizer", "MODEL must be the folder"),
        ({"block_size": 32}, "block_size", "--block-size 32"),
    ],
)
def test_what_differs_is_refused_with_a_remedy(fields: dict[str, object], field: str, remedy: str) -> None:
    """The error tells the operator what to do."""
    with pytest.raises(ParityMismatch, match=remedy) as refused:
        examined(**fields)

    assert refused.value.field == field


@pytest.mark.parametrize(
    ("answers", "alike"),
    [
        ([(200, b'{"tokens": [5, 6]}'), (200, b'{"tokens": [7]}')], True),
        ([(200, b'{"tokens": [5, 6]}'), (200, b'{"tokens": [8]}')], False),
        ([(200, b'{"tokens": [5]}')], False),
        ([(404, b"")], None),
        ([(200, b'{"tokens": [5, 6]}'), (400, b"")], None),
    ],
)
async def test_another_chat_template_is_noticed_where_the_engine_shows_it(
    monkeypatch: pytest.MonkeyPatch, answers: list[tuple[int, bytes]], alike: bool | None
) -> None:
    """It is no reason to refuse: answers are right, and only the hits of chats are uncertain."""
    client = Client(Address.of("http://x"), loop=asyncio.get_running_loop())
    left = iter(answers)

    async def ask(*_: object, **__: object) -> Answer:
        return Answer(*next(left))

    monkeypatch.setattr(client, "ask", ask)

    assert await renders_alike(client, replace(TERMS, chat_ids=((5, 6), (7,)))) is alike
    assert next(left, None) is None, "an answer was not asked for"


async def test_chats_that_our_template_refuses_are_not_compared() -> None:
    """Some templates know no system prompts: the router refuses such chats itself."""
    client = Client(Address.of("http://x"), loop=asyncio.get_running_loop())

    assert await renders_alike(client, replace(TERMS, chat_ids=((), ()))) is None
