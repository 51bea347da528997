"""The output of `homing logs`."""

import io
from pathlib import Path

import pytest

from homing.cluster.cli.logs import logs
from homing.cluster.cli.main import run
from homing.cluster.errors import NoSuchLog, SettingsError


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The state folder of a cluster that has ended."""
    folder = tmp_path / "default.logs"
    folder.mkdir()
    for second, part in enumerate(("controller", "router-0", "r0", "controller")):
        with (folder / f"{part}.log").open("a") as file:
            file.write(f"2026-11-22 10:00:0{second}.000 INFO    {part}_said n={second}\n")
    return tmp_path


def printed(state: Path, *words: str) -> list[str]:
    out = io.StringIO()
    assert run(["logs", "--state-dir", str(state), *words], out) == 0
    return out.getvalue().splitlines()


def test_logs_outlive_the_cluster(state: Path) -> None:
    """The cause of an exit is investigated afterwards. Lines are labelled unless only one part is printed."""
    assert [each.split()[0] for each in printed(state)] == ["controller", "router-0", "r0", "controller"]
    assert printed(state, "router") == ["2026-11-22 10:00:01.000 INFO    router-0_said n=1"]
    assert [each.split("=")[1] for each in printed(state, "--lines", "2")] == ["2", "3"]
    assert len(printed(state, "--lines", "0")) == 4


def test_a_part_that_has_no_log_is_named_beside_those_that_have(state: Path, tmp_path: Path) -> None:
    """Empty output would look like a part without messages."""
    with pytest.raises(NoSuchLog, match=r"no log of 'contoller'; did you mean controller\? \(there are: controller, r"):
        printed(state, "contoller")
    with pytest.raises(NoSuchLog, match="cluster 'blue' has logged nothing here"):
        printed(state, "--name", "blue")


def test_a_negative_number_of_lines_is_refused(state: Path) -> None:
    """It would print all but the first lines."""
    with pytest.raises(SettingsError, match="--lines -1"):
        printed(state, "--lines", "-1")


def test_what_is_added_is_printed_until_interrupted(state: Path) -> None:
    """Like `tail -f` for one part."""
    out, pauses = io.StringIO(), 0

    def pause(_: float) -> None:
        nonlocal pauses
        pauses += 1
        if pauses > 2:
            raise KeyboardInterrupt
        for part in ("r0", "controller"):
            with (state / "default.logs" / f"{part}.log").open("a") as file:
                file.write(f"2026-11-22 10:00:1{pauses}.000 INFO    {part} added\n")

    with pytest.raises(KeyboardInterrupt):
        logs("r0", flags={"state_dir": [str(state)]}, out=out, lines=1, follow=True, pause=pause)

    assert [each.split()[1] for each in out.getvalue().splitlines()] == ["10:00:02.000", "10:00:11.000", "10:00:12.000"]
