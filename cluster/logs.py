"""The log files of a cluster: one per part, in the state folder, bounded, and kept after the cluster ends.

Written by the processes of a local cluster, read by `homing logs`. Does not depend on Ray.
"""

import fcntl
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Literal, TextIO

import msgspec

log = logging.getLogger(__name__)

#: Maximum size of one file; each part also keeps its previous file.
FILE_BYTES = 1 << 20
#: Maximum number of files, besides those of running processes; the oldest are removed, as new replicas get new names.
FILES_KEPT = 64
FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(message)s"
TIME_FORMAT = "%Y-%m-%d %H:%M:%S"
_TIME = re.compile(r'(?:\{"time":")?(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3})')
#: The part whose lines are the requests answered by the routers.
REQUESTS = "requests"

LogFormat = Literal["text", "json"]


class JsonLines(logging.Formatter):
    """Formats records as one JSON object per line, for log collectors. A traceback becomes a field."""

    def format(self, record: logging.LogRecord) -> str:
        time = f"{self.formatTime(record, TIME_FORMAT)}.{record.msecs:03.0f}"
        more = {"traceback": self.formatException(record.exc_info)} if record.exc_info else {}
        return json_line(time, record.levelname, record.getMessage(), **more)


def json_line(time: str, level: str, message: str, **more: str) -> str:
    return msgspec.json.encode({"time": time, "level": level, "message": message, **more}).decode()


SUFFIX, OLD_SUFFIX = ".log", ".log.1"


class LogFile(RotatingFileHandler):
    """The log of one part. Only its user can read it, as messages may quote prompts or paths."""

    def __init__(self, path: Path, form: LogFormat = "text") -> None:
        super().__init__(path, maxBytes=FILE_BYTES, backupCount=1, encoding="utf-8")
        self.setFormatter(JsonLines() if form == "json" else logging.Formatter(FORMAT, TIME_FORMAT))

    def _open(self) -> Any:
        def private(path: str, flags: int) -> int:
            descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # shows other processes that the file is in use
            return descriptor

        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=private)


class RequestLog:
    """A stream that writes a router's access log to a log file.

    Omits GET requests, nearly all of which come from `homing status`, `homing watch` and monitoring. Lines arrive in
    batches, each of which is one write: a system call per request would cost as much as parsing the request.
    """

    def __init__(self, folder: str, seat: int, form: LogFormat) -> None:
        """Raises OSError."""
        self._file = LogFile(Path(folder) / f"{REQUESTS}-{seat}{SUFFIX}", form)
        self._form = form

    def write(self, lines: str) -> None:
        time = f"{datetime.now():%Y-%m-%d %H:%M:%S.%f}"[:-3]
        text = "".join(self._line(time, line) for line in lines.splitlines() if " method=GET " not in line)
        if self._stream.tell() + len(text) > FILE_BYTES:
            self._file.doRollover()
        self._stream.write(text)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    @property
    def _stream(self) -> TextIO:
        assert self._file.stream is not None, "the file is open from creation until `close`"
        return self._file.stream

    def _line(self, time: str, line: str) -> str:
        if self._form == "json":
            return json_line(time, "INFO", line) + "\n"
        return f"{time} INFO    {line}\n"


def log_to_file(folder: str | None, part: str, form: LogFormat = "text") -> None:
    """Also write this process's log messages to the file of `part`. Does nothing without a folder.

    If the folder is not writable, logs a warning and has no other effect.
    """
    if folder is None:
        return
    try:
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        if Path(folder).lstat().st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user")
        root, handler = logging.getLogger(), LogFile(Path(folder) / f"{part}{SUFFIX}", form)
        for old in [each for each in root.handlers if isinstance(each, LogFile)]:
            root.removeHandler(old)
            old.close()
        root.addHandler(handler)
        _remove_oldest(Path(folder))
    except OSError as error:
        log.warning("log_not_kept part=%s reason=%r", part, str(error))


def _remove_oldest(folder: Path) -> None:
    newest_first = sorted(_files(folder), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in newest_first[FILES_KEPT:]:
        with suppress(BlockingIOError, FileNotFoundError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _files(folder: Path) -> list[Path]:
    found = [path for path in folder.iterdir() if path.name.endswith((SUFFIX, OLD_SUFFIX))]
    return [path for path in found if path.is_file() and not path.is_symlink()]


def _sizes(folder: Path) -> dict[int, int]:
    """The size of each log file, by inode."""
    found = {}
    for path in _files(folder) if folder.is_dir() else ():
        with suppress(FileNotFoundError):  # removed by rotation
            about = path.stat()
            found[about.st_ino] = about.st_size
    return found


class LogLine(msgspec.Struct, frozen=True):
    time: str  #: empty only if the beginning of the file is missing
    part: str
    text: str  #: without a final newline; includes the lines of a traceback


def parts(folder: Path) -> list[str]:
    """Return the parts that have a log, such as controller, router-0 and r0."""
    if not folder.is_dir():
        return []
    return sorted({path.name.removesuffix(".1").removesuffix(SUFFIX) for path in _files(folder)})


def belongs(part: str, wanted: str) -> bool:
    """Return whether `wanted` selects this part: its name, its replica's, or `router` or `requests` for all routers."""
    of_all = wanted in ("router", REQUESTS) and part.startswith(f"{wanted}-")
    return part == wanted or part.startswith(f"{wanted}.") or of_all


def read_log(folder: Path, selected: Sequence[str]) -> list[LogLine]:
    """Return the lines of these parts, ordered by time."""
    found: list[LogLine] = []
    for part in selected:
        for suffix in (OLD_SUFFIX, SUFFIX):
            path = folder / f"{part}{suffix}"
            if path.is_file() and not path.is_symlink():
                found += split(part, path.read_text(errors="replace").splitlines())
    return sorted(found, key=lambda line: line.time)


def split(part: str, lines: Iterable[str]) -> Iterator[LogLine]:
    """Split into log lines. A line without a time belongs to the previous one."""
    time, texts = "", list[str]()
    for line in lines:
        if match := _TIME.match(line):
            if texts:
                yield LogLine(time, part, "\n".join(texts))
            time, texts = match[1], []
        texts.append(line)
    if texts:
        yield LogLine(time, part, "\n".join(texts))


class LogTail:
    """Reads lines appended to a folder's log files since this object's creation; follows rotation and new files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets = _sizes(folder)

    @property
    def known_files(self) -> int:
        """Number of files whose offsets are known."""
        return len(self._offsets)

    def read(self, wanted: str | None) -> list[LogLine]:
        """Return the new lines of the selected parts (None: all), ordered by time."""
        found: list[LogLine] = []
        if len(self._offsets) > 2 * FILES_KEPT:  # each rotation leaves the offset of a removed file
            inodes = _sizes(self._folder)
            self._offsets = {inode: offset for inode, offset in self._offsets.items() if inode in inodes}
        for part in parts(self._folder):
            if wanted is not None and not belongs(part, wanted):
                continue
            for suffix in (OLD_SUFFIX, SUFFIX):
                found += split(part, self._appended(self._folder / f"{part}{suffix}"))
        return sorted(found, key=lambda line: line.time)

    def _appended(self, path: Path) -> list[str]:
        try:
            with path.open("rb") as file:
                about = os.fstat(file.fileno())
                inode, begin = about.st_ino, self._offsets.get(about.st_ino, 0)
                if begin > about.st_size:  # the inode number of a file removed by rotation was reused
                    begin = 0
                file.seek(begin)
                whole, newline, _ = file.read().rpartition(b"\n")  # the last line may be incomplete
        except FileNotFoundError:
            return []
        self._offsets[inode] = begin + len(whole) + len(newline)
        return whole.decode(errors="replace").splitlines()
