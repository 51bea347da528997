"""Kernels are compiled before ranks need them, once, and only if the ranks will use them."""

from pathlib import Path

import pytest

from homing.cluster.config import Settings, replaced
from homing.cluster.control.compiled_kernels import start_compilation
from homing.replica.demo import demo_model_path

#: Settings without any kernels, so that nothing is compiled here.
NOTHING = replaced(Settings(), dtype="float16")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


@pytest.mark.cluster
def test_a_first_start_begins_to_compile_and_a_later_one_does_not(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check at each start would take two seconds. Modules in the working directory must not be run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torch.py").write_text("raise SystemExit(3)")
    process = start_compilation(NOTHING, demo_model_path())
    assert process is not None

    assert process.wait(120) == 0
    assert [path.suffix for path in cache.iterdir()] == [".complete"]
    assert start_compilation(NOTHING, demo_model_path()) is None
    other = start_compilation(replaced(NOTHING, block_size=32), demo_model_path())
    assert other is not None, "another block size needs other kernels"
    assert other.wait(120) == 0


@pytest.mark.parametrize("changes", [{"gpus_per_rank": 1.0}, {"engine": "vllm"}], ids=str)
def test_nothing_is_compiled_for_ranks_that_need_none(changes: dict[str, object]) -> None:
    """GPUs and other engines have their own kernels."""
    assert start_compilation(replaced(Settings(), **changes), demo_model_path()) is None


def test_nothing_is_compiled_where_kernels_cannot_be_kept(cache: Path) -> None:
    """Each start would compile them again, in parallel with the ranks doing the same."""
    cache.mkdir()
    cache.chmod(0o777)  # others could plant code that we would run

    assert start_compilation(NOTHING, demo_model_path()) is None
