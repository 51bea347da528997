"""Comparisons are measured once per machine and software, and noise does not change what was chosen."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from homing.replica.kernels.cpu.runtime.measurements import REPEATS, Measurements


@dataclass
class Machine:
    """Runs take as long as the lists say; the last entry is for all later ones."""

    ours: list[float]
    library: list[float]
    now: float = 0.0
    runs: int = field(default=0, init=False)

    def run(self, durations: list[float]) -> Callable[[], None]:
        left = list(durations)

        def take() -> None:
            self.runs += 1
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return take

    def compare(self, path: Path | None, software: str = "1") -> tuple[float, bool]:
        found = Measurements(path, software, lambda: self.now).compare("x", self.run(self.ours), self.run(self.library))
        return found.speed, found.library


@pytest.mark.parametrize(("library", "chosen"), [(4.0, False), (1.0, False), (0.9, False), (0.7, True), (0.1, True)])
def test_the_library_is_chosen_if_it_is_clearly_faster(library, chosen):
    assert Machine([1.0], [library]).compare(None) == (pytest.approx(1 / library), chosen)


def test_the_first_run_and_slow_runs_do_not_count():
    """The first one compiles, and any may be disturbed."""
    assert Machine([9.0, 5.0, 1.0], [90.0, 0.5, 7.0]).compare(None) == (2.0, True)


def test_a_known_comparison_is_not_measured_again(tmp_path):
    path, machine = tmp_path / "faster.json", Machine([1.0], [0.5])
    first = machine.compare(path)
    done, machine.library = machine.runs, [8.0]

    assert machine.compare(path) == first == (2.0, True)
    assert machine.runs == done == 2 * (1 + REPEATS)


def test_a_choice_stays_until_it_is_wrong(tmp_path):
    """After an update, both are measured again: near equality, the choice before it counts."""
    path, taken = tmp_path / "faster.json", []

    for software, speed in enumerate((1.2, 1.3, 1.1, 0.9, 1.2)):
        taken.append(Machine([speed], [1.0]).compare(path, str(software))[1])

    assert taken == [False, True, True, False, False]


def test_names_do_not_displace_each_other(tmp_path):
    path, machine = tmp_path / "faster.json", Machine([1.0], [0.5])
    kept = Measurements(path, "1", lambda: machine.now)
    for name in ("a", "b", "a", "b"):
        kept.compare(name, machine.run([1.0]), machine.run([0.5]))

    assert machine.runs == 2 * 2 * (1 + REPEATS)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"x": {"speed": "fast"}}', b"\xff"])
def test_a_damaged_file_is_measured_anew_and_replaced(content, tmp_path, caplog):
    path = tmp_path / "faster.json"
    path.write_bytes(content)

    assert Machine([1.0], [0.5]).compare(path) == (2.0, True)
    assert Machine([1.0], [8.0]).compare(path) == (2.0, True)
    assert "comparisons_not_read" in caplog.text


def test_a_folder_that_cannot_be_written_costs_only_the_memory(tmp_path, caplog):
    assert Machine([1.0], [0.5]).compare(tmp_path / "missing" / "faster.json") == (2.0, True)
    assert "comparisons_not_kept" in caplog.text
