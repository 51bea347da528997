"""Our check of the tools that Triton's launcher needs agrees with Triton itself."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from homing.replica.kernels.toolchain import launcher_problem, problem_of


@pytest.mark.skipif(find_spec("triton") is None, reason="asks Triton itself")
@pytest.mark.parametrize("variable", [None, "no-such-compiler"])
def test_a_problem_is_reported_exactly_where_triton_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str | None
) -> None:
    """A slim image has no compiler on its PATH; CC overrides the PATH."""
    from triton.runtime.build import compile_module_from_src

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    if launcher_problem() is None:
        assert compile_module_from_src(module_source("well"), "well") is not None

    if variable is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        monkeypatch.setenv("CC", variable)

    assert "no C compiler" in (launcher_problem() or "")
    with pytest.raises((RuntimeError, OSError)):
        compile_module_from_src(module_source("bad"), "bad")


def test_all_that_is_missing_is_named_at_once(tmp_path: Path) -> None:
    """An operator who installs a compiler should not learn of missing headers only at the next start."""
    assert problem_of(False, tmp_path) == f"there is no C compiler on the PATH and {tmp_path} has no Python.h"
    (tmp_path / "Python.h").touch()
    assert problem_of(True, tmp_path) is None


def module_source(name: str) -> str:
    """C source of an empty Python module."""
    return (
        "#include <Python.h>\n"
        f'static struct PyModuleDef definition = {{PyModuleDef_HEAD_INIT, "{name}", NULL, -1, NULL}};\n'
        f"PyMODINIT_FUNC PyInit_{name}(void) {{ return PyModule_Create(&definition); }}\n"
    )
