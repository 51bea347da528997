"""Import directions between and inside the packages, and the files allowed at the root of the repository.

`docs/architecture.md` describes the packages, and each folder's `__init__.py` describes the folder. A new folder needs
an entry in `FOLDERS`.
"""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cluster", "deploy", "events", "kvcache", "replica", "router")

#: The other top-level packages that each package may import.
MAY_IMPORT = {
    "deploy": (),
    "events": (),
    "kvcache": (),
    "replica": ("events", "kvcache"),
    "router": ("events", "kvcache", "replica.messages"),
    "cluster": ("events", "kvcache", "replica", "router"),
}
#: The other folders of its own package that each folder may import, including their subfolders. Every folder may
#: import the modules at the top of its package, and those modules may import every folder.
FOLDERS: dict[str, tuple[str, ...]] = {
    "cluster/cli": ("cluster/control", "cluster/lab"),
    "cluster/control": (),
    "cluster/control/engines": ("cluster/control",),
    "cluster/lab": (),
    "cluster/lab/analyze": ("cluster/lab",),
    "cluster/lab/simulate": ("cluster/control", "cluster/lab"),
    "cluster/lab/simulate/peers": (),
    "events/follow": ("events/security", "events/wire"),
    "events/publish": ("events/security", "events/wire"),
    "events/sdk": ("events/follow", "events/security", "events/wire"),
    "events/security": (),
    "events/wire": (),
    "replica/attention": ("replica/engine", "replica/kernels", "replica/models"),
    "replica/demo": (),
    "replica/disk": (),
    "replica/engine": ("replica/messages", "replica/structured"),
    "replica/execute": (
        "replica/attention",
        "replica/engine",
        "replica/kernels",
        "replica/load",
        "replica/messages",
        "replica/models",
        "replica/parallel",
    ),
    "replica/kernels": ("replica/engine", "replica/messages", "replica/models"),
    "replica/kernels/cpu": ("replica/kernels", "replica/models"),
    "replica/kernels/cpu/attention": ("replica/kernels", "replica/models"),
    "replica/kernels/cpu/linear": ("replica/kernels/cpu/runtime",),
    "replica/kernels/cpu/runtime": (),
    "replica/kernels/triton": ("replica/engine", "replica/kernels", "replica/models"),
    "replica/load": (
        "replica/disk",
        "replica/engine",
        "replica/kernels/cpu/runtime",
        "replica/messages",
        "replica/models",
    ),
    "replica/messages": (),
    "replica/models": ("replica/kernels", "replica/load", "replica/parallel"),
    "replica/parallel": ("replica/engine", "replica/execute", "replica/load"),
    "replica/structured": ("replica/messages",),
    "router/flow": ("router/routing",),
    "router/http": ("router/tenants", "router/text"),
    "router/http/endpoints": ("router/http", "router/text"),
    "router/http/live": ("router/http/protocol",),
    "router/http/dialects": ("router/http", "router/text"),
    "router/http/protocol": (),
    "router/replicas": ("router/flow", "router/routing"),
    "router/replicas/external": ("router/flow", "router/replicas", "router/routing", "router/text/parsers"),
    "router/routing": (),
    "router/routing/policy": ("router/routing",),
    "router/tenants": (),
    "router/text": ("router/text/parsers",),
    "router/text/parsers": (),
}
#: Imports in functions that close a cycle: none should be added.
HIDDEN_IMPORTS = (("homing.replica.kernels.choice", "homing.replica.models.layers"),)
NEEDS_NO = {
    "kvcache": {"ray", "torch", "transformers", "zmq"},
    "events": {"ray", "torch", "transformers"},
    "replica": {"ray"},
    "router": {"ray", "torch"},
}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def dotted(path: Path) -> str:
    """The dotted name of a file: `router/flow/warmup.py` is `homing.router.flow.warmup`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("homing", *(parts[:-1] if parts[-1] == "__init__" else parts)))


@functools.cache
def imports(path: Path, when: Literal["loaded", "run", "read"] = "read") -> tuple[str, ...]:
    """Absolute dotted names that a module imports when it is loaded, also when its functions run, or for types too."""
    package, tree = ("homing", *path.relative_to(ROOT).parent.parts), ast.parse(path.read_text())
    found: list[str] = []
    for node in ast.walk(tree) if when == "read" else running(tree, functions=when == "run"):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = (*base, *(node.module.split(".") if node.module else ()))
            found += [".".join((*module, alias.name)) for alias in node.names]
    return tuple(found)


def running(node: ast.AST, *, functions: bool) -> Iterator[ast.AST]:
    """The statements that run: not those under `TYPE_CHECKING`, and those in functions only if wanted."""
    for child in ast.iter_child_nodes(node):
        if not functions and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from running(child, functions=functions)


@functools.cache
def graph(when: Literal["loaded", "run"]) -> dict[str, set[str]]:
    """Each of our modules, with those of our modules that it imports when it is loaded, or also when it runs."""
    paths = {dotted(path): path for package in PACKAGES for path in modules(package)}

    def module_of(name: str) -> str | None:
        return name if name in paths else module_of(name.rpartition(".")[0]) if "." in name else None

    return {
        module: {found for name in imports(path, when) if (found := module_of(name))} - {module}
        for module, path in paths.items()
    }


def test_a_package_imports_only_the_packages_below_it() -> None:
    """For example, the router must not need torch, and the cache must not need sockets."""
    crossed = [
        f"{path.relative_to(ROOT)}: {name}"
        for package in PACKAGES
        for path in modules(package)
        for name in imports(path)
        if name.startswith("homing.")
        and not name.removeprefix("homing.").startswith((package, *MAY_IMPORT[package], "__version__"))
    ]

    assert not crossed


def folder_of(name: str) -> str | None:
    """The folder (`router/flow`) of a module or of a name in it; None at the top of a package and outside homing."""
    parts = name.split(".")[1:] if name.startswith("homing.") else []
    depth = next((n for n in range(len(parts), 1, -1) if ROOT.joinpath(*parts[:n]).is_dir()), 0)
    return "/".join(parts[:depth]) or None


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_only_the_folders_that_it_may(folder: str) -> None:
    """`FOLDERS` defines the import directions inside each package."""
    allowed = (folder, *FOLDERS[folder])

    crossed = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / folder).glob("*.py"))
        for name in imports(path)
        if (target := folder_of(name))
        and target.split("/")[0] == folder.split("/")[0]
        and not any(target == each or target.startswith(f"{each}/") for each in allowed)
    ]

    assert not crossed


def test_every_folder_has_its_row_and_says_what_it_is_for() -> None:
    """A newcomer opens a folder's `__init__.py` first, so its docstring says who imports the folder, and its limits."""
    folders = {path.parent.relative_to(ROOT).as_posix() for package in PACKAGES for path in modules(package)}
    faces = {folder: (ROOT / folder / "__init__.py").read_text() for folder in folders}

    docs = {folder: ast.get_docstring(ast.parse(text)) or "" for folder, text in faces.items() if folder != "deploy"}
    rules = {
        folder: re.search(r"[Ii]mport", text) and re.search(r"\b([Mm]ust|[Mm]ay|only)\b", text)
        for folder, text in docs.items()
    }
    assert [folder for folder, said in rules.items() if not said] == []
    assert folders - set(PACKAGES) == set(FOLDERS)


def test_no_modules_import_each_other_in_a_circle() -> None:
    """A module in an import cycle cannot be understood, tested or loaded alone. Imports for types are exempt."""
    left = {module: set(needs) for module, needs in graph("run").items()}
    for module, needed in HIDDEN_IMPORTS:
        left[module].remove(needed)
    while free := {module for module, needs in left.items() if not needs & left.keys()}:
        left = {module: needs for module, needs in left.items() if module not in free}

    while ends := {module for module in left if not any(module in needs for needs in left.values())}:
        left = {module: needs for module, needs in left.items() if module not in ends}
    assert not {module: needs & left.keys() for module, needs in left.items()}


def test_nothing_that_serves_imports_the_lab() -> None:
    """Simulation and log analysis are offline tools; the command line imports them only when they are run."""
    using = [
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in modules(package)
        if "lab" not in path.relative_to(ROOT).parts and any(".cluster.lab" in name for name in imports(path))
    ]

    assert using == []
    assert not [
        module for module, needs in graph("loaded").items() if ".lab" not in module and any(".lab" in n for n in needs)
    ]


@pytest.mark.parametrize("package", NEEDS_NO)
def test_a_package_does_without_the_libraries_that_it_does_not_need(package: str) -> None:
    """Only `cluster` needs Ray, and only `replica` computes with torch."""
    heavy = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in modules(package)
        for name in imports(path)
        if name.split(".")[0] in NEEDS_NO[package]
    ]

    if package == "router":  # parity needs transformers' own tokenizer and chat template code
        heavy = [found for found in heavy if "router/text/" not in found]
    assert not heavy


@pytest.mark.parametrize("package", ["kvcache", "events", "replica", "router", "cluster", "cluster.config"])
def test_importing_a_package_is_cheap(package: str) -> None:
    """`homing status` must not wait for torch: no package's `__init__.py`, nor the settings, loads a heavy library."""
    heavy = {"torch", "transformers", "numpy", "ray"} - ({"ray"} if package == "cluster" else set())

    code = f"import sys, homing.{package}; found = {heavy} & set(sys.modules); sys.exit(str(found) if found else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stderr


def test_only_the_package_itself_is_a_module_at_the_root() -> None:
    """The repository root is the package, so any other module there would be installed with it."""
    assert [path.name for path in ROOT.glob("*.py")] == ["__init__.py"]


def test_every_package_folder_is_listed_for_the_wheel() -> None:
    """Packages are listed one by one; a missing one would work in a checkout and fail in the wheel."""
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {"homing"} | {dotted(path) for package in PACKAGES for path in (ROOT / package).rglob("__init__.py")}

    assert listed == found


def test_committed_links_stay_inside_the_repository() -> None:
    """A link to an absolute path works only on the machine where it was made."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    if not names:
        pytest.skip("not a git checkout")
    links = [path for path in map(ROOT.joinpath, names.rstrip("\0").split("\0")) if path.is_symlink()]

    assert [str(link) for link in links if not link.resolve().is_relative_to(ROOT)] == []
