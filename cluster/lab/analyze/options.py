"""What `homing analyze` is asked for: the words of the command line as values. Opens nothing."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ...config import nearest
from ...errors import SettingsError
from .capacity import parse_size
from .records import FORMATS, Format

DEFAULT_REPLICAS = (1, 2, 4, 8)
MAX_REPLICAS = 256

Value = TypeVar("Value")


@dataclass(slots=True, frozen=True)
class Options:
    log: str  #: a path, or - for standard input
    log_format: Format | None = None
    block_size: int | None = None  #: None: 512 for traces, the setting for requests
    sizes: Sequence[int] = ()  #: empty: chosen by what the log holds
    replicas: Sequence[int] = DEFAULT_REPLICAS
    tokenizer: Path | None = None  #: None: the model's
    sized_model: bool = False  #: whether a model was named, so that its KV is worth a figure
    block_bytes: int | None = None
    gpu_bytes: int | None = None
    prefill_rate: float | None = None
    skip_malformed: bool = False
    as_json: bool = False
    plots: Sequence[Path] = ()
    show_snippets: bool = True


def options_of(arguments: Namespace) -> Options:
    """Options of a parsed command. Raises SettingsError, which names the flag."""
    return Options(
        log=arguments.log,
        log_format=_given(arguments.format, _format),
        block_size=_given(arguments.block_tokens, lambda text: _size(text, "--block-size")),
        sizes=_given(arguments.sizes, lambda text: _sizes(text, "--sizes")) or (),
        replicas=_given(arguments.replica_counts, _replicas) or DEFAULT_REPLICAS,
        tokenizer=_given(arguments.tokenizer, lambda text: Path(text).expanduser()),
        sized_model=arguments.model is not None,
        block_bytes=_given(arguments.bytes_per_block, lambda text: _size(text, "--bytes-per-block")),
        gpu_bytes=_given(arguments.kv_memory, lambda text: _size(text, "--kv-memory")),
        prefill_rate=_given(arguments.prefill_rate, lambda text: float(_size(text, "--prefill-rate"))),
        skip_malformed=arguments.skip_malformed,
        as_json=arguments.json,
        plots=tuple(Path(text).expanduser() for text in arguments.plot),
        show_snippets=not arguments.no_snippets,
    )


def _given(text: str | None, convert: Callable[[str], Value]) -> Value | None:
    return None if text is None else convert(text)


def _format(text: str) -> Format:
    if text not in FORMATS:
        raise SettingsError(f"--format: {text!r} is none of {', '.join(FORMATS)}{nearest(text, FORMATS)}")
    return text


def _size(text: str, flag: str) -> int:
    size = parse_size(text, flag)
    if size < 1:
        raise SettingsError(f"{flag}: {text!r} must be at least 1")
    return size


def _sizes(text: str, flag: str) -> tuple[int, ...]:
    return tuple(sorted({_size(word, flag) for word in text.split(",")}))


def _replicas(text: str) -> tuple[int, ...]:
    counts = _sizes(text, "--replicas")
    if counts[-1] > MAX_REPLICAS:
        raise SettingsError(f"--replicas: at most {MAX_REPLICAS}, not {counts[-1]}")
    return counts
