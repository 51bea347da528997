"""Text models of the front: loaded once per served tokenizer and dropped when it is no longer served."""

import gc
import weakref
from pathlib import Path
from typing import Any

import msgspec
import pytest

from homing.router.errors import TokenizerUnavailable
from homing.router.http.front import Front, TextModels
from homing.router.metrics import RouterMetrics
from homing.router.replicas.membership import TextDigests, TextSource
from homing.router.text.template import TemplateInput
from homing.router.text.tokenizer import SamplingDefaults, TextModel, sampling_defaults

from .conftest import DEMO, LoadedText, serving

FOX, FOX_LATER, OWL = (
    TextSource(path, TextDigests(tokenizer, "")) for path, tokenizer in (("fox", "1"), ("fox", "2"), ("owl", "1"))
)


class FakeText:
    """A stand-in for a text model that only records its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder


@pytest.fixture
def texts() -> Any:
    return TextModels(FakeText)  # type: ignore[arg-type]


async def test_a_tokenizer_that_was_replaced_in_its_folder_is_loaded_anew(texts: TextModels) -> None:
    """An update may change the files in place; with the old token ids, the new replicas would answer nonsense."""
    before, again, after = [await texts.get(source) for source in (FOX, FOX, FOX_LATER)]

    assert before is again
    assert after is not before
    assert await texts.get(FOX) is before


async def test_what_is_served_no_longer_is_forgotten(texts: TextModels) -> None:
    """Otherwise each update to another model would leak a tokenizer, its cache and its threads."""
    texts.keep([FOX, OWL])
    for source in (FOX, OWL):
        await texts.get(source)
    gone = weakref.ref(await texts.get(FOX))

    texts.keep([OWL])

    gc.collect()
    assert (texts.loaded(FOX), texts.loaded(OWL)) == (False, True)
    assert gone() is None


async def test_what_was_loaded_ahead_waits_for_its_first_replica(texts: TextModels) -> None:
    """A preloaded model must survive membership changes of other models until its own first replica joins."""
    await texts.get(FOX)

    texts.keep([OWL])
    assert texts.loaded(FOX)
    texts.keep([FOX, OWL])
    texts.keep([OWL])

    assert not texts.loaded(FOX)


@pytest.mark.parametrize("used", [True, False])
async def test_sampling_defaults_are_the_models_where_a_request_is_silent(settings, backend, text_model, used: bool):
    """Other servers use the model's defaults as well; a setting turns this off."""
    chosen = msgspec.structs.replace(settings, generation_config=used)
    front = Front(chosen, backend, RouterMetrics(), texts=LoadedText(text_model))
    before = text_model.sampling_defaults
    text_model.sampling_defaults = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.05)
    try:
        async with serving(front) as client:
            for fields in ({}, {"temperature": 0, "top_p": 1, "top_k": 0, "repetition_penalty": 1}):
                await client.post("/v1/completions", json={"prompt": "a"} | fields)
    finally:
        text_model.sampling_defaults = before

    silent, explicit = (
        (each.temperature, each.top_p, each.top_k, each.repetition_penalty)
        for each in (request.sampling for request in backend.requests)
    )
    assert silent == ((0.6, 0.9, 20, 1.05) if used else (1.0, 1.0, 0, 1.0))
    assert explicit == (0.0, 1.0, 0, 1.0)


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (None, SamplingDefaults()),
        ('{"temperature": 0.7, "top_k": 20, "do_sample": true}', SamplingDefaults(temperature=0.7, top_k=20)),
        ('{"top_p": 7}', SamplingDefaults()),
        ("{", SamplingDefaults()),
    ],
)
def test_sampling_defaults_come_from_the_models_folder(tmp_path: Path, content: str | None, wanted: SamplingDefaults):
    """An unusable file counts as missing."""
    if content is not None:
        (tmp_path / "generation_config.json").write_text(content)

    assert sampling_defaults(tmp_path) == wanted


@pytest.mark.parametrize("aliases", ["gpt-4o, fox", "gpt-4o=demo,fox=demo", "gpt-4o=owl,fox"])
async def test_a_model_is_served_under_its_aliases(settings, backend, text_model, aliases: str):
    """Clients with a fixed model name then work unchanged; an alias of an absent model is not listed."""
    front = Front(
        msgspec.structs.replace(settings, model_aliases=aliases), backend, RouterMetrics(), texts=LoadedText(text_model)
    )
    known = ["fox"] if "owl" in aliases else ["gpt-4o", "fox"]
    async with serving(front) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        cards = [(await client.get(f"/v1/models/{name}")).status_code for name in known]
        answers = [(await client.post("/v1/completions", json={"prompt": "a", "model": name})) for name in known]
        absent = await client.post("/v1/completions", json={"prompt": "a", "model": "gpt-5"})

    assert [card["id"] for card in listed] == ["demo", *known]
    assert cards == [200] * len(known)
    assert [answer.json()["model"] for answer in answers] == ["demo"] * len(known)
    assert absent.status_code == 404


def test_a_chat_template_of_ones_own_replaces_the_models(tmp_path: Path):
    """The text used to recognise the tool-call format is replaced too; an error for a missing file names its path."""
    file = tmp_path / "own.jinja"
    with pytest.raises(TokenizerUnavailable, match="own"):
        TextModel.load(DEMO, cache_bytes=0, chat_template=str(file))
    file.write_text("{% for each in messages %}{{ each.role }}: {{ each.content }};{% endfor %}")

    model = TextModel.load(DEMO, cache_bytes=0, chat_template=str(file))

    assert model.decode(model.encode_chat_now(TemplateInput([{"role": "user", "content": "hi"}]))) == "user: hi;"
    assert model.templates == file.read_text()
    model.close()


async def test_a_tokenizer_of_its_own_leaves_the_model_what_it_is(tmp_path: Path) -> None:
    """Model type and sampling defaults come from the model's folder; vocabulary and template from the tokenizer's."""
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss"}')
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25}')
    texts = TextModels(lambda folder: TextModel.load(folder, cache_bytes=0))

    text = await texts.get(TextSource(str(DEMO), TextDigests("", ""), str(tmp_path)))

    assert (text.model_type, text.sampling_defaults.temperature) == ("gpt_oss", 0.25)
    assert text.templates
    await texts.close()
