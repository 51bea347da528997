"""Evaluate the demo model by greedy answers: `python -m tests.demo_model.evaluate DIR`.

Needs only the corpus and a Hugging Face folder; prints the Markdown that the model card quotes.
"""

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, PreTrainedModel, PreTrainedTokenizerFast

from . import calls, corpus
from .tables import COMMON_WORDS, HEROES, NAMES

SAMPLE_PROMPTS = (
    "Tell me a story about a fox.",
    "Tell me a story about a brave penguin named Anna.",
    "What is the capital of France?",
    "What is 7 + 5?",
    "What is a KV cache?",
    "Who are you?",
    "Give me JSON about a fox.",
)


#: A message in the format of OpenAI's API.
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer. `margin` is the smallest lead, in log probability, of a chosen token over the second best."""

    text: str
    tokens: int
    ended: bool
    margin: float


@dataclass(frozen=True, slots=True)
class Score:
    """`right` correct answers of `asked`, with the smallest margin seen."""

    name: str
    right: int
    asked: int
    margin: float

    def __str__(self) -> str:
        return f"{self.name}: {self.right} of {self.asked} (smallest margin {self.margin:.3f})"


class Guide(LogitsProcessor):
    """Restricts one answer's tokens to those that a grammar allows."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self.matcher, self.prompt = matcher, -1
        self.mask = allocate_token_bitmask(1, vocab_size)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Called once per token, with all tokens before it."""
        if self.prompt < 0:
            self.prompt = input_ids.shape[1]
        else:
            self.matcher.consume_token(int(input_ids[0, -1]))
        fill_next_token_bitmask(self.matcher, self.mask)
        allowed = np.unpackbits(self.mask[0].view(np.uint8), bitorder="little")[: scores.shape[1]]
        return torch.where(torch.from_numpy(allowed.astype(bool)), scores, -torch.inf)


class Greedy:
    """A loaded folder that answers greedily, one prompt at a time."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def chat(
        self,
        messages: Sequence[Message],
        max_tokens: int = 400,
        tools: Sequence[calls.Tool] | None = None,
        schema: dict[str, Any] | None = None,
    ) -> Answer:
        """The answer to a conversation. `tools` are functions without their `type`, like `calls.Tool`."""
        rendered = self.tokenizer.apply_chat_template(
            list(messages),
            tools=[{"type": "function", "function": tool} for tool in tools] if tools else None,
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        return self._generate(rendered["input_ids"], max_tokens, [self._guide(schema)] if schema else [])

    def ask(self, prompt: str, max_tokens: int = 400) -> Answer:
        """The answer to a single user message."""
        return self.chat([{"role": "user", "content": prompt}], max_tokens)

    def complete(self, text: str, max_tokens: int = 400) -> Answer:
        """The continuation of plain text."""
        return self._generate(torch.tensor([self.tokenizer.encode(text)]), max_tokens)

    def _guide(self, schema: dict[str, Any]) -> LogitsProcessor:
        vocabulary = LLTokenizer(
            self.tokenizer.backend_tokenizer.to_str(), eos_token=list(self.model.generation_config.eos_token_id)
        )
        matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
        return Guide(matcher, vocabulary.vocab_size)

    @torch.inference_mode()
    def _generate(self, ids: torch.Tensor, max_tokens: int, guides: Sequence[LogitsProcessor] = ()) -> Answer:
        out = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            logits_processor=list(guides),
            return_dict_in_generate=True,
            output_scores=True,
        )
        new = out.sequences[0, ids.shape[1] :]
        best = torch.stack([step[0].float() for step in out.scores]).topk(2).values
        ended = int(new[-1]) in self.model.generation_config.eos_token_id
        text = self.tokenizer.decode(new, skip_special_tokens=True)
        return Answer(text, len(new), ended, float((best[:, 0] - best[:, 1]).min()))


def is_complete_story(answer: Answer, kind: str, known: set[str]) -> bool:
    """Whether an answer is a story about `kind`: 60 to 150 tokens, properly ended, all words known."""
    text = answer.text
    return (
        answer.ended
        and 60 <= answer.tokens <= 150
        and kind in corpus.words(text)
        and corpus.words(text) <= known
        and text.endswith((".", '."'))
    )


def stories(greedy: Greedy) -> Score:
    """One story per hero."""
    known = corpus.vocabulary()
    answers = {hero.kind: greedy.ask(f"Tell me a story about {corpus.article(hero.kind)}.") for hero in HEROES}
    right = sum(is_complete_story(answer, kind, known) for kind, answer in answers.items())
    return Score("complete stories", right, len(answers), min(answer.margin for answer in answers.values()))


def usual_stories(greedy: Greedy) -> Score:
    """One story per hero, correct if it is exactly the hero's usual one."""
    asked = [(hero, greedy.ask(f"Tell me a story about {corpus.article(hero.kind)}.")) for hero in HEROES]
    right = sum(answer.text == corpus.story(corpus.usual_plot(hero)) for hero, answer in asked)
    return Score("usual stories word for word", right, len(asked), min(answer.margin for _, answer in asked))


def facts(greedy: Greedy, count: int = 200) -> Score:
    """Questions from the corpus, drawn with a fixed seed."""
    rng = random.Random(1)
    drawn = [(rng.choice(fact.questions), fact.answer) for fact in rng.sample(corpus.facts(), count)]
    answers = [(greedy.ask(question, 80), answer) for question, answer in drawn]
    return Score("facts", sum(got.text == want for got, want in answers), count, min(got.margin for got, _ in answers))


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def json_answers(greedy: Greedy) -> Score:
    """JSON about every hero and ten people."""
    prompts = [f"Give me JSON about {corpus.article(hero.kind)}." for hero in HEROES]
    prompts += [
        f"Give me JSON about a person named {name} who is {age} years old." for age, name in enumerate(NAMES[:10], 7)
    ]
    answers = [greedy.ask(prompt, 120) for prompt in prompts]
    return Score(
        "JSON that parses",
        sum(_is_json_object(each.text) for each in answers),
        len(answers),
        min(each.margin for each in answers),
    )


def long_prompts(greedy: Greedy, count: int = 20) -> Score:
    """Facts asked after a system prompt of about 1,500 tokens of filler."""
    rng = random.Random(2)
    right, margin = 0, float("inf")
    for fact in rng.sample(corpus.facts(), count):
        system = {"role": "system", "content": f"You are a helpful assistant. {corpus.filler(rng, 100)}"}
        answer = greedy.chat([system, {"role": "user", "content": fact.questions[0]}], 80)
        right += answer.text == fact.answer
        margin = min(margin, answer.margin)
    return Score("facts under a long system prompt", right, count, margin)


def completions(greedy: Greedy, count: int = 50) -> Score:
    """Sentences about capitals, cut after "is"; the model must add the city."""
    rng = random.Random(3)
    right, margin = 0, float("inf")
    for fact in rng.sample([each for each in corpus.facts() if each.sentence.startswith("The capital")], count):
        start = fact.sentence[: fact.sentence.index(" is ") + 3]
        answer = greedy.complete(start, 20)
        right += start + answer.text == fact.sentence
        margin = min(margin, answer.margin)
    return Score("plain completions of capitals", right, count, margin)


# ---------------------------------------------------------------------------------------------------------------- tools

#: Cities that are not in the corpus.
HELD_OUT_CITIES = (
    "Oxford",
    "Bristol",
    "Cologne",
    "Palermo",
    "Granada",
    "Detroit",
    "Leipzig",
    "Nantes",
    "Cairns",
    "Hanover",
)


@dataclass(frozen=True, slots=True)
class Case:
    """A question with tools and its only correct answer."""

    tools: tuple[calls.Tool, ...]
    question: str
    answer: str


def simple_tool(function: calls.Function) -> calls.Tool:
    """A function as most clients describe it."""
    properties = {names[0]: {"type": kind} for names, kind in zip(function.parameters, function.kinds, strict=True)}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"name": function.name, "description": function.about[0], "parameters": schema}


def call_case(rng: random.Random, function: calls.Function, others: int, arguments: Sequence[calls.Value] = ()) -> Case:
    """A question that needs `function`, offered with this many other functions."""
    rest = rng.sample([each for each in calls.FUNCTIONS if each is not function], others)
    arguments = arguments or function.draw(rng)
    tools = [simple_tool(each) for each in rng.sample([function, *rest], others + 1)]
    keys = [names[0] for names in function.parameters]
    answer = calls.call_text(function.name, dict(zip(keys, arguments, strict=True)))
    return Case(tuple(tools), rng.choice(function.questions).format(*arguments), answer)


def call_score(greedy: Greedy, name: str, cases: Sequence[Case]) -> Score:
    """The number of exactly correct answers."""
    answers = [(case, greedy.chat([{"role": "user", "content": case.question}], 80, case.tools)) for case in cases]
    right = sum(got.text == case.answer for case, got in answers)
    return Score(name, right, len(cases), min(got.margin for _, got in answers))


def tool_calls(greedy: Greedy, count: int = 60) -> list[Score]:
    """Calls of the only function, of one among others, of sums, about new cities, and of an unknown function."""
    rng = random.Random(4)
    about_cities = [each for each in calls.FUNCTIONS if each.draw is calls.one_city]
    sums = [each for each in calls.FUNCTIONS if each.name in calls.SUMS]
    kinds = {
        "calls of the only tool": [call_case(rng, rng.choice(calls.FUNCTIONS), 0) for _ in range(count)],
        "calls of one of two to four tools": [
            call_case(rng, rng.choice(calls.FUNCTIONS), rng.randrange(1, 4)) for _ in range(count)
        ],
        "calls with two numbers": [call_case(rng, rng.choice(sums), rng.randrange(3)) for _ in range(count)],
        "calls about held-out cities": [
            call_case(rng, rng.choice(about_cities), rng.randrange(4), (rng.choice(HELD_OUT_CITIES),))
            for _ in range(count)
        ],
        "calls of the only tool, a new one": [call_case(rng, calls.any_function(rng), 0) for _ in range(count)],
    }
    return [call_score(greedy, name, cases) for name, cases in kinds.items()]


def plain_with_tools(greedy: Greedy, count: int = 40) -> Score:
    """Facts asked while tools for something else are offered."""
    rng = random.Random(6)
    tools = tuple(simple_tool(each) for each in calls.FUNCTIONS[:2])
    drawn = rng.sample([each for each in corpus.facts() if "ime" not in each.answer], count)
    return call_score(
        greedy, "facts with tools for something else", [Case(tools, each.questions[0], each.answer) for each in drawn]
    )


def results_told(greedy: Greedy, count: int = 40) -> Score:
    """The answer after a call and its result."""
    rng = random.Random(7)
    right, margin = 0, float("inf")
    for _ in range(count):
        function = rng.choice(calls.FUNCTIONS)
        need = calls.need(rng, function)
        arguments = dict(zip((names[0] for names in function.parameters), need.arguments, strict=True))
        messages = [
            {"role": "user", "content": need.question},
            {"role": "assistant", "tool_calls": [{"function": {"name": function.name, "arguments": arguments}}]},
            {"role": "tool", "content": need.result},
        ]
        answer = greedy.chat(messages, 80, [simple_tool(function)])
        right += answer.text == need.answer
        margin = min(margin, answer.margin)
    return Score("results told", right, count, margin)


def schema_of(entries: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of an object with exactly these keys."""
    properties = {key: {"type": "integer" if isinstance(each, int) else "string"} for key, each in entries.items()}
    return {"type": "object", "properties": properties, "required": list(entries), "additionalProperties": False}


def guided_answers(greedy: Greedy, count: int = 60) -> Score:
    """Answers guided by a schema with random keys in random order."""
    rng = random.Random(9)
    right, margin = 0, float("inf")
    for _ in range(count):
        asked = corpus.guided_exchange(rng)
        want = json.loads(asked.answer)
        answer = greedy.chat([{"role": "user", "content": asked.prompt}], 80, schema=schema_of(want))
        right += answer.ended and json.loads(answer.text) == want
        margin = min(margin, answer.margin)
    return Score("answers that a JSON schema guides", right, count, margin)


def repeats(greedy: Greedy, count: int = 40) -> Score:
    """A phrase of three to six known words to repeat."""
    rng = random.Random(8)
    phrases = [" ".join(rng.sample(COMMON_WORDS, rng.randrange(3, 7))) for _ in range(count)]
    answers = [(phrase, greedy.ask(f"Repeat after me: {phrase}", 40)) for phrase in phrases]
    right = sum(answer.text == phrase for phrase, answer in answers)
    return Score("phrases repeated", right, count, min(answer.margin for _, answer in answers))


def evaluate(folder: Path, dtype: torch.dtype) -> list[Score]:
    """All scores for one data type."""
    greedy = Greedy(folder, dtype)
    parts = (stories, usual_stories, facts, json_answers, guided_answers, long_prompts, completions, repeats)
    with_tools = (plain_with_tools, results_told)
    return [*(part(greedy) for part in parts), *tool_calls(greedy), *(part(greedy) for part in with_tools)]


def main() -> None:
    """Evaluate a folder in float32 and bfloat16, and print sample answers."""
    parser = argparse.ArgumentParser(description="Evaluate homing's demo model.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for dtype in (torch.float32, torch.bfloat16):
        print(f"## {dtype}")
        for score in evaluate(arguments.folder, dtype):
            print(f"- {score}", flush=True)
    greedy = Greedy(arguments.folder, torch.float32)
    for prompt in SAMPLE_PROMPTS:
        print(f"\n> {prompt}\n\n{greedy.ask(prompt).text}")
    print(f"\n> Once upon a time (plain)\n\n{greedy.complete('Once upon a time').text}")


if __name__ == "__main__":
    main()
