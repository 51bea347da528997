"""The folder of the disk tier: which file a rank uses, what may be removed for it, and the seed of the hashes.

Each replica has one file per rank, named after what the KV depends on, and a number: the lowest that no other replica
has locked. Replicas therefore share a folder, and a replica that is started again finds one of the files it left. Files
of other models, dtypes, block sizes or versions stay until their space is needed.
"""

import errno
import fcntl
import logging
import os
import re
import secrets
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import DiskTierUnusable
from .disk_file import DiskFailure, DiskFile, Transfers, check_own, open_file
from .file_format import LEAST_SLOTS, PAGE_BYTES, Identity, Layout, is_ours

log = logging.getLogger(__name__)

SEED_FILE = "homing-seed"
#: More replicas on one folder than this would be a mistake.
MAX_FILES = 256
#: A disk that takes longer to open a file hangs. Preallocating takes long on file systems without support for it.
OPEN_TIMEOUT_S = 60.0
#: A disk that says so is broken, whatever the settings.
_BROKEN = {errno.EIO, errno.ETIMEDOUT, errno.ESTALE, errno.ENXIO, errno.ENODEV, errno.EUCLEAN, errno.EREMOTEIO}
_NAME = re.compile(r"homing-(?P<identity>[0-9a-f]{32})-(?P<number>\d+)-rank(?P<rank>\d+)\.kv")


def check_settings(disk_kv: str, disk_kv_size: int, *, prefix_caching: bool = True, ranks: int = 1) -> None:
    """Check what needs no model; changes nothing. Raises DiskTierUnusable."""
    if not disk_kv:
        if disk_kv_size:
            raise DiskTierUnusable("disk_kv_size is set, but not disk_kv: name a folder, or set it to 0")
        return
    if not disk_kv_size:
        raise DiskTierUnusable(f"disk_kv_size 0: set the bytes that each replica may use in {disk_kv}")
    if not prefix_caching:
        raise DiskTierUnusable("disk_kv needs prefix_caching: without it, no block is used again")
    if ranks > 1:
        raise DiskTierUnusable(f"disk_kv: replicas of {ranks} ranks cannot keep blocks on disk yet; leave it out")
    folder = _checked_folder(disk_kv)
    with _naming(disk_kv):
        _check_files(folder)
        disk = os.statvfs(folder if folder.exists() else folder.parent)
    if disk_kv_size > disk.f_blocks * disk.f_frsize:
        raise DiskTierUnusable(
            f"disk_kv_size {disk_kv_size:,}: the disk of {folder} has only "
            f"{disk.f_blocks * disk.f_frsize:,} bytes; lower it"
        )


def usable_folder(name: str) -> Path:
    """The folder `disk_kv`, created if it is missing. Raises DiskTierUnusable if files cannot be made in it."""
    path = _checked_folder(name)
    with _naming(name):
        path.mkdir(mode=0o700, exist_ok=True)
    return path


def _checked_folder(name: str) -> Path:
    """The path of `disk_kv`, in which files can be made, or which can be created."""
    path = Path(name).expanduser()
    if not path.is_absolute():
        raise DiskTierUnusable(f"disk_kv {name}: it must be an absolute path, the same on every node")
    if "\0" in name:
        raise DiskTierUnusable("disk_kv: a path cannot have a null character")
    with _naming(name):
        if os.path.lexists(path) and not path.is_dir():
            raise DiskTierUnusable(f"disk_kv {name}: it is not a folder; name a folder")
        if not path.exists() and not path.parent.is_dir():
            raise DiskTierUnusable(f"disk_kv {name}: {path.parent} is not a folder; create it first")
        probe = (path if path.exists() else path.parent) / f".homing-probe-{secrets.token_hex(8)}"
        os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        probe.unlink()
    return path


def _check_files(folder: Path) -> None:
    """Check that the seed and the KV files in a folder, if there is one, are files of this user alone."""
    if not folder.exists():
        return
    _held_seed(folder / SEED_FILE)
    for _, status, path in _kv_files(folder):
        if stat.S_ISLNK(status.st_mode):
            raise DiskTierUnusable(f"disk_kv: {path} is a link; remove it, or use another folder")
        try:
            check_own(path, status)
        except OSError as error:
            raise DiskTierUnusable(f"disk_kv: {path}: {error.strerror}; remove it, or use another folder") from error


@contextmanager
def _naming(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DiskTierUnusable(f"disk_kv {name}: cannot write there: {error.strerror}") from error


def cluster_seed(*folders: str) -> int:
    """The seed of the block hashes, 64 random bits, drawn at the first start and kept in each folder `disk_kv`.

    The first folder with a seed decides. Whoever knows it can search for prompts whose hashes collide, so it is for its
    owner's eyes only. Raises DiskTierUnusable.
    """
    paths = [usable_folder(each) / SEED_FILE for each in folders]
    held = {path: _held_seed(path) for path in paths}
    seed = next((each for each in held.values() if each is not None), secrets.randbits(64))
    for path, former in held.items():
        if former is None:
            seed = _kept_seed(path, seed)
        elif former != seed:
            log.warning("disk_kv_unused folder=%s reason=its seed is not that of %s", path.parent, paths[0].parent)
    return seed


def _held_seed(path: Path) -> int | None:
    if not os.path.lexists(path):
        return None
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            check_own(path, status)
            if status.st_mode & 0o077:
                raise DiskTierUnusable(f"disk_kv: others may read {path}; run chmod 600 on it, or delete it")
            text = file.read(64)
    except OSError as error:
        raise DiskTierUnusable(f"disk_kv: cannot use {path}: {error.strerror}") from error
    if not re.fullmatch(r"[0-9a-f]{16}\n", text):
        raise DiskTierUnusable(f"disk_kv: {path} does not hold a seed; delete it (the blocks on disk are then lost)")
    return int(text, 16)


def _kept_seed(path: Path, seed: int) -> int:
    """Keep a seed in a folder without one. Returns another one if another cluster was faster."""
    draft = path.with_name(f".{SEED_FILE}-{secrets.token_hex(4)}")
    try:
        with open(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(f"{seed:016x}\n")
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(draft, path)
        draft.unlink()
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise DiskTierUnusable(f"disk_kv: cannot use {path}: {error.strerror}") from error
    kept = _held_seed(path)
    assert kept is not None, f"{path} was removed while it was written"
    return kept


def open_in_time(opening: Callable[[], DiskFile], timeout_s: float = OPEN_TIMEOUT_S) -> DiskFile:
    """Open a file in a thread, as a disk that hangs must not hang the replica.

    Raises DiskFailure if the disk is broken or takes longer, so that the replica can start without; what is opened too
    late is closed. Raises DiskTierUnusable if the settings are to blame.
    """
    opened: Future[DiskFile] = Future()

    def run() -> None:
        try:
            file = opening()
        except Exception as error:
            if opened.set_running_or_notify_cancel():
                opened.set_exception(error)
            return
        if opened.set_running_or_notify_cancel():
            opened.set_result(file)
        else:
            file.close()

    threading.Thread(target=run, name="disk-kv-open", daemon=True).start()
    try:
        return opened.result(timeout_s)
    except TimeoutError:
        if opened.cancel():
            raise DiskFailure("disk_slow", f"disk_kv: the disk did not open the file in {timeout_s:g} s") from None
        return opened.result()
    except DiskTierUnusable as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in _BROKEN:
            raise DiskFailure("disk_io", str(error)) from error
        raise


def open_rank_file(
    disk_kv: str,
    disk_kv_size: int,
    identity: Identity,
    *,
    rank: int = 0,
    number: int | None = None,
    transfers: Transfers | None = None,
) -> tuple[DiskFile, int]:
    """Open this rank's file, and return it with its number. Raises DiskTierUnusable.

    `number`: of the files of this replica, as rank 0 has found it; None: the lowest that no other replica uses.
    """
    folder = usable_folder(disk_kv)
    layout = Layout.within(disk_kv_size // identity.ranks, identity.block_size, identity.block_bytes)
    if layout.slots < LEAST_SLOTS:
        one = Layout(identity.block_size, identity.block_bytes, LEAST_SLOTS)
        raise DiskTierUnusable(
            f"disk_kv_size {disk_kv_size:,}: it holds only {layout.slots} blocks of {identity.block_bytes:,} "
            f"bytes; set at least {identity.ranks * (one.file_bytes + PAGE_BYTES):,}"
        )
    for each in range(MAX_FILES) if number is None else (number,):
        path = folder / f"homing-{identity.digest().hex()}-{each}-rank{rank}.kv"
        try:
            _make_room(path, layout)
            opened = open_file(path, identity, rank, layout.slots, transfers)
        except OSError as error:
            raise _unusable(path, error, disk_kv_size, layout) from error
        if opened is not None:
            return opened, each
    if number is not None:
        raise DiskTierUnusable(f"disk_kv: rank {rank}'s file {path} is in use by another process")
    raise DiskTierUnusable(f"disk_kv: all {MAX_FILES} files of this model in {folder} are in use; use another folder")


def _unusable(path: Path, error: OSError, disk_kv_size: int, layout: Layout) -> DiskTierUnusable:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DiskTierUnusable(
            f"disk_kv_size {disk_kv_size:,}: {path} needs {layout.file_bytes:,} bytes, "
            f"{_free_bytes(path.parent):,} are free in {path.parent}: {error.strerror}; lower it, or free space"
        )
    if error.errno == errno.ELOOP:
        return DiskTierUnusable(f"disk_kv: {path} is a link; remove it, or use another folder")
    return DiskTierUnusable(f"disk_kv: cannot use {path}: {error.strerror}; remove it, or use another folder")


def _make_room(path: Path, layout: Layout) -> None:
    """Remove unused KV files of other identities, oldest first, if a new or growing file would not fit without."""
    held = path.lstat().st_blocks * 512 if os.path.lexists(path) else 0
    missing = layout.file_bytes - held - _free_bytes(path.parent)
    if missing <= 0:
        return
    wanted = _NAME.fullmatch(path.name)
    assert wanted, f"{path} is not named as KV files are"
    others = [each for each in _kv_files(path.parent) if each[0]["identity"] != wanted["identity"]]
    sizes = [(status.st_mtime, status.st_blocks * 512, each) for _, status, each in others]
    if sum(size for _, size, _ in sizes) < missing:
        return
    for _, size, each in sorted(sizes):
        if missing > 0 and _remove_unused(each):
            log.warning("disk_kv_dropped file=%s reason=another model or settings, and its space is needed", each)
            missing -= size


def _kv_files(folder: Path) -> Iterator[tuple[re.Match[str], os.stat_result, Path]]:
    for path in folder.iterdir():
        if name := _NAME.fullmatch(path.name):
            with suppress(FileNotFoundError):
                yield name, path.lstat(), path


def _remove_unused(path: Path) -> bool:
    """Remove a KV file that nobody has locked. False, with no effect, if it is in use, or not ours."""
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        check_own(path, os.fstat(file))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_ours(os.pread(file, PAGE_BYTES, 0)):
            return False
        path.unlink()
        return True
    except OSError:
        return False
    finally:
        os.close(file)


def _free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
