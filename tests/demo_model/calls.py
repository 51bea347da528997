"""Training text about copying and tools for the demo model: drills, and chats that call functions.

Pure and seeded, like `corpus.py`, which mixes these chats into its documents. `FUNCTIONS` is the small set of functions
that the model knows; chats vary in which of them they offer, how these are described and which arguments are asked
about. `tokenizer.CHAT_TEMPLATE` must render tools, calls and results in the same way; a test compares the two.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from . import tables

Tool = dict[str, Any]
JsonObject = dict[str, Any]
Value = str | int


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a chat; `role` is "system", "user", "assistant" or "tool".

    `guided`: a schema fixes everything in this JSON object except its values, so only the values are learnt.
    """

    role: str
    content: str
    guided: bool = False


@dataclass(frozen=True, slots=True)
class Exchange:
    """A user's message and the model's expected answer; `guided` as in `Turn`."""

    prompt: str
    answer: str
    guided: bool = False

    @property
    def turns(self) -> tuple[Turn, Turn]:
        """The exchange as two messages."""
        return Turn("user", self.prompt), Turn("assistant", self.answer, self.guided)


DONT_KNOW = "I am sorry, but I am only a small demo model and I do not know that."

#: Makes an exchange of the plain corpus, which the model must answer the same way when tools are offered.
PlainExchange = Callable[[random.Random], Exchange]


def signature(tool: Tool) -> str:
    """A function as the prompt shows it: `get_weather(city: string, unit?: celsius|fahrenheit): Get the weather.`."""
    schema = tool["parameters"]
    parameters = []
    for key, each in schema["properties"].items():
        optional = "" if key in schema.get("required", ()) else "?"
        parameters.append(f"{key}{optional}: {'|'.join(each['enum']) if 'enum' in each else each['type']}")
    described = f": {tool['description']}" if "description" in tool else ""
    return f"{tool['name']}({', '.join(parameters)}){described}"


def system_text(system: str, tools: Sequence[Tool]) -> str:
    """The system message of a chat with tools; `system` may be empty."""
    head = f"{system}\n\n" if system else ""
    listed = "\n".join(signature(each) for each in tools)
    return (
        f"{head}# Tools\n\n<tools>\n{listed}\n</tools>\n\n"
        'To call one, write:\n<tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call>'
    )


def call_text(name: str, arguments: JsonObject) -> str:
    """A function call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def response_text(result: str) -> str:
    """A function's result as the prompt shows it."""
    return f"<tool_response>\n{result}\n</tool_response>"


# ---------------------------------------------------------------------------------------------------------------- words

_SYLLABLES = tuple(c + v for c in "bdfgklmnprstvz" for v in "aeiou")
_NOUNS = tuple(dict.fromkeys(tables.COMMON_WORDS))
CITIES = (*tables.CAPITALS.values(), *tables.MORE_CITIES)
_PEOPLE = (*tables.NAMES, *(hero.name for hero in tables.HEROES))
_ENDINGS = tuple("ford ton burg ville field stad mont port ham wick dale ino ella ara ovo heim by grad mouth".split())


def made_up(rng: random.Random) -> str:
    """A word of two to four syllables that is in no table."""
    return "".join(rng.choice(_SYLLABLES) for _ in range(rng.randrange(2, 5))) + rng.choice(("", "n", "s", "r"))


def _blend(rng: random.Random, words: Sequence[str]) -> str:
    """The start of one word and the end of another: similar to both, but split into tokens like neither."""
    first, second = rng.choice(words), rng.choice(words).lower()
    return first[: rng.randrange(1, len(first))] + second[rng.randrange(1, len(second)) :]


def _name(rng: random.Random, known: Sequence[str]) -> str:
    """A known name, or one that is in no table and can therefore only be copied."""
    match rng.randrange(10):
        case 0:
            return made_up(rng).capitalize()
        case 1 | 2:
            return _blend(rng, known)
        case 3:
            return _blend(rng, known)[: rng.randrange(2, 6)].strip() + rng.choice(_ENDINGS)
    return rng.choice(known)


def city_name(rng: random.Random) -> str:
    """A known or made-up city."""
    return _name(rng, CITIES)


def one_city(rng: random.Random) -> tuple[Value, ...]:
    """A city as the only argument of a function."""
    return (city_name(rng),)


def person_name(rng: random.Random) -> str:
    """A known or made-up first name."""
    return _name(rng, tables.NAMES)


def _country(rng: random.Random) -> str:
    return _name(rng, tuple(tables.CAPITALS))


def _word(rng: random.Random) -> str:
    pool = rng.choice((_NOUNS, _NOUNS, tables.ADJECTIVES, tables.VERBS, CITIES, _PEOPLE, ()))
    return rng.choice(pool) if pool else rng.choice((made_up, city_name))(rng)


def _phrase(rng: random.Random, longest: int) -> str:
    return " ".join(_word(rng) for _ in range(rng.randrange(1, longest + 1)))


def _number(rng: random.Random) -> int:
    return rng.randrange(10 ** rng.choice((1, 2, 2, 3, 4)))


def _clock(rng: random.Random) -> str:
    return f"{rng.randrange(24):02}:{rng.randrange(60):02}"


def _file(rng: random.Random) -> str:
    return f"{rng.choice(('', '', 'docs/', 'src/'))}{_word(rng).lower()}.{rng.choice(('txt', 'md', 'py', 'json'))}"


def _conditions(rng: random.Random) -> str:
    sky = rng.choice(("sunny", "rainy", "cloudy", "windy", "foggy", "snowy", "clear", "stormy", "warm", "cold", "dry"))
    degrees = f"{rng.randrange(-9, 40)}{rng.choice((' degrees', ' C', '°C'))}"
    return rng.choice((f"{degrees} and {sky}", f"{sky}, {degrees}", sky, f"{sky} and {degrees}", degrees))


# --------------------------------------------------------------------------------------------------------------- drills


def repeat_exchange(rng: random.Random) -> Exchange:
    """A phrase to repeat word for word."""
    phrase = _phrase(rng, 7) + rng.choice(("", "", ".", "!"))
    if rng.random() < 0.3:
        phrase = phrase[0].upper() + phrase[1:]
    return Exchange(rng.choice(("Repeat after me: {}", "Repeat: {}", "Say {}", "Repeat:\n{}")).format(phrase), phrase)


def _value(rng: random.Random) -> Value:
    return _number(rng) if rng.random() < 0.3 else _word(rng)


def copy_turns(rng: random.Random) -> list[Turn]:
    """A long phrase to repeat, twice as dense in copied tokens as any other exchange that needs its prompt."""
    phrase = " ".join(_word(rng) for _ in range(rng.randrange(4, 16)))
    return [Turn("user", f"Repeat:\n{phrase}"), Turn("assistant", phrase)]


def lookup_turns(rng: random.Random) -> list[Turn]:
    """A small JSON object, then a request for each value, by its key alone or by a question that contains the key."""
    keys = list(dict.fromkeys(_key(rng) for _ in range(rng.randrange(2, 7))))
    entries = {key: _value(rng) for key in keys}
    turns: list[Turn] = []
    head = json.dumps(entries) + "\n"
    for key in rng.sample(keys, len(keys)):
        if rng.random() < 0.5:
            asked, answer = key, json.dumps({key: entries[key]})
        else:
            asked = f"What is the {key.replace('_', ' ')}?"
            answer = f"The {key.replace('_', ' ')} is {entries[key]}."
        turns += [Turn("user", head + asked), Turn("assistant", answer)]
        head = ""
    return turns


# ---------------------------------------------------------------------------------------------------------------- tools

_VERBS = ("get", "get", "get", "find", "fetch", "lookup", "show", "read", "query", "check", "load", "search", "tell")
_SUFFIXES = ("info", "data", "tool", "service", "report", "value", "for", "api")
_KEYS = _NOUNS + tuple(
    "id key item object subject target query input text value place location town zone symbol term".split()
)


def _key(rng: random.Random) -> str:
    chance = rng.random()
    if chance < 0.15:
        return made_up(rng)
    key = rng.choice(_KEYS)
    return f"{key}_{rng.choice(_KEYS)}" if chance > 0.85 else key


def _function_name(rng: random.Random, topic: str) -> str:
    verb = rng.choice(_VERBS)
    suffix = rng.choice(_SUFFIXES)
    return rng.choice((topic, f"{topic}_{suffix}", f"{verb}_{topic}_{suffix}", *(5 * (f"{verb}_{topic}",))))


@dataclass(frozen=True, slots=True)
class Function:
    """A function that users ask for; `{0}`, `{1}` are its arguments, numbered like its parameters.

    `name` and each parameter's first choice are nearly always used when a chat has other functions, too.
    """

    name: str
    topic: str
    about: tuple[str, ...]
    parameters: tuple[tuple[str, ...], ...]
    kinds: tuple[str, ...]
    questions: tuple[str, ...]
    draw: Callable[[random.Random], tuple[Value, ...]]
    result: Callable[[random.Random], Value]
    #: The model's answer after it received the result.
    told: str


def _sum(name: str, sign: str, spoken: str, questions: tuple[str, ...]) -> Function:
    """An arithmetic function. Its result is random: the model must repeat the tool's result, not compute its own."""

    def two_numbers(rng: random.Random) -> tuple[int, int]:
        a, b = (rng.randrange(rng.choice((13, 100, 100, 1000))) for _ in range(2))
        return a, b

    return Function(
        name,
        name,
        (f"{name.capitalize()} two numbers.", f"{name.capitalize()} a and b.", f"Returns a {spoken} b."),
        (("a", "x", "first"), ("b", "y", "second")),
        ("number", "number"),
        (
            *(2 * (f"What is {{0}} {sign} {{1}}?",)),
            f"What is {{0}} {spoken} {{1}}?",
            f"Calculate {{0}} {sign} {{1}}.",
            f"How much is {{0}} {sign} {{1}}?",
            *questions,
        ),
        two_numbers,
        _number,
        f"{{0}} {sign} {{1}} = {{result}}.",
    )


FUNCTIONS: tuple[Function, ...] = (
    Function(
        "get_weather",
        "weather",
        ("Get the weather in a city.", "Current weather of a city.", "Get the current weather in a given location."),
        (("city", "location", "place"),),
        ("string",),
        (
            *(3 * ("What is the weather in {0}?",)),
            "What's the weather in {0}?",
            "What is the weather like in {0}?",
            "What's the weather like in {0} today?",
            "How is the weather in {0}?",
            "Tell me the weather in {0}.",
            "Weather in {0}?",
        ),
        one_city,
        _conditions,
        "The weather in {0} is {result}.",
    ),
    Function(
        "get_time",
        "time",
        ("Get the time in a city.", "Current time in a city.", "What time it is in a place."),
        (("city", "location", "place"),),
        ("string",),
        ("What time is it in {0}?", "What is the time in {0}?", "Tell me the time in {0}.", "Time in {0}?"),
        one_city,
        _clock,
        "The time in {0} is {result}.",
    ),
    Function(
        "get_population",
        "population",
        ("Get the population of a country.", "How many people live in a country."),
        (("country", "place", "name"),),
        ("string",),
        ("What is the population of {0}?", "How many people live in {0}?", "Tell me the population of {0}."),
        lambda rng: (_country(rng),),
        lambda rng: rng.randrange(10 ** rng.choice((4, 5, 6, 7, 8))),
        "The population of {0} is {result}.",
    ),
    _sum("add", "+", "plus", ("Add {0} and {1}.", "Add {0} to {1}.")),
    _sum("multiply", "*", "times", ("Multiply {0} by {1}.", "Multiply {0} and {1}.")),
    _sum("subtract", "-", "minus", ("Take {0} minus {1}.",)),
    Function(
        "convert",
        "convert",
        ("Convert a value to another unit.", "Converts between units."),
        (("value", "amount"), ("from_unit", "source"), ("to_unit", "target")),
        ("number", "string", "string"),
        ("Convert {0} {1} to {2}.", "How much is {0} {1} in {2}?", "Convert {0} {1} into {2}."),
        lambda rng: (_number(rng), *rng.sample(tables.UNITS, 2)),
        lambda rng: rng.randrange(1, 5000),
        "{0} {1} is {result} {2}.",
    ),
    Function(
        "search",
        "search",
        ("Search the web.", "Search for documents.", "Full text search."),
        (("query", "q", "text"),),
        ("string",),
        ("Search for {0}.", "Search the web for {0}.", "Look up {0}."),
        lambda rng: (_phrase(rng, 4),),
        lambda rng: _phrase(rng, 5),
        "I found this: {result}.",
    ),
    Function(
        "send_message",
        "message",
        ("Send a message to somebody.", "Sends a text message."),
        (("to", "recipient", "name"), ("text", "message", "body")),
        ("string", "string"),
        ("Send a message to {0}: {1}", "Send {0} the message: {1}", "Message {0}: {1}"),
        lambda rng: (person_name(rng), _phrase(rng, 5)),
        lambda rng: rng.choice(("sent", "ok", "delivered", "done")),
        "The message to {0} is {result}.",
    ),
    Function(
        "set_alarm",
        "alarm",
        ("Set an alarm.", "Set an alarm clock to a time."),
        (("time", "at", "clock"),),
        ("string",),
        ("Set an alarm for {0}.", "Wake me up at {0}.", "Set the alarm to {0}."),
        lambda rng: (_clock(rng),),
        lambda rng: rng.choice(("set", "ok", "done", "on")),
        "The alarm for {0} is {result}.",
    ),
    Function(
        "read_file",
        "file",
        ("Read a file.", "Read a file of the project.", "Returns what a file contains."),
        (("path", "file", "filename"),),
        ("string",),
        ("Read the file {0}.", "Read {0}.", "What is in the file {0}?", "Open the file {0}."),
        lambda rng: (_file(rng),),
        lambda rng: _phrase(rng, 5),
        "The file {0} says: {result}.",
    ),
    Function(
        "translate",
        "translate",
        ("Translate a text.", "Translate a text into a language."),
        (("text", "phrase"), ("language", "to")),
        ("string", "string"),
        ("Translate {0} to {1}.", "Translate {0} into {1}.", "What is {0} in {1}?", "How do you say {0} in {1}?"),
        lambda rng: (_phrase(rng, 3), rng.choice(tables.LANGUAGES)),
        lambda rng: _phrase(rng, 3),
        "In {1}, {0} is {result}.",
    ),
)

#: Common examples are asked for more often.
_WEIGHTS = tuple({"get_weather": 4.0, "add": 2.0, "multiply": 2.0, "get_time": 2.0}.get(f.name, 1.0) for f in FUNCTIONS)


def any_function(rng: random.Random) -> Function:
    """A function that is not in FUNCTIONS: some property of something. Its name contains a word of the question."""
    topic = rng.choice(_NOUNS) if rng.random() < 0.8 else made_up(rng)
    return Function(
        _function_name(rng, topic),
        topic,
        (f"Get the {topic}", f"Returns the {topic}.", f"{topic.capitalize()} of something", f"The {topic}."),
        ((_key(rng),),),
        ("string",),
        (
            *(2 * (f"What is the {topic} of {{0}}?",)),
            f"Tell me the {topic} of {{0}}.",
            f"Get the {topic} of {{0}}.",
            f"Show me the {topic} of {{0}}.",
        ),
        lambda rng: (rng.choice((city_name, _country, person_name, _word))(rng),),
        lambda rng: rng.choice((_number, lambda rng: _phrase(rng, 3)))(rng),
        f"The {topic} of {{0}} is {{result}}.",
    )


@dataclass(frozen=True, slots=True)
class Need:
    """A question that one function answers: its arguments in order, its result and the model's final answer."""

    question: str
    arguments: tuple[Value, ...]
    result: str
    answer: str


@dataclass(frozen=True, slots=True)
class Skill:
    """A function as one chat offers it."""

    function: Function
    tool: Tool
    keys: tuple[str, ...]
    #: Arguments that every call has in addition: the first value of a parameter that lists its values.
    fixed: Mapping[str, str]

    def ask(self, rng: random.Random) -> Need:
        """A question that needs this function."""
        return need(rng, self.function)

    def call(self, need: Need) -> str:
        """The call that answers `need`."""
        return call_text(self.tool["name"], {**dict(zip(self.keys, need.arguments, strict=True)), **self.fixed})


def need(rng: random.Random, function: Function) -> Need:
    """A question that needs `function`."""
    arguments = function.draw(rng)
    question = rng.choice(function.questions).format(*arguments)
    if " is {result}" in function.told and rng.random() < 0.2:
        entries = {_key(rng): _value(rng) for _ in range(rng.randrange(1, 4))}
        listed = ", ".join(f"{key} {value}" for key, value in entries.items())
        answer = function.told.replace(" is {result}", ": {result}").format(*arguments, result=listed)
        return Need(question, arguments, json.dumps(entries), answer)
    result = function.result(rng) if rng.random() < 0.8 else _value(rng)
    told = json.dumps({rng.choice(("result", "value", function.topic)): result}) if rng.random() < 0.2 else str(result)
    return Need(question, arguments, told, function.told.format(*arguments, result=result))


def skill(rng: random.Random, function: Function, strange: float = 0.0) -> Skill:
    """`function` as a client may offer it; `strange` is the probability of unusual names for it and its parameters."""
    name = _function_name(rng, function.topic) if rng.random() < strange else function.name
    keys = tuple(each[0] for each in function.parameters)
    if rng.random() < strange + 0.15:
        choice = rng.randrange(len(function.parameters[0]))
        keys = tuple(each[choice % len(each)] for each in function.parameters)
    elif rng.random() < strange and len(keys) == 1:
        keys = (_key(rng),)
    properties: JsonObject = {}
    for key, kind in zip(keys, function.kinds, strict=True):
        properties[key] = {"type": rng.choice(("integer", "number")) if kind == "number" else kind}
    fixed: dict[str, str] = {}
    if rng.random() < 0.1:
        properties["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
        fixed = {"unit": "celsius"} if rng.random() < 0.6 else {}
    required = {} if rng.random() < 0.1 and not fixed else {"required": [*keys, *fixed]}
    described = {"description": rng.choice(function.about)} if rng.random() < 0.6 else {}
    parameters = {"type": "object", "properties": properties, **required}
    return Skill(function, {"name": name, **described, "parameters": parameters}, keys, fixed)


def skills(rng: random.Random, most: int, least: int = 1) -> list[Skill]:
    """`least` to `most` functions for one chat, with distinct topics. A single one may have any name."""
    wanted = rng.randrange(least, most + 1)
    if wanted == 1:
        function = any_function(rng) if rng.random() < 0.25 else rng.choices(FUNCTIONS, _WEIGHTS)[0]
        return [skill(rng, function, strange=0.3)]
    offered: dict[str, Function] = {}
    strange = 0.2 if rng.random() < 0.15 else 0.0
    while len(offered) < wanted:
        function = any_function(rng) if rng.random() < 0.08 else rng.choices(FUNCTIONS, _WEIGHTS)[0]
        offered[function.topic] = function
    return [skill(rng, each, strange) for each in offered.values()]


def _call_turns(rng: random.Random, skill: Skill) -> list[Turn]:
    need = skill.ask(rng)
    question = need.question.rstrip(".?") if rng.random() < 0.08 else need.question
    turns = [Turn("user", question), Turn("assistant", skill.call(need))]
    return [*turns, Turn("tool", response_text(need.result)), Turn("assistant", need.answer)]


def choice_turns(rng: random.Random) -> list[Turn]:
    """Several tools and one question for each, without results: choosing the tool is the hard part to learn."""
    offered = skills(rng, most=4, least=2)
    turns = [Turn("system", system_text("", [each.tool for each in offered]))]
    for each in rng.sample(offered, len(offered)):
        need = each.ask(rng)
        turns += [Turn("user", need.question), Turn("assistant", each.call(need))]
    return turns


def drill_turns(rng: random.Random) -> list[Turn]:
    """One of the drills."""
    return rng.choices((copy_turns, lookup_turns, choice_turns), (1, 1.5, 5))[0](rng)


def long_call_turns(rng: random.Random) -> list[Turn]:
    """A call with several arguments to the only tool, which is not arithmetic, and its result."""
    several = [each for each in FUNCTIONS if len(each.parameters) > 1 and each.topic not in SUMS]
    offered = skill(rng, rng.choice(several))
    return [Turn("system", system_text("", [offered.tool])), *_call_turns(rng, offered)]


def plain_turns(rng: random.Random, plain: PlainExchange) -> tuple[Turn, ...]:
    """A question to be answered without tools, in a chat with tools for something else."""
    while True:
        offered, asked = skills(rng, most=4), plain(rng)
        if not _is_for({each.function.topic for each in offered}, asked.prompt):
            return Turn("system", system_text("", [each.tool for each in offered])), *asked.turns


def tool_turns(rng: random.Random, system: str, plain: PlainExchange, most: int = 4) -> tuple[Turn, ...]:
    """A chat with tools: one to three questions, most of them for one of the functions, others for none."""
    offered = skills(rng, most)
    functions = {each.function.topic for each in offered}
    turns = [Turn("system", system_text(system, [each.tool for each in offered]))]
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        asked = _without_tool(rng, plain, functions)
        if rng.random() < 0.35 and not _is_for(functions, asked.prompt):
            turns += asked.turns
        else:
            turns += _call_turns(rng, rng.choice(offered))
    return tuple(turns)


def unknown_exchange(rng: random.Random, offered: Set[str] = frozenset()) -> Exchange:
    """A question for a function that is not offered."""
    function = rng.choice([each for each in FUNCTIONS if each.topic not in offered and each.topic not in SUMS])
    return Exchange(need(rng, function).question, DONT_KNOW)


SUMS = ("add", "multiply", "subtract")


def _without_tool(rng: random.Random, plain: PlainExchange, offered: Set[str]) -> Exchange:
    """A question that the model answers by itself, or one whose function is missing."""
    return plain(rng) if rng.random() < 0.75 else unknown_exchange(rng, offered)


def _is_for(offered: Set[str], question: str) -> bool:
    """Whether a question meant to be answered without tools might mean one of these functions."""
    has_digits = any(character.isdigit() for character in question)
    return (
        any(topic in question.lower() for topic in offered)
        or ("translate" in offered and "hello" in question.lower())
        or (has_digits and any(topic in offered for topic in SUMS))
    )
