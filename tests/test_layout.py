"""The house's plan: who may import whom, and what may lie at the root.

Directions (docs/architecture.md): `events` and `kvcache` know nobody; `replica` and `router` know these two; the router
knows of the replica only its messages; `cluster` knows all.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("cluster", "deploy", "events", "kvcache", "replica", "router")

MAY_IMPORT = {
    "deploy": (),
    "events": (),
    "kvcache": (),
    "replica": ("events", "kvcache"),
    "router": ("events", "kvcache", "replica.messages"),
    "cluster": ("events", "kvcache", "replica", "router"),
}
NEEDS_NO = {
    "kvcache": {"ray", "torch", "transformers", "zmq"},
    "events": {"ray", "torch", "transformers"},
    "replica": {"ray"},
    "router": {"ray", "torch"},
}


def modules(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Absolute dotted names of what a module imports, at any depth of its code."""
    package = ("homing", *path.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = (*base, *(node.module.split(".") if node.module else ()))
            yield from (".".join((*module, alias.name)) for alias in node.names)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_the_rooms_below_it(room: str) -> None:
    """A crossed import is how a design dies: the router must not need torch, the cache must not need sockets."""
    allowed = (room, *MAY_IMPORT[room], "__version__")

    crossed = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in modules(room)
        for name in imports(path)
        if name.startswith("homing.") and not name.removeprefix("homing.").startswith(allowed)
    ]

    assert not crossed


@pytest.mark.parametrize("room", NEEDS_NO)
def test_a_room_does_without_the_packages_it_does_not_need(room: str) -> None:
    """Only `cluster` knows Ray; only `replica` computes."""
    heavy = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in modules(room)
        for name in imports(path)
        if name.split(".")[0] in NEEDS_NO[room]
    ]

    if room == "router":  # the tokenizer and the chat template are transformers' own: parity needs the very code
        heavy = [found for found in heavy if "router/text/" not in found]
    assert not heavy


@pytest.mark.parametrize("room", ["kvcache", "events", "replica", "router", "cluster"])
def test_the_face_of_a_room_is_light(room: str) -> None:
    """`homing status` must not wait for torch: a face hands names on and loads nothing heavy."""
    heavy = "{'torch', 'transformers', 'ray'}" if room != "cluster" else "{'torch', 'transformers'}"

    code = f"import sys, homing.{room}; found = {heavy} & set(sys.modules); sys.exit(str(found) if found else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stderr


def tracked() -> list[str]:
    """Names of all committed files and links; skips the test outside of a checkout."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    if not names:
        pytest.skip("not a git checkout")
    return names.rstrip("\0").split("\0")


def test_only_the_package_face_is_a_module_at_the_root() -> None:
    """The root is the package: any other module there would be installed with it."""
    assert [path.name for path in ROOT.glob("*.py")] == ["__init__.py"]


def test_every_package_folder_is_listed_for_the_wheel() -> None:
    """Packages are listed one by one; one that is forgotten works from a checkout and fails from the wheel."""
    import tomllib

    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {"homing"} | {
        "homing." + ".".join(path.parent.relative_to(ROOT).parts)
        for room in ROOMS
        for path in (ROOT / room).rglob("__init__.py")
    }

    assert listed == found


def test_no_function_is_longer_than_a_page() -> None:
    """House style: functions read in one breath."""
    long = [
        f"{path.relative_to(ROOT)}:{node.name} {(node.end_lineno or 0) - node.lineno + 1}"
        for room in ROOMS
        for path in modules(room)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= 60
    ]

    assert not long


def test_no_commit_names_this_machine() -> None:
    """A path of a builder's machine or the host of an index works nowhere else."""
    words = ("/work" + "/", "-e " + "/", "download." + "pytorch.org", "files.pythonhosted" + ".org")

    found = [
        f"{name}: {word}"
        for name in tracked()
        if (ROOT / name).is_file() and (ROOT / name).suffix in {".py", ".md", ".toml", ".yaml", ".txt", ".json", ""}
        for word in words
        if word in (ROOT / name).read_text(errors="replace")
    ]

    assert not found


def test_committed_links_stay_inside_the_repository() -> None:
    """A link to a folder of somebody's machine leads nowhere, or anywhere, on every other one."""
    links = [path for path in map(ROOT.joinpath, tracked()) if path.is_symlink()]

    assert [str(link) for link in links if not link.resolve().is_relative_to(ROOT)] == []
