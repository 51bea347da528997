"""Log files of a cluster's parts are private, bounded and printed in order of time."""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from homing.cluster.logs import (
    FILE_BYTES,
    FILES_KEPT,
    LogFile,
    LogFormat,
    LogTail,
    RequestLog,
    belongs,
    log_to_file,
    parts,
    read_log,
)

log = logging.getLogger("homing.test")


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """A process has one root logger; the test run's own is restored afterwards."""
    root = logging.getLogger()
    before = list(root.handlers)
    yield
    for handler in root.handlers:
        if isinstance(handler, LogFile):
            handler.close()
    root.handlers = before


def line(second: int, text: str) -> str:
    return f"2026-11-22 10:00:{second:02d}.000 INFO    {text}\n"


def test_what_a_process_logs_is_in_the_file_of_its_part(tmp_path: Path) -> None:
    """Only its user can read the file, because messages may quote prompts."""
    folder = tmp_path / "state" / "default.logs"

    log_to_file(str(folder), "router-0")
    log.warning("router_ready port=%d", 8000)

    assert parts(folder) == ["router-0"]
    assert read_log(folder, ["router-0"])[0].text.endswith("WARNING router_ready port=8000")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "router-0.log").stat().st_mode & 0o777 == 0o600


def test_logs_are_bounded(tmp_path: Path) -> None:
    """Neither a part that logs a thousand lines a second nor short-lived replicas may fill the disk."""
    for number in range(FILES_KEPT + 10):
        (tmp_path / f"r{number}.log").write_text("")
        os.utime(tmp_path / f"r{number}.log", (number, number))

    log_to_file(str(tmp_path), "controller")
    for _ in range(3 * FILE_BYTES // 1000):
        log.warning("x" * 1000)

    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) <= FILES_KEPT + 1
    assert FILE_BYTES < sum(sizes) <= 2 * FILE_BYTES
    assert "r0" not in parts(tmp_path)


def test_the_log_of_a_running_process_is_not_removed(tmp_path: Path) -> None:
    """A controller logs little: among a hundred replicas' files, its log is soon the oldest."""
    controller = LogFile(tmp_path / "controller.log")
    os.utime(tmp_path / "controller.log", (1, 1))
    for number in range(FILES_KEPT + 10):
        (tmp_path / f"r{number}.log").write_text("")
        os.utime(tmp_path / f"r{number}.log", (2, 2))  # older than r99's, even if the clock does not tick

    log_to_file(str(tmp_path), "r99")
    controller.close()

    assert {"controller", "r99"} < set(parts(tmp_path))
    assert len(list(tmp_path.iterdir())) == FILES_KEPT + 1


def test_a_folder_that_cannot_be_written_changes_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A replica serves even if its log cannot be written."""
    (tmp_path / "file").write_text("")

    log_to_file(str(tmp_path / "file" / "logs"), "r0")
    log_to_file(None, "r0")

    assert "log_not_kept part=r0" in caplog.text


def test_lines_of_several_parts_are_in_the_order_of_time(tmp_path: Path) -> None:
    """Includes rotated files, and keeps each traceback in one piece."""
    (tmp_path / "r0.log.1").write_text(line(1, "a"))
    (tmp_path / "r0.log").write_text(line(3, "c") + "Traceback\n  File\n" + line(5, "e"))
    (tmp_path / "router-0.log").write_text(line(2, "b") + line(4, "d"))

    found = read_log(tmp_path, parts(tmp_path))

    assert [each.text.split()[3] for each in found] == ["a", "b", "c", "d", "e"]
    assert found[2].text.endswith("c\nTraceback\n  File")


@pytest.mark.parametrize(
    ("wanted", "selected"),
    [("r1", ["r1", "r1.1"]), ("router", ["router-0", "router-1"]), ("router-1", ["router-1"]), ("r", [])],
)
def test_a_name_selects_all_processes_of_a_replica_and_all_routers(wanted: str, selected: list[str]) -> None:
    """Users do not think of ranks and single routers as parts."""
    known = ["controller", "r1", "r1.1", "r10", "router-0", "router-1"]

    assert [part for part in known if belongs(part, wanted)] == selected


def test_a_tail_reads_what_is_added_also_to_new_and_rotated_files(tmp_path: Path) -> None:
    """Each line is read once, and only when complete."""
    (tmp_path / "r0.log").write_text(line(1, "old"))
    tail = LogTail(tmp_path)
    with (tmp_path / "r0.log").open("a") as file:
        file.write(line(2, "a") + "2026-11-22 half")
    (tmp_path / "r1.log").write_text(line(3, "b"))

    first = [each.text.split()[-1] for each in tail.read(None)]
    (tmp_path / "r0.log").rename(tmp_path / "r0.log.1")
    (tmp_path / "r0.log").write_text(line(4, "c"))
    second = [each.text.split()[-1] for each in tail.read("r0")]

    assert (first, second) == (["a", "b"], ["c"])


def test_a_tail_forgets_files_that_rotation_removed(tmp_path: Path) -> None:
    """`homing serve` follows the logs for months."""
    path, held = tmp_path / "r0.log", []
    path.write_text("")
    tail = LogTail(tmp_path)
    for number in range(1, 3 * FILES_KEPT):
        path.rename(tmp_path / "r0.log.1")
        held.append((tmp_path / "r0.log.1").open())  # so that its inode number is not used again
        path.write_text(line(number, "a"))
        assert len(tail.read(None)) == 1
    for file in held:
        file.close()

    assert tail.known_files <= 2 * FILES_KEPT + 2


def test_a_tail_reads_a_new_file_from_its_beginning_though_its_inode_was_that_of_another(tmp_path: Path) -> None:
    """A second rotation frees an inode that a new file may reuse; the tail used to continue in the middle of a line."""
    path = tmp_path / "r0.log"
    path.write_text("2026-11-01 10:00:00.000 INFO    a long line of the old file\n")
    tail = LogTail(tmp_path)

    path.write_text("2026-11-01 10:00:01.000 INFO    new\n")  # keeps the inode

    assert [line.text for line in tail.read(None)] == ["2026-11-01 10:00:01.000 INFO    new"]


def test_logs_may_be_lines_of_json(tmp_path: Path) -> None:
    """For log collectors: a traceback is one field, and `homing logs` finds each line's time."""
    log_to_file(str(tmp_path), "r0", "json")
    try:
        raise ValueError("torn")
    except ValueError:
        log.exception("rank_failed replica=%s", "r0")
    log.warning("a second line")

    first, second = (tmp_path / "r0.log").read_text().splitlines()
    found = json.loads(first)
    assert (found["level"], found["message"]) == ("ERROR", "rank_failed replica=r0")
    assert found["traceback"].endswith("ValueError: torn")
    assert [each.time for each in read_log(tmp_path, ["r0"])] == [found["time"], json.loads(second)["time"]]


@pytest.mark.parametrize("form", ["text", "json"])
def test_each_request_is_a_line_of_the_log_of_requests(tmp_path: Path, form: LogFormat) -> None:
    """Lines arrive in batches; all routers' lines form one part, without requests that only query the cluster."""
    for seat in range(2):
        requests = RequestLog(str(tmp_path), seat, form)
        requests.write("ts=1 method=POST status=200\nts=1 method=GET status=200\nts=2 method=POST status=400\n")
        requests.close()

    assert parts(tmp_path) == ["requests-0", "requests-1"]
    assert all(belongs(part, "requests") for part in parts(tmp_path))
    assert [each.text.rstrip('"}').split("=")[-1] for each in read_log(tmp_path, ["requests-1"])] == ["200", "400"]


def test_the_log_of_requests_is_bounded(tmp_path: Path) -> None:
    """A busy cluster must not fill the disk."""
    requests = RequestLog(str(tmp_path), 0, "text")
    for number in range(4):
        requests.write(f"ts={number} method=POST path=/{'x' * (FILE_BYTES // 2)}\n")
    requests.close()

    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2 * FILE_BYTES
    assert read_log(tmp_path, ["requests-0"])[-1].text.split("ts=")[1].startswith("3 ")
