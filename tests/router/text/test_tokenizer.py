"""Properties of the text model: ids equal those of transformers, and encoding is bounded and private to a sender."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from homing.router.errors import InvalidRequest, PromptTooLong, TemplateRefusal, TokenizerUnavailable
from homing.router.text.encoder import SLOW_CHARACTERS, FastEncoder
from homing.router.text.encoder_threads import Sender
from homing.router.text.export import load_parts
from homing.router.text.template import TemplateInput
from homing.router.text.tokenizer import CUT_CHARACTERS, TextModel

from .conftest import DEMO, demo_parts, recording_model, slow_parts

FIXTURE = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
roles = st.sampled_from(["system", "user", "assistant"])
contents = st.one_of(st.text(), st.sampled_from(["<|im_end|>", " <|begin|>x", "é🦊\n\n", "a" * 2000]))
message = st.fixed_dictionaries({"role": roles, "content": contents})


@pytest.fixture(scope="module")
def reference():
    from transformers import AutoTokenizer  # late, because it imports torch, which takes seconds

    return AutoTokenizer.from_pretrained(str(DEMO))


@FIXTURE
@given(messages=st.lists(message, min_size=1, max_size=4))
def test_chat_ids_equal_those_of_transformers(text_model: TextModel, reference, messages):
    """A replica's cache is hit only if all parties tokenize alike; other routers often break this."""
    wanted = reference.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)

    assert list(text_model.encode_chat_now(TemplateInput(messages))) == wanted


@FIXTURE
@given(text=contents)
def test_completion_ids_equal_those_of_transformers(text_model: TextModel, reference, text):
    """Plain prompts get the post-processor's special tokens, as in other servers."""
    assert list(text_model.encode_now([text], special_tokens=True)[0]) == reference(text)["input_ids"]


@pytest.mark.parametrize("characters", [20, FastEncoder.inline_characters + 1, FastEncoder.short_characters + 1])
async def test_texts_encode_alike_in_every_thread(any_model: TextModel, characters):
    """Encoding in a thread must change only latency, never the ids."""
    text = ("the quick brown fox " * characters)[:characters]
    chat, sender = TemplateInput([{"role": "user", "content": text}]), Sender(body_bytes=characters)

    assert await any_model.encode([text], special_tokens=True) == any_model.encode_now([text], special_tokens=True)
    assert await any_model.encode_chat(chat, sender=sender) == any_model.encode_chat_now(chat)


@pytest.mark.parametrize("characters", [20, FastEncoder.inline_characters + 1, FastEncoder.short_characters + 1])
async def test_a_prompt_beyond_the_context_is_refused_by_field(any_model: TextModel, characters):
    """The longest of several texts decides, and a prompt must leave room for one generated token."""
    texts = ["x", "the quick brown fox " * (characters // 20)]
    longest = len(any_model.encode_now(texts, special_tokens=True)[1])
    chat = TemplateInput([{"role": "user", "content": texts[1]}])
    chat_length, sender = len(any_model.encode_chat_now(chat)), Sender(body_bytes=characters)

    assert await any_model.encode(texts, special_tokens=True, context=longest + 1)
    assert await any_model.encode_chat(chat, sender=sender, context=CUT_CHARACTERS * 9)
    with pytest.raises(PromptTooLong, match=f"the prompt has {longest} tokens") as caught:
        await any_model.encode(texts, special_tokens=True, context=longest, param="prompt")
    assert caught.value.param == "prompt"
    with pytest.raises(PromptTooLong):
        await any_model.encode_chat(chat, sender=sender, context=chat_length // 2, param="messages")


async def test_a_text_that_cannot_fit_is_not_encoded():
    """Encoding 16 MB only to find that it is too long would take threads and memory from other requests."""
    text_model, encoder = recording_model()
    text = " " * 16_000_000
    chat = TemplateInput([{"role": "user", "content": text}])

    with pytest.raises(PromptTooLong):
        await text_model.encode([text], special_tokens=True, context=8192)
    with pytest.raises(PromptTooLong, match="at least"):
        await text_model.encode_chat(chat, sender=Sender(body_bytes=len(text)), context=8192)

    assert not any(text in each for each in encoder.texts)
    text_model.close()


async def test_no_text_keeps_the_slow_encoder_for_minutes(slow_model: TextModel):
    """`tokenizers` would take half a minute for this text, and it cannot be interrupted."""
    with pytest.raises(InvalidRequest, match="at most") as caught:
        await slow_model.encode([" " * (SLOW_CHARACTERS + 1)], special_tokens=True, param="prompt")

    assert caught.value.param == "prompt"


def test_the_slow_encoder_is_told_with_its_reason(slow_model: TextModel, caplog: pytest.LogCaptureFixture):
    """The log must explain a long TTFT."""
    with caplog.at_level("INFO"):
        TextModel(slow_parts(), cache_bytes=0).close()

    assert "tokenizer_slow encoder=tokenizers reason=" in caplog.text


async def test_a_further_turn_of_a_slow_model_encodes_its_own_words_only():
    """With a slow encoder, encoding dominates the router's cost, so earlier turns must not be encoded again.

    Cached ids are private to a sender, so that timing does not reveal one sender's texts to another.
    """
    turns = [{"role": "user", "content": f"question {turn} " * 200} for turn in range(5)]
    text_model, encoder = recording_model(cache_bytes=1_000_000)
    sender = Sender(salt=b"t")
    await text_model.encode_chat(TemplateInput(turns[:4]), sender=sender)
    encoder.texts.clear()

    ids = await text_model.encode_chat(TemplateInput(turns), sender=sender)
    own_words = sum(map(len, encoder.texts))
    encoder.texts.clear()
    assert ids == await text_model.encode_chat(TemplateInput(turns), sender=Sender(salt=b"nobody yet"))
    all_words = sum(map(len, encoder.texts))

    assert own_words < all_words / 4
    assert all_words > sum(len(turn["content"]) for turn in turns)
    text_model.close()


async def test_the_fast_model_remembers_no_texts(text_model: TextModel):
    """Timing then reveals nothing about other senders, and encoding again costs less than a cache lookup."""
    await text_model.encode_chat(TemplateInput([{"role": "user", "content": "secret " * 200}]))

    assert not len(text_model.cache)


def test_a_folder_that_is_not_there_is_told_as_such(tmp_path: Path):
    """The error must not be about a malformed name of a Hugging Face model."""
    with pytest.raises(TokenizerUnavailable, match="no such folder"):
        TextModel.load(tmp_path / "missing", cache_bytes=0)


@pytest.mark.cluster
def test_neither_torch_nor_its_memory_comes_with_a_tokenizer():
    """The router is a small process; torch alone would add 270 MB and slow down garbage collection."""
    code = "import sys; from pathlib import Path; from homing.router.text.tokenizer import TextModel, TemplateInput\n"
    code += f"model = TextModel.load(Path({str(DEMO)!r}), cache_bytes=0)\n"
    code += "model.encode_chat_now(TemplateInput([{'role': 'user', 'content': 'hi'}])); print('torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "False"


def test_modules_of_the_working_directory_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file `transformers.py` in the working directory must neither break the router's start nor be executed."""
    (tmp_path / "transformers.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)

    assert load_parts(DEMO) == demo_parts()


async def test_a_template_that_fails_is_the_callers_error(text_model: TextModel):
    """Templates raise for messages that they do not accept; that must be a 400, not a crash."""
    with pytest.raises(TemplateRefusal) as caught:
        await text_model.encode_chat(TemplateInput([{"role": "user"}], template_arguments={"messages": 3}))

    assert caught.value.param == "messages"


def test_a_folder_without_tokenizer_is_named(tmp_path: Path):
    """The error must tell the operator which folder is wrong."""
    with pytest.raises(TokenizerUnavailable, match=tmp_path.name):
        TextModel.load(tmp_path, cache_bytes=0)


def test_a_special_token_without_a_role_has_no_text():
    """Llama 3 has 256 special tokens of which transformers names two; the others must not appear in answers either."""
    backend = Tokenizer.from_str(demo_parts().tokenizer)
    backend.add_special_tokens(["<|reserved|>"])
    reserved = backend.token_to_id("<|reserved|>")
    model = TextModel(msgspec.structs.replace(demo_parts(), tokenizer=backend.to_str()), cache_bytes=0)

    assert model.detokenizer().push([reserved]) == ""
    assert model.detokenizer(["<|reserved|>"]).push([reserved]) == "<|reserved|>"
    assert model.detokenizer(special=True).push([reserved]) == "<|reserved|>"
    model.close()


def test_pieces_of_unknown_ids_are_empty(text_model: TextModel):
    """A model's vocabulary may be padded beyond the tokenizer's."""
    assert text_model.piece(10**6) == b""
    assert text_model.piece_names([10**6]) == [""]


@pytest.mark.cluster
def test_a_loaded_model_is_ready_for_its_first_chat():
    """Importing the renderer takes a second, during which all of the router's streams would stall."""
    code = (
        "import sys; from pathlib import Path\n"
        "from homing.router.text.template import TemplateInput; from homing.router.text.tokenizer import TextModel\n"
        f"model = TextModel.load(Path({str(DEMO)!r}), cache_bytes=0); before = set(sys.modules)\n"
        "model.encode_chat_now(TemplateInput([{'role': 'user', 'content': 'x'}])); model.close()\n"
        "print(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
