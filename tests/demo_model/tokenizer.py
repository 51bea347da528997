"""The demo model's tokenizer: byte-level BPE over the corpus, its special tokens and its chat template.

Any Unicode text survives encoding and decoding, because the alphabet is all 256 bytes. Digits are single tokens. Text
encoded with special tokens starts with `<|begin|>`; the chat template adds `<|begin|>` itself, so rendered chats are
encoded without.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice, pairwise
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from . import corpus

PAD, BEGIN, END, TURN_START, TURN_END = SPECIAL_TOKENS = (
    "<|pad|>",
    "<|begin|>",
    "<|end|>",
    "<|im_start|>",
    "<|im_end|>",
)

VOCAB_SIZE = 4096

#: What merges are learnt from: words with their leading space, single digits, runs of punctuation, white space.
#: Punctuation never joins the next word: `get_word`, `"word"` and a first `word` share its tokens.
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
#: The saved pattern: Qwen2's, which fastokens splits by hand-written code, ten times as fast as any other pattern. No
#: merge joins a word with the punctuation or tab before it, so the ids are the same as with `SPLIT`.
SAVED_SPLIT = SPLIT.replace(r" ?\p{L}+", r"[^\r\n\p{L}\p{N}]?\p{L}+")

#: Roles are written as given. Tools create a system turn or join the first one; calls and results are written as in
#: `calls.py`, in Hermes' format. Nothing varies from day to day, so that equal messages give equal prefixes.
CHAT_TEMPLATE = """\
{%- macro text(message) %}
    {%- if message['content'] is string %}
        {{- message['content'] }}
    {%- elif message['content'] %}
        {%- for part in message['content'] %}
            {%- if part['type'] == 'text' %}
                {{- part['text'] }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{{- '<|begin|>' }}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages and messages[0]['role'] == 'system' %}
        {{- text(messages[0]) + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n\\n<tools>\\n' }}
    {%- for tool in tools %}
        {%- set function = tool['function'] %}
        {%- set schema = function['parameters'] or {} %}
        {{- function['name'] + '(' }}
        {%- for key, each in (schema['properties'] or {}).items() %}
            {{- (', ' if not loop.first else '') + key + ('' if key in (schema['required'] or []) else '?') }}
            {%- if each['enum'] %}
                {{- ': ' + each['enum'] | join('|') }}
            {%- elif each['type'] is string %}
                {{- ': ' + each['type'] }}
            {%- endif %}
        {%- endfor %}
        {{- ')' + (': ' + function['description'] if function['description'] else '') + '\\n' }}
    {%- endfor %}
    {{- '</tools>\\n\\nTo call one, write:\\n<tool_call>\\n{"name": NAME, "arguments": ARGUMENTS}\\n</tool_call>' }}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (tools and loop.first and message['role'] == 'system') %}
        {{- '<|im_start|>' + message['role'] + '\\n' }}
        {%- if message['role'] == 'tool' %}
            {{- '<tool_response>\\n' + text(message) + '\\n</tool_response>' }}
        {%- else %}
            {{- text(message) }}
        {%- endif %}
        {%- for call in message['tool_calls'] or [] %}
            {%- if message['content'] or not loop.first %}
                {{- '\\n' }}
            {%- endif %}
            {{- '<tool_call>\\n{"name": ' + call['function']['name'] | tojson }}
            {{- ', "arguments": ' + call['function']['arguments'] | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def _training_text(seed: int, documents: int) -> Iterator[str]:
    yield from (corpus.text_of(each) for each in islice(corpus.documents(seed), documents))
    yield from (corpus.text_of(each) for each in islice(corpus.long_documents(seed), documents // 100))
    yield "system\nuser\nassistant\ntool\ndeveloper\n"


#: A leading space as the vocabulary spells it.
SPACE = "\u0120"


def train_bpe(seed: int, documents: int = 20_000, vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Learn the merges from the first `documents` documents. Special tokens get the ids 0 to 4, in the order declared.

    Merges are learnt without the spaces before words; then each token that follows a space gets a twin with the space.
    A word is therefore split alike with and without it, as in `in Paris` and `"Paris"`: `train.py` gives twins one
    embedding, and copying a word from a question into JSON means copying its tokens.
    """
    texts = list(_training_text(seed, documents))
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizer(r" |" + SPLIT.replace(" ?", ""))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.model = _with_twins(bpe, texts, vocab_size)
    bpe.pre_tokenizer = pre_tokenizer(SAVED_SPLIT)
    bpe.decoder = decoders.ByteLevel()
    begin = bpe.token_to_id(BEGIN)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, begin)]
    )
    return bpe


def pre_tokenizer(split: str) -> pre_tokenizers.PreTokenizer:
    """Splits text by this pattern, then spells it as bytes."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _with_twins(bpe: Tokenizer, texts: list[str], vocab_size: int) -> models.BPE:
    """The first merges of `bpe`, leaving room for twins: tokens that follow a space get one with a leading space.

    The twins' merges come last, so that a word is complete before its space joins it.
    """
    learnt = json.loads(bpe.to_str())["model"]
    following: Counter[str] = Counter()
    for encoding in bpe.encode_batch(texts):
        following.update(after for before, after in pairwise(encoding.tokens) if before == SPACE)
    by_id = sorted(learnt["vocab"], key=learnt["vocab"].__getitem__)
    alphabet = len(by_id) - len(learnt["merges"])
    tokens, merges, twins = by_id[:alphabet], [], [each for each in by_id[:alphabet] if _joins(each, following)]
    for token, merge in zip(by_id[alphabet:], learnt["merges"], strict=True):
        more = 1 + _joins(token, following)
        if len(tokens) + len(twins) + more > vocab_size:
            break
        tokens.append(token)
        merges.append(tuple(merge))
        twins += [token] * (more - 1)
    vocab = {token: index for index, token in enumerate([*tokens, *(SPACE + each for each in twins)])}
    return models.BPE(vocab=vocab, merges=[*merges, *((SPACE, each) for each in twins)])


def _joins(token: str, following: Mapping[str, int]) -> bool:
    """Whether a token follows spaces often enough for a twin. Digits and white space never have one."""
    return following[token] > 1 and not token.isdigit() and not token.startswith((SPACE, "\u010a", "\u010d"))


def wrap(bpe: Tokenizer, max_tokens: int) -> PreTrainedTokenizerFast:
    """The Hugging Face tokenizer around `bpe`, with special tokens and chat template."""
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BEGIN,
        eos_token=TURN_END,
        pad_token=PAD,
        additional_special_tokens=[END, TURN_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_tokens,
        clean_up_tokenization_spaces=False,
    )


def save(bpe: Tokenizer, max_tokens: int, out: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` into `out`.

    Transformers 5 names its class `TokenizersBackend`, which transformers 4 does not have; both have the older name.
    """
    wrap(bpe, max_tokens).save_pretrained(out)
    config_file = out / "tokenizer_config.json"
    config = json.loads(config_file.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config_file.write_text(json.dumps(config, indent=2) + "\n")
