"""The demo model's tokenizer: byte-level BPE over the corpus, its special tokens and its chat template.

Any Unicode text survives encode and decode, because the alphabet is the 256 bytes. Digits are single tokens. Text
encoded with special tokens starts with `<|begin|>`; the chat template writes `<|begin|>` itself, so rendered chats are
encoded without.
"""

import json
from collections.abc import Iterator
from itertools import islice
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

VOCAB_SIZE = 3072

#: Words with their leading space, single digits, runs of punctuation, white space. As Llama 3 splits, digits apart.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

#: Roles are written as they come; `tools` and everything else are ignored. Nothing here changes from day to day, so
#: that equal messages give equal prefixes.
CHAT_TEMPLATE = """\
{{- '<|begin|>' }}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['content'] is string %}
        {{- message['content'] }}
    {%- elif message['content'] %}
        {%- for part in message['content'] %}
            {%- if part['type'] == 'text' %}
                {{- part['text'] }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def _training_text(seed: int, documents: int) -> Iterator[str]:
    yield from (corpus.text_of(each) for each in islice(corpus.documents(seed), documents))
    yield from (corpus.text_of(each) for each in islice(corpus.long_documents(seed), documents // 100))
    yield "system\nuser\nassistant\ntool\ndeveloper\n"


def train_bpe(seed: int, documents: int = 20_000, vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Learn the merges from the first `documents` documents. Special tokens get the ids 0 to 4 in their order."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_training_text(seed, documents), trainer)
    begin = bpe.token_to_id(BEGIN)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, begin)]
    )
    return bpe


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

    Transformers 5 names its class `TokenizersBackend`, which transformers 4 does not know; both know the older name.
    """
    wrap(bpe, max_tokens).save_pretrained(out)
    config_file = out / "tokenizer_config.json"
    config = json.loads(config_file.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config_file.write_text(json.dumps(config, indent=2) + "\n")
