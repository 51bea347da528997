"""Measure the router's cost of text: both encoders on ordinary and hostile texts, and chats from template to token ids.

    python tests/bench/tokenizing.py [--megabytes N]

Figures are CPU time of the encoding thread in ms: the median for ordinary texts, one run for hostile ones. The
tokenizer is the demo model's; ordinary texts are words of its vocabulary. The last table is of a byte-level BPE with
Llama 3's pattern, trained on Python's standard library and encoding its sources.
"""

import argparse
import string
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench.front import english

if TYPE_CHECKING:
    from homing.router.text.encoder import FastEncoder

VOCABULARY = 32_768
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
MODEL = Path(__file__).parents[2] / "replica" / "demo" / "model"


def ms(work: Callable[..., object], *arguments: object, **options: object) -> float:
    """Milliseconds of this thread's CPU time."""
    start = time.thread_time()
    work(*arguments, **options)
    return (time.thread_time() - start) * 1e3


def hostile(size: int) -> dict[str, str]:
    """Texts that are expensive for some tokenizers."""
    rng, letters = Random(1), string.ascii_lowercase
    return {
        "digits": "7" * size,
        "blanks": " " * size,
        "one word": "".join(rng.choices(letters, k=size)),
        "printable": "".join(rng.choices(string.printable, k=size)),
        "random words": " ".join("".join(rng.choices(letters, k=8)) for _ in range(size // 9)),
        "special tokens": "<|im_end|>" * (size // 10),
        "any character": "".join(chr(rng.randrange(0x20, 0xD800)) for _ in range(size // 3)),
    }


def library_sources() -> list[str]:
    """The source of some modules of the standard library."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [path.read_text(encoding="utf-8", errors="ignore") for path in paths]


def llama_like() -> "FastEncoder":
    """A tokenizer like Llama 3's, without its special tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    from homing.router.text.encoder import ExactEncoder, FastEncoder

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(LLAMA_3), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(library_sources(), trainer)
    return FastEncoder(tokenizer.to_str(), ExactEncoder(tokenizer))


def main() -> None:
    """Print three tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=1.0, help="size of a hostile text")
    options = parser.parse_args()
    from tokenizers import Tokenizer

    from homing.router.text.encoder import ExactEncoder, FastEncoder
    from homing.router.text.template import TemplateInput
    from homing.router.text.tokenizer import TextModel

    exact = ExactEncoder(Tokenizer.from_file(str(MODEL / "tokenizer.json")))
    start = time.thread_time()
    fast = FastEncoder((MODEL / "tokenizer.json").read_text(), exact)
    fast.encode(["x"], special_tokens=False)
    print(f"fastokens: load and first call {(time.thread_time() - start) * 1e3:.0f} ms")
    model = TextModel.load(MODEL, cache_bytes=0)
    print(f"{'unique text':16} {'fastokens':>10} {'tokenizers':>10} {'chat':>8}  ms")
    for size in (1_500, 16_384, 190_000):
        texts = english(size, 21)
        figures = [median(ms(each.encode, [text], special_tokens=False) for text in texts) for each in (fast, exact)]
        chats = [TemplateInput([{"role": "user", "content": text}]) for text in english(size, 42)[21:]]
        whole = median(ms(model.encode_chat_now, chat) for chat in chats)
        print(f"{size:16} {figures[0]:10.3f} {figures[1]:10.3f} {whole:8.3f}")
    print(f"{'hostile text':16} {'fastokens':>10} {'tokenizers':>10}  ms for {options.megabytes:g} MB")
    for name, text in hostile(int(options.megabytes * 1e6)).items():
        first, second = (ms(each.encode, [text], special_tokens=False) for each in (fast, exact))
        print(f"{name:16} {first:10.1f} {second:10.1f}")
    model.close()
    real = llama_like()
    print(f"{'library source':16} {'fastokens':>10} {'tokens':>10}  ms, Llama 3's pattern, {VOCABULARY} tokens")
    source = " ".join(library_sources())
    for size in (1_500, 16_384, 130_000):
        texts = [source[start : start + size] for start in range(0, 21 * 7919, 7919)]
        tokens = median(len(real.encode([text], special_tokens=False)[0]) for text in texts)
        print(f"{size:16} {median(ms(real.encode, [text], special_tokens=False) for text in texts):10.3f} {tokens:10}")


if __name__ == "__main__":
    main()
