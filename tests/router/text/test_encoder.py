"""The fast encoder gives the same ids as `tokenizers` for every text, or it is not used."""

from array import array
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from homing.router.text.encoder import (
    COPIED_BYTES,
    HARD_TEXTS,
    SLOW_CHARACTERS,
    ExactEncoder,
    FastEncoder,
    TokenIds,
    TooManyTokens,
    check_texts,
    choose_encoder,
    difference,
)
from homing.router.text.export import layout_of

from .conftest import DEMO

GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
CORPUS = [
    "The quick brown fox doesn't jump over 12345 lazy dogs; it's 3.14 o'clock.\n\n  def f(x):\n\treturn x + 1\n",
    "Größe, naïve café, 你好世界, привет, こんにちは, 🦊🦊 and more text   with blanks.\r\n",
] * 5
SPECIAL = [AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)]
ODD = [
    AddedToken("<mask>", special=True, lstrip=True),
    AddedToken("<r>", rstrip=True, normalized=False),
    AddedToken("word", single_word=True),
    AddedToken("<|im", normalized=True),
]


def byte_level(pattern: str = GPT4, normalizer: object = None, added: Sequence[AddedToken] = ()) -> Tokenizer:
    """A byte-level tokenizer like those of Llama 3, Qwen and GPT-4."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    if normalizer is not None:
        made.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    made.add_tokens(list(added))
    made.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", made.token_to_id("<|im_start|>"))]
    )
    return made


def gpt2() -> Tokenizer:
    made = byte_level()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.post_processor = processors.ByteLevel()
    return made


def sentencepiece(pre: object = None, *, bytes_too: bool = True) -> Tokenizer:
    """A tokenizer like that of Llama 2 (with a metaspace) or Gemma (with a normalizer)."""
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=bytes_too))
    made.normalizer = normalizers.Replace(" ", "▁") if pre is None else None
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous") if pre is None else pre
    tokens = ["<unk>", "<s>", *([f"<0x{byte:02X}>" for byte in range(256)] if bytes_too else [])]
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=700, special_tokens=tokens))
    made.add_special_tokens(SPECIAL)
    return made


def unigram() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.normalizer, made.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    made.train_from_iterator(CORPUS, trainers.UnigramTrainer(vocab_size=200, unk_token="<u>", special_tokens=["<u>"]))
    return made


def wordpiece() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"]))
    return made


def word_level() -> Tokenizer:
    made = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


#: Tokenizers, each with the encoder that is expected for it.
TOKENIZERS = {
    "demo": (lambda: Tokenizer.from_file(str(DEMO / "tokenizer.json")), "fastokens"),
    "byte level": (byte_level, "fastokens"),
    "byte level with NFC": (lambda: byte_level(normalizer=normalizers.NFC()), "fastokens"),
    "byte level with odd tokens": (lambda: byte_level(added=ODD), "fastokens"),
    "byte level in lower case": (lambda: byte_level(normalizer=normalizers.Lowercase(), added=ODD), "fastokens"),
    "an unusual pattern": (lambda: byte_level(pattern=r"\p{Lu}?\p{L}+|\d{1,2}|\s*\n|[^\w\s]+|\s+(?=\S)|\s"), None),
    "gpt2": (gpt2, "fastokens"),
    "gemma": (sentencepiece, "fastokens"),
    "unknown characters": (lambda: sentencepiece(bytes_too=False), None),
    "llama 2": (lambda: sentencepiece(pre_tokenizers.Metaspace(split=False)), "tokenizers"),
    "metaspace": (lambda: sentencepiece(pre_tokenizers.Metaspace(prepend_scheme="first")), "tokenizers"),
    "unigram": (unigram, "tokenizers"),
    "wordpiece": (wordpiece, "tokenizers"),
    "word level": (word_level, "tokenizers"),
}


@cache
def made(name: str) -> Tokenizer:
    return TOKENIZERS[name][0]()


SNIPPETS = [
    *(token.content for token in (*SPECIAL, *ODD)),
    *("<|im", "_end|>", " ", "  ", "\n", "\r\n", "\t", "'s", "'LL", "word", "words", "Größe", "12345", "é", "e\u0301"),
    *("▁", "Ġ", "你好", "🦊", "\u00a0", "\u200b", "İ", "ſ", "<0x0A>", "\0", "!!!", "a" * 40, " " * 40),
]
texts = st.lists(st.one_of(st.sampled_from(SNIPPETS), st.text(max_size=8)), max_size=12).map("".join)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_equal_those_of_tokenizers(name):
    """A wrong id changes the client's prompt and makes it miss the replicas' caches."""
    reference = made(name)
    encoder, _ = choose_encoder(reference.to_str(), layout_of(reference.to_str()), reference)

    @settings(max_examples=150, deadline=None)
    @given(texts=st.lists(texts, min_size=1, max_size=3), special_tokens=st.booleans())
    def check(texts, special_tokens):
        wanted = [reference.encode(text, add_special_tokens=special_tokens).ids for text in texts]

        assert [list(ids) for ids in encoder.encode(texts, special_tokens=special_tokens)] == wanted

    check()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_common_tokenizers_are_fast_and_the_others_are_told(name):
    """An unsupported tokenizer must be reported as slow, because its chats cost fifty times as much."""
    encoder, reason = choose_encoder(made(name).to_str(), layout_of(made(name).to_str()), made(name))

    assert encoder.name == (TOKENIZERS[name][1] or encoder.name)
    assert bool(reason) == (encoder.name == "tokenizers")


@pytest.mark.slow
def test_every_character_has_equal_ids():
    """The libraries may be built with different versions of Unicode."""
    backend = made("byte level with NFC")
    fast, exact = FastEncoder(backend.to_str(), ExactEncoder(backend)), ExactEncoder(backend)
    characters = [chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000]
    rows = [characters[start : start + 4096] for start in range(0, len(characters), 4096)]

    assert not difference(fast, exact, ["".join(row) for row in rows])
    assert not difference(fast, exact, [" ".join(f"a{each}1" for each in row) for row in rows])


class Wrong(ExactEncoder):
    """An encoder with one wrong token in one text."""

    def __init__(self, backend: object, text: str) -> None:
        super().__init__(backend)
        self.text = text

    def encode(self, texts: Sequence[str], *, special_tokens: bool, most: int | None = None) -> list[TokenIds]:
        found = super().encode(texts, special_tokens=special_tokens)
        wrong = array("I", [0])
        return [ids[:-1] + wrong if text == self.text else ids for text, ids in zip(texts, found, strict=True)]


@pytest.mark.parametrize("text", [each for each in HARD_TEXTS if each])
def test_one_wrong_token_is_noticed(text):
    """Only the comparison at load time protects prompts from a defect in the library."""
    backend = made("byte level")
    texts = check_texts(layout_of(backend.to_str()))

    assert text in texts
    assert difference(Wrong(backend, text), ExactEncoder(backend), texts)
    assert not difference(ExactEncoder(backend), ExactEncoder(backend), texts)


@pytest.mark.parametrize("kind", [ExactEncoder, lambda backend: FastEncoder(backend.to_str(), ExactEncoder(backend))])
def test_a_text_with_too_many_tokens_is_refused(kind):
    """The refusal comes before the ids become Python objects, because creating these holds the interpreter lock."""
    encoder = kind(made("byte level"))

    assert len(encoder.encode(["7" * 9], special_tokens=False, most=9)[0]) == 9
    with pytest.raises(TooManyTokens) as caught:
        encoder.encode(["x", "7" * 12], special_tokens=False, most=9)
    assert caught.value.tokens == 12
    with pytest.raises(TooManyTokens):
        encoder.encode(["7" * (COPIED_BYTES + 1)], special_tokens=True, most=COPIED_BYTES)
    long = " " * (COPIED_BYTES + 1)
    assert encoder.encode([long], special_tokens=True, most=2 * COPIED_BYTES) == encoder.encode(
        [long], special_tokens=True
    )


def test_the_fast_encoder_stays_fast_on_hostile_texts():
    """`tokenizers` takes 5 s for some of these, and longer than two minutes for others."""
    fast = FastEncoder(made("demo").to_str(), ExactEncoder(made("demo")))
    size = SLOW_CHARACTERS

    for text in ("7" * size, " " * size, "a" * size, "<|im_end|>" * (size // 10), "e\u0301" * (size // 2)):
        assert fast.encode([text], special_tokens=False)[0]
