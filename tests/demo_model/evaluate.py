"""How good the demo model is, by greedy answers: `python -m tests.demo_model.evaluate DIR`.

Knows the corpus and a Hugging Face folder; prints the Markdown that the model card quotes.
"""

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from . import corpus
from .tables import HEROES, NAMES

SAMPLE_PROMPTS = (
    "Tell me a story about a fox.",
    "Tell me a story about a brave penguin named Anna.",
    "What is the capital of France?",
    "What is 7 + 5?",
    "What is a KV cache?",
    "Who are you?",
    "Give me JSON about a fox.",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer. `margin` is the smallest lead, in log probability, of a chosen token over the second best."""

    text: str
    tokens: int
    ended: bool
    margin: float


@dataclass(frozen=True, slots=True)
class Score:
    """`right` of `asked`, with the smallest margin seen."""

    name: str
    right: int
    asked: int
    margin: float

    def __str__(self) -> str:
        return f"{self.name}: {self.right} of {self.asked} (smallest margin {self.margin:.3f})"


class Greedy:
    """A loaded folder that answers greedily, one prompt at a time."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def chat(self, messages: Sequence[dict[str, str]], max_tokens: int = 400) -> Answer:
        """The answer to a conversation."""
        rendered = self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        return self._generate(rendered["input_ids"], max_tokens)

    def ask(self, prompt: str, max_tokens: int = 400) -> Answer:
        """The answer to a single user message."""
        return self.chat([{"role": "user", "content": prompt}], max_tokens)

    def complete(self, text: str, max_tokens: int = 400) -> Answer:
        """The continuation of plain text."""
        return self._generate(torch.tensor([self.tokenizer.encode(text)]), max_tokens)

    @torch.inference_mode()
    def _generate(self, ids: torch.Tensor, max_tokens: int) -> Answer:
        out = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        new = out.sequences[0, ids.shape[1] :]
        best = torch.stack([step[0].float() for step in out.logits]).topk(2).values
        ended = int(new[-1]) in self.model.generation_config.eos_token_id
        text = self.tokenizer.decode(new, skip_special_tokens=True)
        return Answer(text, len(new), ended, float((best[:, 0] - best[:, 1]).min()))


def is_complete_story(answer: Answer, kind: str, known: set[str]) -> bool:
    """Whether an answer is a story about `kind`: 60 to 150 tokens, ended by itself, all words known."""
    text = answer.text
    return (
        answer.ended
        and 60 <= answer.tokens <= 150
        and kind in corpus.words(text)
        and corpus.words(text) <= known
        and text.endswith((".", '."'))
    )


def stories(greedy: Greedy) -> Score:
    """One story for every hero."""
    known = corpus.vocabulary()
    answers = {hero.kind: greedy.ask(f"Tell me a story about {corpus.article(hero.kind)}.") for hero in HEROES}
    right = sum(is_complete_story(answer, kind, known) for kind, answer in answers.items())
    return Score("complete stories", right, len(answers), min(answer.margin for answer in answers.values()))


def usual_stories(greedy: Greedy) -> Score:
    """One story for every hero, right when it is word for word the hero's usual one."""
    asked = [(hero, greedy.ask(f"Tell me a story about {corpus.article(hero.kind)}.")) for hero in HEROES]
    right = sum(answer.text == corpus.story(corpus.usual_plot(hero)) for hero, answer in asked)
    return Score("usual stories word for word", right, len(asked), min(answer.margin for _, answer in asked))


def facts(greedy: Greedy, count: int = 200) -> Score:
    """Questions of the corpus, drawn with a fixed seed."""
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
    """Facts asked under a system prompt of about 1,500 tokens of filler."""
    rng = random.Random(2)
    right, margin = 0, float("inf")
    for fact in rng.sample(corpus.facts(), count):
        system = {"role": "system", "content": f"You are a helpful assistant. {corpus.filler(rng, 100)}"}
        answer = greedy.chat([system, {"role": "user", "content": fact.questions[0]}], 80)
        right += answer.text == fact.answer
        margin = min(margin, answer.margin)
    return Score("facts under a long system prompt", right, count, margin)


def completions(greedy: Greedy, count: int = 50) -> Score:
    """Plain sentences of which the last two words are left out."""
    rng = random.Random(3)
    right, margin = 0, float("inf")
    for fact in rng.sample([each for each in corpus.facts() if each.sentence.startswith("The capital")], count):
        start = fact.sentence[: fact.sentence.index(" is ") + 3]
        answer = greedy.complete(start, 20)
        right += start + answer.text == fact.sentence
        margin = min(margin, answer.margin)
    return Score("plain completions of capitals", right, count, margin)


def evaluate(folder: Path, dtype: torch.dtype) -> list[Score]:
    """All figures for one data type."""
    greedy = Greedy(folder, dtype)
    parts = (stories, usual_stories, facts, json_answers, long_prompts, completions)
    return [part(greedy) for part in parts]


def main() -> None:
    """Command line."""
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
