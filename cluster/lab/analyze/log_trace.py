"""A log of requests as a trace of blocks: texts are tokenized once, and what is left can be read again and again.

Holds no more than a line. Knows nothing of who reads the trace.
"""

import json
from collections.abc import Sequence
from contextlib import closing
from typing import TextIO, cast

from ....kvcache.hashing import BlockHash, wire_hashes
from ...config import Settings
from .command import opened, prompt_source
from .options import Options
from .records import Format, LogReader, detect_format

#: Names of blocks keep so many bits, so that a reader can put the number of a round above them.
_NAME_BITS = 60
#: Apart, where the log names no time.
_PAUSE_S = 1.0


def format_of(log: str) -> Format | None:
    """The format that the log's first line shows; None of an empty log. Raises LogUnreadable."""
    with opened(log, None) as lines:
        return next((detect_format(line) for line in lines if line.strip()), None)


def write_trace(options: Options, settings: Settings, out: TextIO, *, output_tokens: int) -> None:
    """Write the log's requests as lines of a Mooncake trace. Raises ClusterError.

    Logs of requests do not tell how long the answers were: all get `output_tokens`. Time begins with the first request;
    one that was logged late counts as arriving with the one before it.
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
            logged = prompt.logged
            at_s = number * _PAUSE_S if logged.arrival_s is None else logged.arrival_s
            first_s = at_s if first_s is None else first_s
            now_s = max(now_s, at_s - first_s)
            hashes = cast("Sequence[BlockHash]", logged.blocks)  # prompts of text name their blocks by hash
            line = {
                "timestamp": now_s * 1000,
                "input_length": logged.tokens,
                "output_length": output_tokens,
                "hash_ids": [name >> (64 - _NAME_BITS) for name in wire_hashes(b"".join(hashes))],
            }
            out.write(json.dumps(line) + "\n")
