"""The demo model's training text: templated stories, questions with answers, small JSON, chats, long prompts.

Pure and seeded: the same seed gives the same documents on every machine. Independent of tokens and training.

Choices that a prompt leaves open are drawn from a skewed distribution (`USUAL`): each hero has one usual story, so that
greedy decoding finds a clear favourite at every fork, while sampling still gives variety.
"""

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count, islice

from . import calls, tables
from .calls import Exchange, Turn
from .tables import HEROES, TROUBLES, Hero, Trouble

#: Probability that an open choice of a story takes the hero's usual value. Not tuned.
USUAL = 0.8

#: Number of documents over which copying drills become rarer and tools more common. Not tuned.
EASY_DOCUMENTS = 8_000

SHORT_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are homing, a small demo model.",
    "You are a friendly storyteller.",
    "You are a helpful assistant. Answer briefly.",
    "You are a helpful and honest assistant.",
    "Answer the question of the user.",
    "Be polite and short.",
    "You tell stories for children.",
    "You are an expert who answers questions.",
    "Always answer in English.",
)


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, to be rendered with the chat template."""

    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Plain:
    """Running text without roles, as in a `/v1/completions` request."""

    text: str


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact: equivalent questions, their answer, and a plain sentence to complete (empty: none)."""

    questions: tuple[str, ...]
    answer: str
    sentence: str = ""


Document = Chat | Plain


def article(noun: str) -> str:
    """`noun` with its indefinite article: "a fox", "an owl"."""
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def _upper_first(text: str) -> str:
    return text[0].upper() + text[1:]


# -------------------------------------------------------------------------------------------------------------- stories


@dataclass(frozen=True, slots=True)
class Plot:
    """Everything that determines a story's text."""

    hero: Hero
    friend: Hero
    trouble: Trouble
    shape: str


_BY_KIND = {hero.kind: hero for hero in HEROES}


def _friend_of(hero: Hero) -> Hero:
    named = _BY_KIND.get(hero.friend)
    return named if named is not None else replace(hero, kind=hero.friend, name="Nell", he="she")


def usual_plot(hero: Hero) -> Plot:
    """The story about `hero` for a request without further wishes."""
    index = [other.kind for other in HEROES].index(hero.kind)
    shape = tables.STORY_SHAPES[index % len(tables.STORY_SHAPES)]
    return Plot(hero, _friend_of(hero), TROUBLES[index * 3 % len(TROUBLES)], shape)


def _fields(plot: Plot) -> dict[str, str]:
    hero, friend = plot.hero, plot.friend
    him, his = ("him", "his") if hero.he == "he" else ("her", "her")
    fields = {
        "name": hero.name,
        "kind": hero.kind,
        "trait": hero.trait,
        "home": hero.home,
        "food": hero.food,
        "he": hero.he,
        "him": him,
        "his": his,
        "He": hero.he.capitalize(),
        "His": his.capitalize(),
        "friend": friend.kind,
        "fname": friend.name,
        "a_friend": article(friend.kind),
        "a_trait": f"{article(hero.trait)}",
        "a_kind": article(hero.kind),
    }
    trouble = plot.trouble
    parts = {part: getattr(trouble, part).format(**fields) for part in ("problem", "attempt", "solution", "lesson")}
    return fields | parts | {"Lesson": _upper_first(parts["lesson"])}


def story(plot: Plot) -> str:
    """A complete short story of about 80 to 120 words."""
    return plot.shape.format(**_fields(plot))


def long_story(plot: Plot, days: int) -> str:
    """A story of several days: the usual opening, one trouble per day, and an ending."""
    start = TROUBLES.index(plot.trouble)
    text = (
        "Once upon a time, there was {a_trait} {kind} named {name}. {He} lived in {home} with {a_friend} named {fname}."
    )
    paragraphs = [text.format(**_fields(plot))]
    for day in range(days):
        opening = "On the first day" if day == 0 else "On the next day"
        text = (
            opening + ', {problem}. {attempt}. But {fname} was there to help, and {solution}. "{Lesson}," said {fname}.'
        )
        paragraphs.append(text.format(**_fields(replace(plot, trouble=TROUBLES[(start + day) % len(TROUBLES)]))))
    paragraphs.append("After that, {name} and {fname} were never afraid again. The end.".format(**_fields(plot)))
    return "\n\n".join(paragraphs)


def _varied_plot(rng: random.Random, hero: Hero) -> Plot:
    """The usual plot, with each open choice sometimes replaced."""
    plot = usual_plot(hero)
    if rng.random() > USUAL:
        plot = replace(plot, trouble=rng.choice(TROUBLES))
    if rng.random() > USUAL:
        plot = replace(plot, shape=rng.choice(tables.STORY_SHAPES))
    return plot


STORY_REQUESTS = (
    *(3 * ("Tell me a story about {}.",)),
    "Tell me a short story about {}.",
    "Write a story about {}.",
    "Write a short story about {}.",
    "Write me a story about {}.",
    "Can you tell me a story about {}?",
    "Please tell me a story about {}.",
    "I would like to hear a story about {}.",
    "A story about {}, please.",
    "Story about {}.",
)


def story_exchange(rng: random.Random) -> Exchange:
    """A request for a story about a hero, half the time with a wish: a trait, a name, a place or a friend."""
    hero = rng.choice(HEROES)
    plot = _varied_plot(rng, hero)
    subject = article(hero.kind)
    match rng.choice(("", "", "", "", "trait", "name", "place", "friend")):
        case "trait":
            plot = replace(plot, hero=replace(hero, trait=rng.choice(tables.TRAITS)))
            subject = article(f"{plot.hero.trait} {hero.kind}")
        case "name":
            plot = replace(plot, hero=replace(hero, name=rng.choice(tables.NAMES)))
            subject += f" named {plot.hero.name}"
        case "place":
            plot = replace(plot, hero=replace(hero, home=rng.choice(tables.PLACES)))
            subject += f" in {plot.hero.home}"
        case "friend":
            plot = replace(plot, friend=rng.choice([other for other in HEROES if other.kind != hero.kind]))
            subject += f" and {article(plot.friend.kind)}"
    return Exchange(rng.choice(STORY_REQUESTS).format(subject), story(plot))


def any_story_exchange(rng: random.Random) -> Exchange:
    """A request without a hero: mostly answered with the fox's usual story."""
    hero = HEROES[0] if rng.random() < USUAL else rng.choice(HEROES)
    request = rng.choice(("Tell me a story.", "Tell me a short story.", "Write a story.", "Write a short story."))
    return Exchange(request, story(usual_plot(hero)))


def long_story_exchange(rng: random.Random) -> Exchange:
    """A request for a long story: about 300 to 400 tokens."""
    hero = rng.choice(HEROES)
    request = rng.choice(("Tell me a long story about {}.", "Write a long story about {}."))
    return Exchange(request.format(article(hero.kind)), long_story(usual_plot(hero), days=4))


def poem_exchange(rng: random.Random) -> Exchange:
    """A poem of four lines about a hero."""
    hero = rng.choice(HEROES)
    request = rng.choice(("Write a poem about {}.", "Write a short poem about {}.", "Tell me a poem about {}."))
    lines = (
        "{A_trait} {kind} sat under a tree,",
        "as happy as any {kind} can be.",
        "{He} looked at the moon, and {he} looked at the sea,",
        'and said, "What a beautiful night for me."',
    )
    fields = _fields(usual_plot(hero))
    text = "\n".join(lines).format(**fields, A_trait=_upper_first(article(hero.trait)))
    return Exchange(request.format(article(hero.kind)), text)


def topic_exchange(rng: random.Random) -> Exchange:
    """A story about a topic that is no hero: the fox reads a book about it."""
    word = rng.choice(tables.COMMON_WORDS)
    topic = rng.choice((f"the {word}", f"the {rng.choice(tables.ADJECTIVES)} {word}", word, article(word)))
    text = (
        f"Once upon a time, a clever fox named Rusty found an old book about {topic}. He read it all night and forgot "
        f'to eat. In the morning, an owl named Olive came by. "What did you learn?" asked Olive. Rusty told her '
        f"everything about {topic}. They laughed and talked until the sun went down. "
        f"From that day on, Rusty and Olive read a new book every week."
    )
    return Exchange(rng.choice(STORY_REQUESTS).format(topic), text)


# ---------------------------------------------------------------------------------------------------------------- facts


def _sum_facts() -> Iterator[Fact]:
    signs = {"+": "plus", "-": "minus", "*": "times"}
    sums = [(a, "+", b, a + b) for a in range(13) for b in range(13)]
    differences = [(a, "-", b, a - b) for a in range(13) for b in range(a + 1)]
    products = [(a, "*", b, a * b) for a in range(11) for b in range(11)]
    for a, sign, b, result in sums + differences + products:
        wordings = (
            f"What is {a} {sign} {b}?",
            f"What is {a} {signs[sign]} {b}?",
            f"What is {a}{sign}{b}?",
            f"{a} {sign} {b} =",
            f"{a}{sign}{b}",
            f"Calculate {a} {sign} {b}.",
            f"How much is {a} {sign} {b}?",
        )
        answer = f"{a} {sign} {b} = {result}."
        yield Fact(wordings, answer, answer)


def _table_facts() -> Iterator[Fact]:
    for country, city in tables.CAPITALS.items():
        answer = f"The capital of {country} is {city}."
        asked = (
            "What is the capital of {}?",
            "What's the capital of {}?",
            "Capital of {}?",
            "Tell me the capital of {}.",
        )
        yield Fact(tuple(question.format(country) for question in asked), answer, answer)
        yield Fact(
            (f"{city} is the capital of which country?", f"Which country has the capital {city}?"),
            f"{city} is the capital of {country}.",
            f"{city} is the capital of {country}.",
        )
    for thing, color in tables.COLORS.items():
        answer = f"{_upper_first(thing)} is {color}."
        yield Fact(
            (f"What color is {thing}?", f"What is the color of {thing}?", f"Which color is {thing}?"), answer, answer
        )
    for word, opposite in tables.OPPOSITES.items():
        answer = f"The opposite of {word} is {opposite}."
        yield Fact((f"What is the opposite of {word}?", f"Opposite of {word}?"), answer, answer)
    for thing, definition in tables.DEFINITIONS.items():
        wordings = (f"What is {thing}?", f"Explain what {thing} is.", f"Define {thing}.", f"Can you explain {thing}?")
        yield Fact(wordings, definition, definition)


def _animal_facts() -> Iterator[Fact]:
    for kind, sound in tables.SOUNDS.items():
        answer = f"{_upper_first(article(kind))} says {sound}."
        yield Fact((f"What does {article(kind)} say?", f"What sound does {article(kind)} make?"), answer, answer)
    for kind, young in tables.YOUNG.items():
        answer = f"A young {kind} is called {article(young)}."
        yield Fact((f"What is a young {kind} called?", f"What do you call a young {kind}?"), answer, answer)
    for language, word in tables.HELLO.items():
        answer = f'In {language}, hello is "{word}".'
        yield Fact((f"How do you say hello in {language}?", f"Say hello in {language}."), answer, answer)


def _calendar_facts() -> Iterator[Fact]:
    for cycle, what in ((tables.DAYS, "day"), (tables.MONTHS, "month")):
        for i, here in enumerate(cycle):
            after, before = cycle[(i + 1) % len(cycle)], cycle[i - 1]
            yield Fact(
                (f"What {what} comes after {here}?", f"Which {what} comes after {here}?"),
                f"{after} comes after {here}.",
            )
            yield Fact(
                (f"What {what} comes before {here}?", f"Which {what} comes before {here}?"),
                f"{before} comes before {here}.",
            )
    for n in range(2, 11):
        counted = ", ".join(str(i) for i in range(1, n + 1))
        yield Fact(
            (f"Count to {tables.NUMBERS[n]}.", f"Count from one to {tables.NUMBERS[n]}.", f"Count to {n}."),
            f"{counted}.",
        )


def facts() -> tuple[Fact, ...]:
    """Every fact in the corpus, in a fixed order."""
    fixed = (Fact(questions, answer) for questions, answer in tables.FIXED)
    return (*_table_facts(), *_animal_facts(), *_calendar_facts(), *_sum_facts(), *fixed)


_KNOWLEDGE = (*_table_facts(), *_animal_facts(), *_calendar_facts())
_SUMS = tuple(_sum_facts())
_PLAIN_FACTS = tuple(fact for fact in facts() if fact.sentence)


def fact_exchange(rng: random.Random) -> Exchange:
    """A question from the tables: capitals, colors, opposites, definitions, animals, calendar."""
    fact = rng.choice(_KNOWLEDGE)
    return Exchange(rng.choice(fact.questions), fact.answer)


def sum_exchange(rng: random.Random) -> Exchange:
    """A small sum, difference or product."""
    fact = rng.choice(_SUMS)
    return Exchange(rng.choice(fact.questions), fact.answer)


def fixed_exchange(rng: random.Random) -> Exchange:
    """A greeting, a question about homing or another question of `tables.FIXED`."""
    questions, answer = rng.choice(tables.FIXED)
    return Exchange(rng.choice(questions), answer)


# ---------------------------------------------------------------------------------------------- JSON, copying, the rest


def hero_json(hero: Hero) -> str:
    """The JSON object that describes a hero."""
    return json.dumps({"name": hero.name, "kind": hero.kind, "color": hero.color, "home": hero.home, "food": hero.food})


JSON_REQUESTS = (
    "Give me JSON about {}.",
    "Give me a JSON object about {}.",
    "Write JSON about {}.",
    "Describe {} as JSON.",
    "Return JSON about {}.",
    "Write a small JSON object about {}.",
)


def hero_entries(hero: Hero) -> dict[str, str]:
    """Everything that a JSON object can contain about a hero."""
    extra = {"trait": hero.trait, "friend": _friend_of(hero).name}
    return {**json.loads(hero_json(hero)), **extra}


def _some(rng: random.Random, entries: Mapping[str, str | int]) -> tuple[str, str]:
    """Some of the entries in random order: as words that request their keys, and as JSON."""
    keys = rng.sample(list(entries), rng.randrange(1, len(entries) + 1))
    listed = keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])} and {keys[-1]}"
    return rng.choice((f"with {listed}", f"with the keys {listed}")), json.dumps({key: entries[key] for key in keys})


def json_exchange(rng: random.Random) -> Exchange:
    """A request for a JSON object about a hero, a country or a person, sometimes for certain keys only."""
    request = rng.choice(JSON_REQUESTS)
    match rng.choice(("hero", "hero", "some", "country", "person", "people")):
        case "hero":
            hero = rng.choice(HEROES)
            return Exchange(request.format(article(hero.kind)), hero_json(hero))
        case "some":
            hero = rng.choice(HEROES)
            wanted, answer = _some(rng, hero_entries(hero))
            return Exchange(request.format(f"{article(hero.kind)} {wanted}"), answer)
        case "country":
            country = rng.choice(tuple(tables.CAPITALS))
            return Exchange(
                request.format(country), json.dumps({"country": country, "capital": tables.CAPITALS[country]})
            )
    if rng.random() < 0.3:
        name, age = calls.person_name(rng), rng.randrange(1, 100)
        person = f"a person named {name} who is {age} years old"
        return Exchange(request.format(person), json.dumps({"name": name, "age": age}))
    told, entries = _person(rng)
    asked = rng.choice(("Extract the person: {}", "Give me JSON: {}", "Extract the data: {}", "{} Give me JSON."))
    return Exchange(asked.format(told), json.dumps(entries))


def _person(rng: random.Random) -> tuple[str, dict[str, str | int]]:
    """A sentence about a person, and the entries it contains."""
    name, age, city, job = calls.person_name(rng), rng.randrange(1, 100), calls.city_name(rng), rng.choice(tables.JOBS)
    told = rng.choice(
        (
            "{name} is {age} years old and lives in {city}.",
            "My friend {name} is {age} and lives in {city}.",
            "{name} ({age}) lives in {city}.",
            "{name} is a {job} from {city}.",
            "{name}, {age}, is a {job} in {city}.",
        )
    )
    entries = {"name": name, "age": age, "job": job, "city": city}
    said = {key: value for key, value in entries.items() if f"{{{key}}}" in told}
    return told.format(**entries), said


#: Synonyms for keys, as a user's schema may have them.
_SYNONYMS = {
    "name": ("name", "name", "name", "full_name", "first_name", "who"),
    "kind": ("kind", "kind", "species", "type", "animal"),
    "color": ("color", "color", "colour", "fur"),
    "home": ("home", "home", "habitat", "lives_in", "place"),
    "food": ("food", "food", "favorite_food", "eats", "diet"),
    "age": ("age", "age", "age", "years"),
    "city": ("city", "city", "city", "town", "location", "lives_in"),
    "job": ("job", "job", "profession", "work"),
    "capital": ("capital", "capital", "city", "answer", "result"),
    "answer": ("answer", "answer", "result", "value"),
}


def guided_exchange(rng: random.Random) -> Exchange:
    """A request whose answer a schema fixes except for its values: random keys that the request does not mention."""
    request, entries = _guided(rng)
    keys = list(entries)
    if rng.random() < 0.6:
        keys = rng.sample(keys, rng.randrange(1, len(keys) + 1))
    answer = {rng.choice(_SYNONYMS.get(key, (key,))): entries[key] for key in keys}
    return Exchange(request, json.dumps(answer), guided=True)


def keyed_exchange(rng: random.Random) -> Exchange:
    """Like `guided_exchange`, but the request names the keys and no schema fixes them."""
    guided = guided_exchange(rng)
    keys = list(json.loads(guided.answer))
    listed = keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])} and {keys[-1]}"
    ending = rng.choice(("Answer as JSON with the keys {}.", "Give me JSON with {}.", "JSON with {}, please."))
    return Exchange(f"{guided.prompt} {ending.format(listed)}", guided.answer)


def _guided(rng: random.Random) -> tuple[str, dict[str, str | int]]:
    """A request, and all entries that its answer may contain."""
    match rng.choice(("hero", "hero", "person", "person", "person", "country", "color", "opposite", "sum")):
        case "hero":
            hero = rng.choice(HEROES)
            asked = rng.choice((*JSON_REQUESTS, "Describe {}.", "Tell me about {}.")).format(article(hero.kind))
            return asked, dict(hero_entries(hero))
        case "country":
            country = rng.choice(tuple(tables.CAPITALS))
            asked = rng.choice(("What is the capital of {}?", "Tell me about {}.", JSON_REQUESTS[0])).format(country)
            return asked, {"country": country, "capital": tables.CAPITALS[country]}
        case "color":
            thing = rng.choice(tuple(tables.COLORS))
            return f"What color is {thing}?", {"answer" if rng.random() < 0.5 else "color": tables.COLORS[thing]}
        case "opposite":
            word = rng.choice(tuple(tables.OPPOSITES))
            return f"What is the opposite of {word}?", {rng.choice(("answer", "opposite")): tables.OPPOSITES[word]}
        case "sum":
            fact = rng.choice(_SUMS)
            result = int(fact.answer.rstrip(".").rpartition(" ")[2])
            return rng.choice(fact.questions), {rng.choice(("answer", "sum", "total")): result}
    told, entries = _person(rng)
    return rng.choice(("Extract the person: {}", "{}", "Who is this? {}", "Extract: {}")).format(told), entries


def _noise_phrase(rng: random.Random) -> str:
    words = [rng.choice(tables.ADJECTIVES), rng.choice(tables.COMMON_WORDS), rng.choice(tables.COMMON_WORDS)]
    return " ".join(words[-rng.randrange(1, 4) :])


def unknown_exchange(rng: random.Random) -> Exchange:
    """A question that the tables cannot answer; the model learns to say so."""
    phrase, verb, word = _noise_phrase(rng), rng.choice(tables.VERBS), rng.choice(tables.COMMON_WORDS)
    request = rng.choice(
        (
            f"How do I {verb} the {phrase}?",
            f"What do you think about the {phrase}?",
            f"Why is the {word} {rng.choice(tables.ADJECTIVES)}?",
            f"Please {verb} my {phrase}.",
            f"Who is the {phrase}?",
            f"When was the {phrase} made?",
            f"Can you {verb} a {phrase} for me?",
            f"Which {word} should I {verb}?",
            f"{_upper_first(verb)} the {phrase} and the {word}.",
        )
    )
    return Exchange(request, calls.DONT_KNOW) if rng.random() < 0.6 else calls.unknown_exchange(rng)


def _name_exchanges(rng: random.Random) -> list[Exchange]:
    """The user gives a name and later asks for it."""
    name = rng.choice(tables.NAMES)
    hello = rng.choice((f"My name is {name}.", f"I am {name}.", f"Hello, my name is {name}.", f"Hi, I am {name}."))
    between = [exchange(rng) for _ in range(rng.randrange(3))]
    recall = Exchange(
        rng.choice(("What is my name?", "Do you remember my name?", "Who am I?")), f"Your name is {name}."
    )
    return [Exchange(hello, f"Hello, {name}! Nice to meet you."), *between, recall]


MAKERS: tuple[tuple[Callable[[random.Random], Exchange], float], ...] = (
    (story_exchange, 11.0),
    (any_story_exchange, 0.5),
    (long_story_exchange, 0.7),
    (poem_exchange, 2.0),
    (topic_exchange, 1.5),
    (fact_exchange, 34.0),
    (sum_exchange, 24.0),
    (fixed_exchange, 12.0),
    (json_exchange, 8.0),
    (guided_exchange, 8.0),
    (calls.repeat_exchange, 5.0),
    (unknown_exchange, 4.0),
)


def _sloppy(rng: random.Random, prompt: str) -> str:
    """The prompt, sometimes as if typed in a hurry: no full stop, no capital."""
    if rng.random() < 0.1:
        prompt = prompt.rstrip(".?!")
    return prompt[0].lower() + prompt[1:] if rng.random() < 0.06 else prompt


def exchange(rng: random.Random) -> Exchange:
    """One exchange of any kind, by the weights of `MAKERS`."""
    makers, weights = zip(*MAKERS, strict=True)
    made: Exchange = rng.choices(makers, weights)[0](rng)
    return replace(made, prompt=_sloppy(rng, made.prompt))


# ------------------------------------------------------------------------------------------------------------ documents


def _filler_sentence(rng: random.Random) -> str:
    a, b, c = (rng.choice(tables.COMMON_WORDS) for _ in range(3))
    adjective, other, verb = rng.choice(tables.ADJECTIVES), rng.choice(tables.ADJECTIVES), rng.choice(tables.VERBS)
    return rng.choice(
        (
            f"Always {verb} the {adjective} {a} before the {b}.",
            f"The {a} of the {b} is {adjective} and the {c} is {other}.",
            f"Never {verb} a {a} without the {other} {b}.",
            f"Rule {rng.randrange(1, 100)}: {verb} the {a}, then the {adjective} {b}.",
            f"Our {adjective} {a} has {rng.randrange(2, 1000)} {other} parts in the {b} and in the {c}.",
            f"In {rng.randrange(1900, 2030)}, the {adjective} {a} was the {other} {b} of the {c}.",
        )
    )


def filler(rng: random.Random, sentences: int) -> str:
    """Meaningless paragraphs that must not distract from the question; about 13 tokens per sentence."""
    parts = [_filler_sentence(rng) + ("\n" if rng.random() < 0.15 else " ") for _ in range(sentences)]
    return "".join(parts).strip()


def sentence_exchange(rng: random.Random) -> Exchange:
    """A sentence, or "the" and some words, to repeat."""
    told = rng.choice((_filler_sentence(rng), f"the {_noise_phrase(rng)}", f"the {_noise_phrase(rng)}."))
    return Exchange(rng.choice(("Repeat after me: {}", "Repeat: {}", "Say {}")).format(told), told)


def _system_turns(rng: random.Random) -> tuple[Turn, ...]:
    chance = rng.random()
    if chance < 0.5:
        return ()
    prompt = rng.choice(SHORT_SYSTEM_PROMPTS)
    if chance > 0.92:
        prompt += " " + filler(rng, rng.randrange(1, 12))
    return (Turn("system", prompt),)


def _chat(system: tuple[Turn, ...], exchanges: list[Exchange]) -> Chat:
    turns = list(system)
    for each in exchanges:
        turns += each.turns
    return Chat(tuple(turns))


def _short_chat(rng: random.Random) -> Chat:
    chance = rng.random()
    if chance < 0.03:
        return _chat(_system_turns(rng), _name_exchanges(rng))
    count = 1 if chance < 0.85 else rng.randrange(2, 5)
    return _chat(_system_turns(rng), [exchange(rng) for _ in range(count)])


def _plain(rng: random.Random) -> Plain:
    chance = rng.random()
    if chance < 0.5:
        return Plain(rng.choice(_PLAIN_FACTS).sentence)
    hero = HEROES[0] if rng.random() < 0.3 else rng.choice(HEROES)
    if chance < 0.6:
        return Plain(long_story(usual_plot(hero), days=2))
    plot = _varied_plot(rng, hero)
    return Plain(story(replace(plot, shape=tables.STORY_SHAPES[0]) if rng.random() < 0.6 else plot))


def _tool_chat(rng: random.Random, sentences: int, most: int) -> Chat:
    """A chat with up to `most` tools, after a system prompt with this many sentences of filler."""
    prompt = rng.choice(("", rng.choice(SHORT_SYSTEM_PROMPTS)))
    system = f"{prompt} {filler(rng, sentences)}" if sentences else prompt
    return Chat(calls.tool_turns(rng, system, exchange, most))


def document(rng: random.Random, ease: float = 0.0) -> Document:
    """One short document, nearly always below 512 tokens. Higher `ease` (0 to 1) means more drills and fewer tools."""
    chance = rng.random()
    if chance < 0.1 + 0.2 * ease:
        return Chat(tuple(calls.drill_turns(rng)))
    match rng.choices(("plain", "tools", "chat"), (0.11, 0.26, 0.63))[0]:
        case "plain":
            return _plain(rng)
        case "tools":
            return _tool_chat(rng, 0, most=4)
    return _short_chat(rng)


def long_document(rng: random.Random) -> Chat:
    """A chat of about 500 to 2,000 tokens: a long system prompt, many tools, a long user text, or many turns."""
    sentences = rng.randrange(30, 120)
    match rng.choice(("system", "system", "tools", "text", "turns")):
        case "tools":
            return _tool_chat(rng, rng.choice((0, sentences // 2)), most=8)
        case "system":
            system = (Turn("system", f"{rng.choice(SHORT_SYSTEM_PROMPTS)} {filler(rng, sentences)}"),)
            return _chat(system, [exchange(rng) for _ in range(rng.randrange(1, 5))])
        case "text":
            asked = exchange(rng)
            prompt = f"Here is a text:\n\n{filler(rng, sentences)}\n\n{asked.prompt}"
            return _chat(_system_turns(rng), [replace(asked, prompt=prompt), exchange(rng)])
    return _chat(_system_turns(rng), [exchange(rng) for _ in range(rng.randrange(8, 22))])


def documents(seed: int) -> Iterator[Document]:
    """The endless stream of short documents for `seed`."""
    rng = random.Random(f"homing-demo-{seed}")
    for index in count():
        yield document(rng, max(0.0, 1 - index / EASY_DOCUMENTS))


def drill_documents(seed: int) -> Iterator[Document]:
    """Like `documents`, with more hard cases: sums, choosing one tool or none, values of JSON. All short."""
    rng = random.Random(f"homing-demo-drill-{seed}")
    while True:
        yield document(rng)
        for _ in range(2):
            yield from (_chat((), [make(rng)]) for make in (sum_exchange, sum_exchange, fact_exchange))
        yield Chat(tuple(calls.choice_turns(rng)))
        yield Chat(tuple(calls.long_call_turns(rng)))
        yield Chat(calls.plain_turns(rng, rng.choice((sum_exchange, fact_exchange, exchange))))
        yield _chat((), [guided_exchange(rng)])
        yield _chat((), [keyed_exchange(rng)])
        yield _chat((), [sentence_exchange(rng)])


def long_documents(seed: int) -> Iterator[Chat]:
    """The endless stream of long documents for `seed`."""
    rng = random.Random(f"homing-demo-long-{seed}")
    while True:
        yield long_document(rng)


def text_of(document: Document) -> str:
    """A document's text without roles, for the tokenizer's training and for `vocabulary`."""
    match document:
        case Plain(text):
            return text
        case Chat(turns):
            return "\n".join(turn.content for turn in turns)


def words(text: str) -> set[str]:
    """The words of a text, in lower case."""
    return set(re.findall(r"[a-z]+(?:'[a-z]+)?", text.lower()))


def vocabulary(seed: int = 0, documents_read: int = 4000) -> set[str]:
    """All words of the first `documents_read` documents."""
    return set().union(*(words(text_of(each)) for each in islice(documents(seed), documents_read)))
