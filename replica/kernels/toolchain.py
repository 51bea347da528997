"""What Triton needs of a machine, besides its wheel, to launch kernels. Imports neither torch nor Triton.

At its first launch Triton compiles a small C module against Python's headers; later starts take it from the cache.
"""

import os
import shutil
import sysconfig
from pathlib import Path

REMEDY = "install a C compiler and Python's headers (Debian and Ubuntu: apt-get install gcc python3-dev)"
#: Sources of the compiler's name, as Triton's runtime/build.py has them: the variable, then the first of these.
COMPILER_VARIABLE, COMPILERS = "CC", ("gcc", "clang")


def launcher_problem() -> str | None:
    """Why Triton cannot build its launcher with this interpreter, this environment and this PATH; None: it can."""
    named = os.environ.get(COMPILER_VARIABLE)
    found = [shutil.which(name) for name in ((named,) if named is not None else COMPILERS)]
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme names a folder for local installations, in which there are no headers.
    headers = Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])
    return problem_of(any(found), headers)


def problem_of(has_compiler: bool, headers: Path) -> str | None:
    """Why a C module for Python cannot be built; `headers` is the folder that should contain Python.h."""
    missing = [] if has_compiler else ["there is no C compiler on the PATH"]
    if not (headers / "Python.h").is_file():
        missing.append(f"{headers} has no Python.h")
    return " and ".join(missing) or None
