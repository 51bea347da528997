"""Kernels begin to be compiled before ranks need them, once, and only where ranks will."""

from pathlib import Path

import pytest

from homing.cluster.config import Settings, replaced
from homing.cluster.control.compiled_kernels import start_compilation
from homing.replica.demo import demo_model_path

#: Of which there are no kernels, so that nothing is compiled here.
NOTHING = replaced(Settings(), dtype="float16")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


@pytest.mark.cluster
def test_a_first_start_begins_to_compile_and_a_later_one_does_not(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would cost each start two seconds to find that all is there. Modules of the working directory are not run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torch.py").write_text("raise SystemExit(3)")
    process = start_compilation(NOTHING, demo_model_path())
    assert process is not None

    assert process.wait(120) == 0
    assert [path.suffix for path in cache.iterdir()] == [".complete"]
    assert start_compilation(NOTHING, demo_model_path()) is None
    other = start_compilation(replaced(NOTHING, block_size=32), demo_model_path())
    assert other is not None, "another block size has other kernels"
    assert other.wait(120) == 0


@pytest.mark.parametrize("changes", [{"gpus_per_rank": 1.0}, {"engine": "vllm"}], ids=str)
def test_nothing_is_compiled_for_ranks_that_need_none(changes: dict[str, object]) -> None:
    """GPUs have kernels of their own, and other engines, too."""
    assert start_compilation(replaced(Settings(), **changes), demo_model_path()) is None


def test_nothing_is_compiled_where_kernels_cannot_be_kept(cache: Path) -> None:
    """Each start would compile them again, beside ranks that do the same."""
    cache.mkdir()
    cache.chmod(0o777)  # others could write code that we would run

    assert start_compilation(NOTHING, demo_model_path()) is None
