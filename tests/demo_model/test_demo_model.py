"""The demo model: its folder, tokenizer and greedy answers, its corpus and a short training run."""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from homing.replica.demo import demo_model_path
from tests.demo_model import calls, corpus, evaluate, tokenizer, train
from tests.demo_model.calls import Turn
from tests.demo_model.corpus import Chat, Plain
from tests.demo_model.tables import HEROES

MEGABYTE = 1_000_000
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "MODEL_CARD.md",
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Two torch threads on contended cores are many times slower than one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def greedy() -> evaluate.Greedy:
    """The shipped model in float32."""
    return evaluate.Greedy(demo_model_path(), torch.float32)


# ----------------------------------------------------------------------------------------------------------- the folder


def test_folder_is_complete_and_small() -> None:
    """The folder is part of the wheel."""
    present = {file.name for file in demo_model_path().iterdir()}
    size = sum(file.stat().st_size for file in demo_model_path().iterdir())

    assert present >= FILES
    assert size <= 12 * MEGABYTE


def test_face_does_not_import_torch() -> None:
    """The router and the command line need the path, too, and must start quickly."""
    heavy = "{'torch', 'transformers'} & set(sys.modules)"
    code = f"import sys, homing.replica.demo as demo; demo.demo_model_path(); sys.exit(bool({heavy}))"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_sizes_divide_by_two() -> None:
    """Tensor parallelism of size 2 splits each of them."""
    config = json.loads((demo_model_path() / "config.json").read_text())

    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        assert config[name] % 2 == 0, name


def test_it_asks_to_run_in_float32() -> None:
    """Processors round bfloat16 differently, and a user's first answer should be the same everywhere."""
    assert json.loads((demo_model_path() / "config.json").read_text())["dtype"] == "float32"


def test_both_ways_to_end_are_eos_ids(greedy: evaluate.Greedy) -> None:
    """A chat turn ends with one token, a plain document with another."""
    ends = [greedy.tokenizer.convert_tokens_to_ids(each) for each in (tokenizer.TURN_END, tokenizer.END)]

    assert greedy.model.generation_config.eos_token_id == ends


# -------------------------------------------------------------------------------------------------------- the tokenizer


@pytest.mark.parametrize(
    "text",
    [
        "Tell me a story about a fox.",
        "  two  spaces\n\n\tand\ttabs\r\n ",
        "naïve café Straße ŁÓDŹ",
        "日本語のテキスト 中文 한국어",
        "שלום العربية हिन्दी ไทย",
        "👩🏽‍🚀🏳️‍🌈 e\u0301 \u200b\u202e \x00\x7f",
        "\U0010ffff𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
        '12345.678e-9 {"a": [1, 2]}',
        "",
    ],
)
def test_any_text_survives_encode_and_decode(greedy: evaluate.Greedy, text: str) -> None:
    """The alphabet is all 256 bytes."""
    ids = greedy.tokenizer.encode(text)

    assert ids[0] == greedy.tokenizer.bos_token_id
    assert greedy.tokenizer.decode(ids, skip_special_tokens=True) == text


def test_the_saved_pattern_changes_no_ids() -> None:
    """The weights were trained on texts split by another pattern."""
    saved, trained = (Tokenizer.from_file(str(demo_model_path() / "tokenizer.json")) for _ in range(2))
    trained.pre_tokenizer = tokenizer.pre_tokenizer(tokenizer.SPLIT)
    vocabulary = [each.replace("\u0120", " ").replace("\u010a", "\n") for each in sorted(saved.get_vocab())]
    rng = random.Random(0)
    glue = ["", "'", "\t", "(", '"', "_", "-", " ", "\n", "\u00a0", "'s", "'T", "1", "\u00e9", "\u0301", "\r\n"]
    characters = [chr(point) for point in range(0x3000)]
    texts = ["".join(rng.choice(vocabulary) + rng.choice(glue) for _ in range(40)) for _ in range(1000)]
    texts += ["".join(f"{each}the {each}'s\t{each}re" for each in characters)]

    pairs = [each.encode_batch_fast(texts) for each in (saved, trained)]
    assert saved.to_str() != trained.to_str()
    assert [each.ids for each in pairs[0]] == [each.ids for each in pairs[1]]


CHAT = Chat((Turn("system", "Be short."), Turn("user", "Hi 42!"), Turn("assistant", "Hello."), Turn("user", "Bye")))


def _messages(chat: Chat) -> list[dict[str, Any]]:
    return [{"role": turn.role, "content": turn.content} for turn in chat.turns]


def _template_ids(greedy: evaluate.Greedy, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    return list(greedy.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)["input_ids"])


def test_training_and_template_agree_on_ids(greedy: evaluate.Greedy) -> None:
    """A server must send the model the same tokens that it was trained on."""
    encoded = train.encode(greedy.tokenizer.backend_tokenizer, CHAT)

    assert _template_ids(greedy, _messages(CHAT)) == encoded.ids


def test_template_text_is_exact(greedy: evaluate.Greedy) -> None:
    """One begin token, one pair of markers per turn, an open assistant turn."""
    rendered = greedy.tokenizer.apply_chat_template(_messages(CHAT), tokenize=False, add_generation_prompt=True)

    assert rendered == (
        "<|begin|><|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi 42!<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_longer_chat_extends_the_prefix(greedy: evaluate.Greedy) -> None:
    """Prefix caching depends on this."""
    short = _template_ids(greedy, _messages(CHAT)[:2])

    assert _template_ids(greedy, _messages(CHAT))[: len(short)] == short


def test_template_takes_parts_and_none(greedy: evaluate.Greedy) -> None:
    """OpenAI clients send content as parts, and null content."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "42!"}]}]
    plain = [{"role": "user", "content": "Hi 42!"}]

    assert _template_ids(greedy, parts) == _template_ids(greedy, plain)
    assert _template_ids(greedy, [{"role": "assistant", "content": None}])


@pytest.mark.parametrize("system", ["", "Be polite."])
@pytest.mark.parametrize("seed", range(8))
def test_template_renders_tools_as_in_training(greedy: evaluate.Greedy, system: str, seed: int) -> None:
    """Covers tools, a call and its result; each turn extends the prefix."""
    rng = random.Random(seed)
    offered = calls.skills(rng, most=3)
    skill = offered[0]
    need = skill.ask(rng)
    arguments = {**dict(zip(skill.keys, need.arguments, strict=True)), **skill.fixed}
    call = {"type": "function", "function": {"name": skill.tool["name"], "arguments": arguments}}
    trained = Chat(
        (
            Turn("system", calls.system_text(system, [each.tool for each in offered])),
            Turn("user", need.question),
            Turn("assistant", skill.call(need)),
            Turn("tool", calls.response_text(need.result)),
            Turn("assistant", need.answer),
        )
    )
    messages = [
        *([{"role": "system", "content": system}] if system else []),
        {"role": "user", "content": need.question},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": need.result},
        {"role": "assistant", "content": need.answer},
    ]
    tools = [{"type": "function", "function": each.tool} for each in offered]

    whole = _template_ids(greedy, messages, tools=tools)
    assert whole == train.encode(greedy.tokenizer.backend_tokenizer, trained).ids
    first = _template_ids(greedy, messages[:-3], tools=tools)
    assert whole[: len(first)] == first


@pytest.mark.parametrize(
    ("parameters", "signature"),
    [
        (None, "f()"),
        ({}, "f()"),
        ({"type": "object", "properties": {}}, "f()"),
        (
            {"properties": {"a": {"type": "string"}, "b": {"enum": [1, "x"]}}, "required": ["b"]},
            "f(a?: string, b: 1|x)",
        ),
        ({"properties": {"a": True, "b": {"anyOf": []}, "c": {"type": ["string", "null"]}}}, "f(a?, b?, c?)"),
    ],
)
def test_template_renders_any_parameters(greedy: evaluate.Greedy, parameters: Any, signature: str) -> None:
    """Parameters without a simple type are at least named."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]

    rendered = greedy.tokenizer.apply_chat_template(_messages(CHAT), tools=tools, tokenize=False)

    assert f"<tools>\n{signature}\n</tools>" in rendered


def test_a_word_is_cut_alike_with_and_without_a_space(greedy: evaluate.Greedy) -> None:
    """Copying a word from a question into JSON then means copying its tokens."""
    bpe = greedy.tokenizer.backend_tokenizer
    for word in (*calls.CITIES, *evaluate.HELD_OUT_CITIES, "population", "Nidilos"):
        spaced = bpe.encode(f"in {word}", add_special_tokens=False).tokens
        quoted = bpe.encode(f'"{word}"', add_special_tokens=False).tokens
        assert [spaced[1].removeprefix(tokenizer.SPACE), *spaced[2:]] == quoted[1:-1]


# ------------------------------------------------------------------------------------------------------------ its words


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_fox_story_is_complete_english(dtype: torch.dtype) -> None:
    """This is the first answer that users of homing see."""
    answer = evaluate.Greedy(demo_model_path(), dtype).ask("Tell me a story about a fox.")

    assert evaluate.is_complete_story(answer, "fox", corpus.vocabulary()), answer.text


def test_known_questions_are_answered(greedy: evaluate.Greedy) -> None:
    """One question from each of three tables."""
    asked = {
        "What is the capital of France?": "The capital of France is Paris.",
        "What is 2 + 2?": "2 + 2 = 4.",
        "What is the opposite of hot?": "The opposite of hot is cold.",
    }

    assert {question: greedy.ask(question, 40).text for question in asked} == asked


def test_json_answer_parses(greedy: evaluate.Greedy) -> None:
    """The model card shows the answer to this prompt as an example."""
    assert json.loads(greedy.ask("Give me JSON about a fox.", 80).text)["kind"] == "fox"


TOOLS = [evaluate.simple_tool(each) for each in calls.FUNCTIONS if each.name in ("get_weather", "get_time", "add")]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is the weather in Paris?", calls.call_text("get_weather", {"city": "Paris"})),
        ("What is the weather in Oxford?", calls.call_text("get_weather", {"city": "Oxford"})),
        ("What time is it in Rome?", calls.call_text("get_time", {"city": "Rome"})),
        ("What is 12 + 30?", calls.call_text("add", {"a": 12, "b": 30})),
        ("What is the capital of France?", "The capital of France is Paris."),
    ],
)
def test_the_right_tool_is_called_if_any(greedy: evaluate.Greedy, question: str, answer: str) -> None:
    """One of three tools, with the question's arguments, including a city that is not in the corpus."""
    assert greedy.chat([{"role": "user", "content": question}], 60, TOOLS).text == answer


def test_the_result_of_a_call_is_told(greedy: evaluate.Greedy) -> None:
    """The second half of a tool call."""
    call = {"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    messages = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "21 degrees and sunny"},
    ]

    assert greedy.chat(messages, 40, TOOLS).text == "The weather in Paris is 21 degrees and sunny."


def test_a_schema_gives_the_keys_and_the_prompt_the_values(greedy: evaluate.Greedy) -> None:
    """The keys are in an order that the prompt does not mention."""
    want = {"city": "Rome", "name": "Anna", "age": 31}
    question = {"role": "user", "content": "Extract the person: Anna is 31 years old and lives in Rome."}

    assert json.loads(greedy.chat([question], 60, schema=evaluate.schema_of(want)).text) == want


def test_plain_text_is_completed_and_ended(greedy: evaluate.Greedy) -> None:
    """`/v1/completions` sends plain text."""
    answer = greedy.complete("The capital of France is", 20)

    assert answer.text == " Paris."
    assert answer.ended


def test_a_prompt_beyond_the_trained_length_does_not_crash(greedy: evaluate.Greedy) -> None:
    """The model is trained up to 2,048 tokens; beyond that it must still answer, however badly."""
    assert greedy.complete("the fox and the owl " * 500, 2).tokens > 0


# ---------------------------------------------------------------------------------------------- corpus and training run


def test_corpus_follows_from_its_seed() -> None:
    """The shipped weights must be reproducible."""
    first, again, other = (list(islice(corpus.documents(seed), 200)) for seed in (3, 3, 4))

    assert first == again
    assert first != other
    assert list(islice(corpus.long_documents(3), 5)) == list(islice(corpus.long_documents(3), 5))


def test_every_story_is_whole() -> None:
    """All fields are filled, and all articles are correct."""
    for hero in HEROES:
        text = corpus.story(corpus.usual_plot(hero))
        assert "{" not in text
        assert not any(f" a {vowel}" in text for vowel in "aeio"), text
        assert text.endswith((".", '."', f" {hero.name}."))


def test_json_of_the_corpus_parses() -> None:
    """The model cannot learn correct JSON from broken examples."""
    assert all(json.loads(corpus.hero_json(hero))["kind"] == hero.kind for hero in HEROES)


def test_packing_keeps_documents_whole() -> None:
    """A document that is cut would teach a wrong start and no end."""
    documents = [train.Encoded([n] * n, [True] * n, list(range(n))) for n in (5, 9, 3, 40, 7, 2, 10, 1, 6)]

    rows = list(train.pack(iter(documents), row_tokens=12, open_rows=2))

    assert all(len(row.ids) == len(row.learn) == len(row.positions) == 12 for row in rows)
    assert all(row.ids.count(n) in (0, n) for row in rows for n in set(row.ids) - {0})


def test_documents_of_a_row_do_not_see_each_other() -> None:
    """Position 0 starts a document; padding sees only itself."""
    mask = train.document_mask(torch.tensor([[0, 1, 2, 0, 1, 0]]))[0, 0]

    seen = [[column for column in range(6) if mask[row, column]] for row in range(6)]
    assert seen == [[0], [0, 1], [0, 1, 2], [3], [3, 4], [5]]


def test_only_answers_and_plain_text_are_learnt(greedy: evaluate.Greedy) -> None:
    """A small model's capacity must not be spent on prompts."""
    bpe = greedy.tokenizer.backend_tokenizer
    chat, plain = train.encode(bpe, CHAT), train.encode(bpe, Plain("Snow is white."))

    learnt = bpe.decode([i for i, learn in zip(chat.ids, chat.learn, strict=True) if learn], skip_special_tokens=False)
    assert learnt == "Hello.<|im_end|>"
    assert plain.learn == [False] + [True] * (len(plain.ids) - 1)


def test_only_values_are_learnt_where_a_schema_gives_the_keys(greedy: evaluate.Greedy) -> None:
    """Keys in random order that no prompt mentions would otherwise be learnt as noise."""
    bpe = greedy.tokenizer.backend_tokenizer
    answer = Turn("assistant", '{"name": "Anna Ro", "age": 31, "city": "New York"}', guided=True)
    encoded = train.encode(bpe, Chat((answer,)))

    learnt = [i for i, learn in zip(encoded.ids, encoded.learn, strict=True) if learn]
    assert bpe.decode(learnt) == "Anna Ro31New York"


def test_functions_of_a_chat_are_told_apart() -> None:
    """No question may have two correct answers."""
    for seed in range(300):
        offered = calls.skills(random.Random(seed), most=4, least=2)
        assert len({each.tool["name"] for each in offered}) == len({each.function.topic for each in offered}) >= 2


@pytest.mark.slow
def test_a_few_steps_lower_the_loss(tmp_path: Path) -> None:
    """Runs the whole training script with small settings. By how much the loss falls depends on the processor."""
    recipe = replace(train.Recipe(), steps=16, layers=2, batch_tokens=1024, long_row_tokens=1024, warmup=4)
    bpe = tokenizer.train_bpe(recipe.seed, documents=2000, vocab_size=1024)
    model = train.build_model(recipe, bpe)

    train.plant_copying(model)
    embeddings = train.SharedEmbeddings(bpe, model.model.embed_tokens.weight)

    losses = list(train.train_steps(model, embeddings, train.batches(bpe, recipe, corpus.documents(0)), recipe))
    train.save(model, embeddings, bpe, tmp_path)

    assert sum(losses[-3:]) < sum(losses[:3])
    assert evaluate.Greedy(tmp_path, torch.float32).ask("Hello", 3).tokens <= 3
