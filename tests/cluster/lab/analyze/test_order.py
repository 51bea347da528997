"""Advice on prompt order: it names the place, shows what varies, and is silent if nothing is wrong."""

import random
from collections.abc import Callable

import pytest

from homing.cluster.lab.analyze.order import OrderFinding, Part, SampledPrompt, advise

RULES = " ".join(f"Rule {number}: answer politely about matter {number * 37}." for number in range(40))
EXAMPLES = [
    f"Example {letter}: the {letter} fox asked for {letter * 9} and was told {letter * 60}." for letter in "abcdef"
]
TOOLS = [f'{{"name":"tool_{letter}","description":"{" ".join([letter * 5] * 30)}"}}' for letter in "abcd"]


def prompts(write: Callable[[int], list[Part]], count: int = 30, shared_tokens: int = 0) -> list[SampledPrompt]:
    """Sampled prompts, with one token per four characters."""
    made = [tuple(write(number)) for number in range(count)]
    return [SampledPrompt(parts, sum(len(part.text) for part in parts) // 4, shared_tokens) for parts in made]


def chat(system: str, user: str) -> list[Part]:
    return [Part("messages[0] (system)", system), Part("messages[1] (user)", user)]


def only(found: list[OrderFinding]) -> OrderFinding:
    assert len(found) == 1, found
    return found[0]


def test_a_time_stamp_before_the_rules_is_found():
    """The most common way to make a prefix cache useless."""
    sample = prompts(lambda n: chat(f"It is 2026-11-21 1{n % 10}:{n + 10}:07. {RULES}", f"Question {n * 7919}?"))

    finding = only(advise(sample))

    assert (finding.kind, finding.part) == ("time", "messages[0] (system)")
    assert finding.character == len("It is 2026-11-21 ")
    assert "10:10:07." in finding.snippets
    assert finding.common_tokens == pytest.approx(len(RULES) / 4, rel=0.05)
    assert finding.saved_tokens == pytest.approx(29 * len(RULES) / 4, rel=0.05)


def test_an_id_is_found_and_masked():
    """Reports are passed around and must not contain customers' full ids."""
    rng = random.Random(1)
    sample = prompts(lambda n: chat(f"Session {rng.randbytes(8).hex()}\n{RULES}", f"Question {n * 7919}?"))

    finding = only(advise(sample))

    assert (finding.kind, finding.character) == ("id", len("Session "))
    assert all(len(snippet) == 5 and snippet.endswith("…") for snippet in finding.snippets)


def test_a_name_is_found():
    """Any varying text counts; it need not have a special format."""
    names = "Ada Bo Cid Dora Eve Finn Gus Hal Ida Jo".split()
    sample = prompts(lambda n: chat(f"You talk to {names[n % 10]}. {RULES}", f"Question {n * 7919}?"))

    finding = only(advise(sample))

    assert (finding.kind, finding.character) == ("text", len("You talk to "))
    assert finding.snippets == ("Ada.", "Bo.", "Cid.")


def test_addresses_are_masked():
    """Reports must not contain people's e-mail addresses."""
    sample = prompts(lambda n: chat(f"Customer {'abcdefgh'[n % 8]}{n}@example.org. {RULES}", "Hello there, friend"))

    assert set(only(advise(sample)).snippets) == {"Customer <email>"} or set(only(advise(sample)).snippets) == {
        "<email>"
    }


def test_shuffled_examples_are_found():
    """Evaluation code often uses a random order of few-shot examples."""
    rng = random.Random(2)
    sample = prompts(lambda n: chat("\n".join(rng.sample(EXAMPLES, 6)), f"Question {n * 7919}?"))

    finding = only(advise(sample))

    assert finding.kind == "order"
    assert "sort" in finding.advice


def test_tools_in_changing_order_are_found():
    """Services may list tools from an unordered set or map."""
    rng = random.Random(3)

    def write(number: int) -> list[Part]:
        tools = rng.sample(TOOLS, 4)
        return [*(Part(f"tools[{place}]", tool) for place, tool in enumerate(tools)), *chat("Be brief.", f"Q {number}")]

    finding = only(advise(prompts(write)))

    assert finding.part.startswith("tools")
    assert "same order" in finding.advice


def test_a_question_before_the_document_is_found():
    """The document should be shared and the question should follow it. One finding covers all documents."""
    documents = [" ".join(f"Fact {n} of paper {d} says {n * d}." for n in range(60)) for d in range(1, 4)]
    sample = prompts(lambda n: [Part("prompt", f"Who is number {n * 7919}?\n\n{documents[n % 3]}")], count=60)

    finding = only(advise(sample))

    assert (finding.part, finding.character) == ("prompt", len("Who is number "))
    assert (finding.requests, finding.groups) == (60, 3)
    assert finding.saved_tokens == pytest.approx(57 * len(documents[0]) / 4, rel=0.1)


def test_a_habit_before_many_texts_is_worth_telling_although_each_is_small():
    """Forty system prompts, each with a time stamp: one of them alone would not be worth a finding."""
    systems = [f"You are clerk {who}. " + " ".join(f"Duty {n * who} of {who}." for n in range(20)) for who in range(40)]
    sample = prompts(lambda n: chat(f"It is 12:{n % 50 + 10}:{n % 47 + 10}. {systems[n % 40]}", "Hello?"), count=160)

    finding = only(advise(sample))

    assert finding.kind == "time"
    assert finding.groups > 35
    assert finding.requests > 140


def test_one_odd_prompt_does_not_hide_the_place():
    """The place is the first difference of the great majority."""
    sample = prompts(lambda n: chat(f"It is 2026-11-21 1{n % 10}:{n + 10}:07. {RULES}", f"Question {n * 7919}?"))
    sample.append(SampledPrompt(tuple(chat(f"IT IS LATE. {RULES}", "Hm?")), 500, 0))

    finding = only(advise(sample))

    assert (finding.kind, finding.requests) == ("time", 31)


@pytest.mark.parametrize("turns", [2, 5])
def test_growing_conversations_are_in_good_order(turns: int):
    """Each turn begins with all turns before it."""
    sample = []
    for who in range(8):
        parts = [Part("messages[0] (system)", RULES)]
        for turn in range(turns):
            shared = sum(len(part.text) for part in parts) // 4 if turn or who else 0
            parts.append(Part(f"messages[{turn + 1}] (user)", f"This is what {who} says at turn {turn}: {who * 7919}."))
            sample.append(SampledPrompt(tuple(parts), sum(len(part.text) for part in parts) // 4, shared))

    assert advise(sample) == []


def test_prompts_without_anything_in_common_give_no_advice():
    """There is nothing to move."""
    rng = random.Random(4)

    assert advise(prompts(lambda n: [Part("prompt", rng.randbytes(300).hex())])) == []


def test_what_is_shared_already_is_no_gain():
    """Sharing is measured on the whole log, so that a sample does not suggest false savings."""
    sample = prompts(lambda n: chat(f"It is 1{n % 10}:{n + 10}. {RULES}", "Hello?"), shared_tokens=10_000)

    assert advise(sample) == []


@pytest.mark.parametrize("sample", [[], [SampledPrompt((), 100, 0)], [SampledPrompt((Part("prompt", ""),), 0, 0)] * 3])
def test_nothing_to_look_at_gives_no_advice(sample: list[SampledPrompt]):
    """Covers empty logs, token ids and empty prompts."""
    assert advise(sample) == []
