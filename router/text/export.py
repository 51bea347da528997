"""Reads a model's tokenizer as transformers builds it, in a separate process.

transformers may build a tokenizer that differs from `tokenizer.json`, as some classes are rebuilt from their
vocabulary, so only transformers itself gives the right one. But it costs memory and a second of CPU time (with torch,
270 MB and five seconds) that a router should not spend. So a child process loads it and prints the result.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from ..errors import TokenizerUnavailable

#: Importing torch and reading a large vocabulary takes seconds, and far longer on a busy machine.
TIMEOUT_S = 300.0
#: Vocabulary files. A folder that transformers can read has at least one of them.
VOCABULARIES = (
    "tokenizer.json tokenizer.model vocab.json vocab.txt spiece.model sentencepiece.bpe.model tekken.json *.tiktoken"
).split()


class TokenizerParts(msgspec.Struct, frozen=True):
    """The parts of a transformers tokenizer that the text side needs."""

    tokenizer: str  #: the `tokenizers` object as JSON
    special_tokens: dict[str, str]  #: by role, such as `bos_token`; passed to chat templates
    chat_template: str | dict[str, str] | None


class ModelLayout(msgspec.Struct, frozen=True):
    """The model part of a tokenizer, without merges: these are most of the JSON and would take 0.2 s to decode."""

    type: str
    vocab: dict[str, int] | list[Any] = []  #: a list of pairs for unigram models
    byte_fallback: bool | None = None


class TokenizerLayout(msgspec.Struct, frozen=True):
    """The parts of a `tokenizers` object, under the names of its JSON."""

    model: ModelLayout
    added_tokens: list[dict[str, Any]] = []
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None


def layout_of(tokenizer: str) -> TokenizerLayout:
    """Decode the layout of a `tokenizers` object from its JSON."""
    return msgspec.json.decode(tokenizer, type=TokenizerLayout)


def check_vocabulary(folder: Path) -> None:
    """Raise TokenizerUnavailable if there is no vocabulary: transformers would build a tokenizer without words."""
    if not folder.is_dir():
        raise TokenizerUnavailable(f"cannot read a tokenizer from {folder}: no such folder")
    if not any(path.stat().st_size for pattern in VOCABULARIES for path in folder.glob(pattern)):
        raise TokenizerUnavailable(
            f"cannot read a tokenizer from {folder}: it has no tokenizer.json; save the model's tokenizer there as well"
        )
    path = folder / "tokenizer.json"
    try:
        msgspec.json.decode(path.read_bytes() if path.is_file() else b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TokenizerUnavailable(f"{path} is damaged: {error}; download the model again") from error


def load_parts(folder: Path) -> TokenizerParts:
    """Load the tokenizer of a local folder. Blocks for seconds. Raises TokenizerUnavailable."""
    check_vocabulary(folder)
    command = [sys.executable, "-P", "-m", "homing.router.text.export", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TokenizerUnavailable(f"cannot read a tokenizer from {folder}: {error}") from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise TokenizerUnavailable(f"cannot read a tokenizer from {folder}: {lines[-1] if lines else done.returncode}")
    return msgspec.json.decode(done.stdout, type=TokenizerParts)


def main() -> int:
    """In the child process: print the parts of a folder's tokenizer as JSON, or on failure one line to stderr."""
    # Hide torch from transformers: tokenizers do not need it, and importing it takes four of five seconds.
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        # Not at the top: the router imports this module.
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True)
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError("there is no tokenizer.json: slow tokenizers are not supported")
        special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
        parts = TokenizerParts(
            tokenizer=tokenizer.backend_tokenizer.to_str(),
            special_tokens=special,
            chat_template=tokenizer.chat_template,
        )
    except Exception as error:  # the parent process reports any error with this one line
        message = " ".join(str(error).split())
        print(message or type(error).__name__, file=sys.stderr)
        return 1
    sys.stdout.buffer.write(msgspec.json.encode(parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
