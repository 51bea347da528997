"""`homing analyze LOG`: opens the log, runs the analysis, and reports the result; or writes the log as a trace."""

import gzip
import json
import random
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Annotated, TextIO, cast

from cyclopts import Parameter, Token

from ....kvcache.hashing import BlockHash, wire_hashes
from ....router.errors import TokenizerUnavailable
from ....router.text.tokenizer import TextModel
from ...config import Settings, nearest
from ...errors import LogUnreadable, ModelUnavailable, SettingsError
from ...flags import NOTHING, Out, TextSettings, option, settings_of
from ...model_source import find_model
from ...output import ShowProgress, progress
from ..plots import check_plot_path, write_plot
from ..recorded_trace import MOONCAKE_BLOCK_TOKENS
from .capacity import KvCapacity, block_bytes_of_config, parse_size
from .log_analysis import LogAnalysis
from .order import SampledPrompt, advise
from .prompts import AnalyzedPrompt, PromptSource, TextPrompts, TracePrompts
from .records import FORMATS, Format, LogReader, TextRequest, detect_format
from .report import Findings, as_json, page, text

#: Number of requests sampled for advice on prompt order.
SAMPLE = 1000
GZIP_MAGIC = b"\x1f\x8b"
DEFAULT_REPLICAS = (1, 2, 4, 8)
MAX_REPLICAS = 256
#: Bits kept of each block name, so that a reader can put the number of a round above them.
_NAME_BITS = 60
#: Interval between arrivals if the log has no times.
_PAUSE_S = 1.0


def _size(_: type, tokens: Sequence[Token]) -> int:
    return _sized(tokens[-1].value, tokens[-1])


def _sizes(_: type, tokens: Sequence[Token]) -> tuple[int, ...]:
    return tuple(sorted({_sized(word, tokens[-1]) for word in tokens[-1].value.split(",")}))


def _sized(text: str, token: Token) -> int:
    size = parse_size(text, token.keyword or "")
    if size < 1:
        raise SettingsError(f"{token.keyword}: {text!r} must be at least 1")
    return size


def _replica_counts(kind: type, tokens: Sequence[Token]) -> tuple[int, ...]:
    counts = _sizes(kind, tokens)
    if counts[-1] > MAX_REPLICAS:
        raise SettingsError(f"--replicas: at most {MAX_REPLICAS}, not {counts[-1]}")
    return counts


def _format(_: type, tokens: Sequence[Token]) -> Format:
    text = tokens[-1].value
    if text not in FORMATS:
        raise SettingsError(f"--format: {text!r} is not one of {', '.join(FORMATS)}{nearest(text, FORMATS)}")
    return text


@dataclass(slots=True, frozen=True)
class Options:
    """The arguments and flags of `homing analyze`."""

    #: A path, or - for standard input.
    log: Annotated[str, Parameter(parse=False)] = "-"
    # Separate from the setting of this name, because traces have larger blocks than a cluster may have.
    block_size: Annotated[
        int | None,
        option("tokens per block (default: 512 for traces, else the setting)", metavar="N", converter=_size),
    ] = None
    log_format: Annotated[
        Format | None,
        option("format of the log (default: detected from its first line)", "--format", converter=_format),
    ] = None
    #: Empty: chosen by the number of distinct blocks in the log.
    sizes: Annotated[
        Sequence[int],
        option(
            "cache sizes in blocks, such as 1k,4k,16k (default: powers of two)", metavar="N,N,...", converter=_sizes
        ),
    ] = ()
    block_bytes: Annotated[
        int | None,
        option(
            "KV bytes of a block over all ranks (default: those of --model)",
            "--bytes-per-block",
            metavar="SIZE",
            converter=_size,
        ),
    ] = None
    gpu_bytes: Annotated[
        int | None,
        option(
            "KV memory of a GPU, such as 45GB: prints how many GPUs are needed",
            "--kv-memory",
            metavar="SIZE",
            converter=_size,
        ),
    ] = None
    prefill_rate: Annotated[
        float | None,
        option(
            "prompt tokens that a replica computes per second: prints the seconds saved",
            metavar="TOKENS",
            converter=_size,
        ),
    ] = None
    replicas: Annotated[Sequence[int], option("numbers of replicas", metavar="N,N,...", converter=_replica_counts)] = (
        DEFAULT_REPLICAS
    )
    skip_malformed: Annotated[bool, option("skip and count malformed lines")] = False
    hide_snippets: Annotated[bool, option("print no text of the log in the advice", "--no-snippets")] = False
    as_json: Annotated[bool, option("print JSON, for programs", "--json")] = False
    plots: Annotated[Sequence[Path], option("draw .png, .svg or .html; may be repeated", "--plot", metavar="FILE")] = ()
    #: Whether a model was named, so that sizes can also be given in bytes of its KV.
    sized_model: Annotated[bool, Parameter(parse=False)] = False


class Sample:
    """A uniform random sample of the prompts (reservoir sampling, Vitter 1985)."""

    def __init__(self, size: int, rng: random.Random) -> None:
        self._size = size
        self._rng = rng
        self._seen = 0
        self.prompts: list[SampledPrompt] = []

    def offer(self, prompt: AnalyzedPrompt, shared_tokens: int) -> None:
        """Consider one more prompt for the sample; prompts without text are ignored."""
        if not prompt.parts:
            return
        self._seen += 1
        sampled = SampledPrompt(prompt.parts, prompt.tokens, shared_tokens)
        if len(self.prompts) < self._size:
            self.prompts.append(sampled)
        elif (place := self._rng.randrange(self._seen)) < self._size:
            self.prompts[place] = sampled


def paced(
    prompts: Iterable[AnalyzedPrompt], err: TextIO, clock: Callable[[], float], show: ShowProgress = lambda *_: None
) -> Iterator[AnalyzedPrompt]:
    """Pass on the prompts; shows progress on a terminal and, at the end, prints the rate."""
    began, number = clock(), 0
    for number, prompt in enumerate(prompts, 1):
        yield prompt
        show("requests read", 0, number)
    seconds = max(1e-9, clock() - began)
    print(f"{number:,} requests in {seconds:.1f} s ({60 * number / seconds:,.0f} a minute)", file=err)


def analyze_command(
    log: Annotated[
        str, option("OpenAI requests or a trace, as JSON lines; -: standard input", allow_leading_hyphen=True)
    ],
    /,
    *,
    options: Annotated[Options, Parameter(name="*")] = Options(),
    given: TextSettings = NOTHING,
    out: Out,
) -> int:
    """`homing analyze`."""
    return analyze(replace(options, log=log, sized_model="model" in given), settings_of(given), out)


def analyze(
    options: Options,
    settings: Settings,
    out: TextIO,
    *,
    err: TextIO | None = None,
    stdin: BufferedReader | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Run the command; returns the exit code. Raises ClusterError."""
    for path in options.plots:
        check_plot_path(path)
    reader = LogReader(options.log_format, skip_malformed=options.skip_malformed)
    err = err or sys.stderr
    with opened(options.log, stdin) as lines, progress(err) as show:
        found = _analyzed(options, settings, reader, iter(lines), partial(paced, err=err, clock=clock, show=show))
    for path in options.plots:
        write_plot(path, page(found))
    print(json.dumps(as_json(found), indent=2) if options.as_json else text(found), file=out)
    return 0


def _analyzed(
    options: Options,
    settings: Settings,
    reader: LogReader,
    lines: Iterator[bytes],
    pace: Callable[..., Iterator[AnalyzedPrompt]],
) -> Findings:
    records = reader.read(lines)
    first = next(records, None)
    if first is None:
        skipped = f"; {reader.skipped_lines} malformed lines were skipped" if reader.skipped_lines else ""
        raise LogUnreadable(f"{options.log} contains no requests{skipped}")
    has_text = isinstance(first, TextRequest)
    block_size = options.block_size or (settings.kvcache.block_size if has_text else MOONCAKE_BLOCK_TOKENS)
    room = _capacity(options, settings, block_size)
    analysis, sample = LogAnalysis(block_size, options.replicas), Sample(SAMPLE, random.Random(0))
    with closing(prompt_source(options, settings, block_size, has_text=has_text)) as source:
        for prompt in pace(source.prompts(chain([first], records))):
            sample.offer(prompt, analysis.observe(prompt))
    report = analysis.report()
    tokenizer = "the model's" if options.sized_model else "the demo model's; set yours with --model or --tokenizer"
    return Findings(
        source="standard input" if options.log == "-" else Path(options.log).name,
        log_format=reader.format or "",
        tokenizer=settings.replica.tokenizer or tokenizer if has_text else None,
        log=report,
        sizes=options.sizes or report.sizes(),
        advice=advise(sample.prompts) if has_text else None,
        sampled=len(sample.prompts),
        skipped=reader.skipped_lines + source.refused,
        capacity=room,
        prefill_rate=options.prefill_rate,
        show_snippets=not options.hide_snippets,
    )


def prompt_source(options: Options, settings: Settings, block_size: int, *, has_text: bool) -> PromptSource:
    """The converter of the log's records to prompts. Raises ModelUnavailable."""
    if not has_text:
        return TracePrompts(block_size)
    given = settings.replica.tokenizer
    folder = Path(given).expanduser() if given else _model_path(settings)
    try:
        model = TextModel.load(
            folder.parent if folder.is_file() else folder, cache_bytes=settings.router.token_cache_bytes
        )
    except TokenizerUnavailable as error:
        raise ModelUnavailable(f"{error.message}; give a folder that has one with --tokenizer") from error
    return TextPrompts(model, block_size, skip_malformed=options.skip_malformed)


def _capacity(options: Options, settings: Settings, block_size: int) -> KvCapacity | None:
    """The memory per block, or None if neither a block's size nor a model was given. Raises SettingsError."""
    if options.block_bytes is not None:
        return KvCapacity(options.block_bytes, options.gpu_bytes)
    if options.sized_model:
        return KvCapacity(block_bytes_of_config(_model_path(settings), block_size), options.gpu_bytes)
    if options.gpu_bytes is not None:
        raise SettingsError("--kv-memory needs the size of a block: also give --model or --bytes-per-block")
    return None


def _model_path(settings: Settings) -> Path:
    """The model's folder, or the configuration file if that was named instead."""
    named = Path(settings.replica.model).expanduser()
    return named if named.is_file() else find_model(settings.replica)


@contextmanager
def opened(log: str, stdin: BufferedReader | None) -> Iterator[Iterable[bytes]]:
    """Open the log and yield its lines, decompressing gzip. Raises LogUnreadable."""
    try:
        with _raw(log, stdin) as raw:
            yield gzip.GzipFile(fileobj=raw) if raw.peek(2).startswith(GZIP_MAGIC) else raw
    except (OSError, EOFError, zlib.error) as error:
        raise LogUnreadable(f"{log} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _raw(log: str, stdin: BufferedReader | None) -> BufferedReader:
    if log != "-":
        return Path(log).open("rb")
    return stdin or open(sys.stdin.fileno(), "rb", closefd=False)


def format_of(log: str) -> Format | None:
    """The log's format, detected from its first line; None if the log is empty. Raises LogUnreadable."""
    with opened(log, None) as lines:
        return next((detect_format(line) for line in lines if line.strip()), None)


def write_trace(options: Options, settings: Settings, out: TextIO, *, output_tokens: int) -> None:
    """Write the log's requests as lines of a Mooncake trace. Raises ClusterError.

    Logs of requests do not contain the lengths of answers: all get `output_tokens`. Time begins with the first request;
    a request with a time before its predecessor's gets the predecessor's time.
    """
    block_size = options.block_size or settings.kvcache.block_size
    reader = LogReader(options.log_format, skip_malformed=options.skip_malformed)
    first_s: float | None = None
    now_s = 0.0
    with (
        opened(options.log, None) as log,
        closing(prompt_source(options, settings, block_size, has_text=True)) as source,
    ):
        for number, prompt in enumerate(source.prompts(reader.read(log))):
            at_s = number * _PAUSE_S if prompt.arrival_s is None else prompt.arrival_s
            first_s = at_s if first_s is None else first_s
            now_s = max(now_s, at_s - first_s)
            hashes = cast("Sequence[BlockHash]", prompt.blocks)  # prompts of text name their blocks by hash
            line = {
                "timestamp": now_s * 1000,
                "input_length": prompt.tokens,
                "output_length": output_tokens,
                "hash_ids": [name >> (64 - _NAME_BITS) for name in wire_hashes(b"".join(hashes))],
            }
            out.write(json.dumps(line) + "\n")
