"""Checks what Triton needs besides its wheel to launch kernels. Imports neither torch nor Triton.

On its first launch Triton compiles a small C module against Python's headers; later starts load it from the cache.
"""

import os
import shutil
import sysconfig
from pathlib import Path

REMEDY = "install a C compiler and Python's headers (Debian and Ubuntu: apt-get install gcc python3-dev)"
#: Where Triton's runtime/build.py looks for a compiler: the variable's value, else the first of these on the PATH.
COMPILER_VARIABLE, COMPILERS = "CC", ("gcc", "clang")


def launcher_problem() -> str | None:
    """The reason why Triton cannot build its launcher with this interpreter, environment and PATH, or None."""
    named = os.environ.get(COMPILER_VARIABLE)
    found = [shutil.which(name) for name in ((named,) if named is not None else COMPILERS)]
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme points to the folder for local installations, which contains no headers.
    headers = Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])
    return problem_of(any(found), headers)


def problem_of(has_compiler: bool, headers: Path) -> str | None:
    """The reason why no Python C module can be built, or None; `headers` is the folder that should contain Python.h."""
    missing = [] if has_compiler else ["there is no C compiler on the PATH"]
    if not (headers / "Python.h").is_file():
        missing.append(f"{headers} has no Python.h")
    return " and ".join(missing) or None
