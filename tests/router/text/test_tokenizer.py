"""Properties of the text side: its ids are those of transformers."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from homing.router.errors import TemplateRefusal, TokenizerUnavailable
from homing.router.text.template import TemplateInput
from homing.router.text.tokenizer import INLINE_CHARACTERS, TextModel

from .conftest import DEMO

FIXTURE = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
roles = st.sampled_from(["system", "user", "assistant"])
contents = st.one_of(st.text(), st.sampled_from(["<|im_end|>", " <|begin|>x", "é🦊\n\n", "a" * 2000]))
message = st.fixed_dictionaries({"role": roles, "content": contents})


@pytest.fixture(scope="module")
def reference():
    from transformers import AutoTokenizer  # imports torch, too: seconds for every process that collects tests

    return AutoTokenizer.from_pretrained(str(DEMO))


@FIXTURE
@given(messages=st.lists(message, min_size=1, max_size=4))
def test_chat_ids_equal_those_of_transformers(text_model: TextModel, reference, messages):
    """A replica's cache is only hit when everybody tokenizes alike; other routers keep breaking this."""
    wanted = reference.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)

    assert list(text_model.encode_chat_now(TemplateInput(messages))) == wanted


@FIXTURE
@given(text=contents)
def test_completion_ids_equal_those_of_transformers(text_model: TextModel, reference, text):
    """Plain prompts get the special tokens of the post-processor, as everywhere else."""
    assert list(text_model.encode_now([text], special_tokens=True)[0]) == reference(text)["input_ids"]


async def test_long_texts_encode_alike_off_the_loop(text_model: TextModel):
    """The hop to a thread is a matter of latency only."""
    text = "the quick brown fox " * INLINE_CHARACTERS

    assert await text_model.encode([text], special_tokens=True) == text_model.encode_now([text], special_tokens=True)
    chat = TemplateInput([{"role": "user", "content": text}])
    assert await text_model.encode_chat(chat) == text_model.encode_chat_now(chat, tenant=b"another")


def test_a_further_turn_tokenizes_its_own_words_only(text_model: TextModel):
    """Tokenizing costs more than all the rest of the router, so a long conversation must not pay for it each time."""
    turns = [{"role": "user", "content": f"question {turn} " * 200} for turn in range(5)]
    text_model.encode_chat_now(TemplateInput(turns[:4]), tenant=b"t")
    before = text_model.cache.miss_tokens

    ids = text_model.encode_chat_now(TemplateInput(turns), tenant=b"t")

    fresh = text_model.cache.miss_tokens - before
    assert fresh < len(ids) / 4
    assert ids == text_model.encode_chat_now(TemplateInput(turns), tenant=b"nobody yet")


def test_a_folder_that_is_not_there_is_told_as_such(tmp_path: Path):
    """Not as a malformed name of a model on the internet."""
    with pytest.raises(TokenizerUnavailable, match="no such folder"):
        TextModel.load(tmp_path / "missing", cache_bytes=0)


def test_neither_torch_nor_its_memory_comes_with_a_tokenizer():
    """The router is a small process: torch alone would take 270 MB, and the collector's time."""
    code = "import sys; from pathlib import Path; from homing.router.text.tokenizer import TextModel, TemplateInput\n"
    code += f"model = TextModel.load(Path({str(DEMO)!r}), cache_bytes=0)\n"
    code += "model.encode_chat_now(TemplateInput([{'role': 'user', 'content': 'hi'}])); print('torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "False"


async def test_a_template_that_fails_is_the_callers_error(text_model: TextModel):
    """Templates raise for messages they do not take: that is a 400, not a crash."""
    with pytest.raises(TemplateRefusal) as caught:
        await text_model.encode_chat(TemplateInput([{"role": "user"}], template_arguments={"messages": 3}))

    assert caught.value.param == "messages"


def test_a_folder_without_tokenizer_is_named(tmp_path: Path):
    """Whoever starts the cluster must read which folder is wrong."""
    with pytest.raises(TokenizerUnavailable, match=tmp_path.name):
        TextModel.load(tmp_path, cache_bytes=0)


def test_pieces_of_unknown_ids_are_empty(text_model: TextModel):
    """A model's vocabulary may be padded beyond the tokenizer's."""
    assert text_model.piece(10**6) == b""
    assert text_model.piece_names([10**6]) == [""]


def test_a_loaded_model_is_ready_for_its_first_chat():
    """Importing the renderer takes a second, which every stream of the router would stand still for."""
    code = (
        "import sys; from pathlib import Path\n"
        "from homing.router.text.template import TemplateInput; from homing.router.text.tokenizer import TextModel\n"
        f"model = TextModel.load(Path({str(DEMO)!r}), cache_bytes=0); before = set(sys.modules)\n"
        "model.encode_chat_now(TemplateInput([{'role': 'user', 'content': 'x'}])); model.close()\n"
        "print(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
