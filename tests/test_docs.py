"""Checks the docs and the packaging: links resolve, pins fit their ranges, and the README stays short."""

import json
import re
import shlex
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from homing.cluster.cli.main import NAMES, parse
from homing.cluster.errors import SettingsError
from homing.router.http.endpoints.table import ENDPOINTS

from .chaos.faults import FAULTS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
#: A command at a prompt (with the lines that continue it), or as inline code; tables of commands omit the name.
COMMANDS = re.compile(
    r"^\$ (?:[\w./~]*/)?homing ((?:.*\\\n)*.*)|`(?:\.venv/bin/)?homing ([a-z]+(?: [^`]+)?)`"
    rf"|`((?:{'|'.join(NAMES)})(?: --[^`]+)?)`",
    re.MULTILINE,
)
#: What stands for a number or a pair of numbers in them.
PLACEHOLDERS = {"N": "1", "MIN:MAX": "1:2"}


def pins() -> dict[str, tuple[int, ...]]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    named = (line.split("==") for line in lines)
    return {_plain(name): _version(version) for name, version in named}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_in_the_pages_leads_to_a_file(page: Path) -> None:
    """Newcomers follow links."""
    targets = [target for target in LINK.findall(page.read_text()) if not target.startswith("http")]

    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_the_pages_name_exists(page: Path) -> None:
    """Files move, and pages that name them must follow."""
    rooms = "cluster|deploy|docs|events|kvcache|replica|router|tests"
    named = set(re.findall(rf"[`\s(]((?:{rooms})/[\w/-]+\.(?:py|md|yaml|json|svg))\b", page.read_text()))

    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_command_in_the_pages_is_one_that_homing_understands() -> None:
    """Readers copy them. Left out: what is only sketched ("[MODEL]", "…") or named without its arguments."""
    texts = [page.read_text() for page in PAGES]
    found = {"".join(each).replace("\\\n", " ") for text in texts for each in COMMANDS.findall(text)}
    wrong = []
    for command in sorted(found):
        words = [] if re.search(r"[\[…|]|\$", command) else shlex.split(command.split(" > ")[0], comments=True)
        try:
            parse([PLACEHOLDERS.get(word, word) for word in words or ["--version"]])
        except SettingsError as error:
            if "requires" not in str(error) and "takes a" not in str(error):
                wrong.append(f"{command}: {error}")

    assert len(found) > 80
    assert wrong == []


def test_every_endpoint_is_documented() -> None:
    """docs/api.md must explain every endpoint that `/openapi.json` lists."""
    page = (ROOT / "docs" / "api.md").read_text()

    paths = {each.path.replace("/{model}", "") for each in ENDPOINTS}
    assert [path for path in sorted(paths) if not re.search(rf"`{re.escape(path)}[`?]", page)] == []


def test_every_fault_is_documented() -> None:
    """docs/operations.md says what each fault looks like; it must cover every fault that `make chaos` can inject."""
    page = (ROOT / "docs" / "operations.md").read_text()

    assert [name for name in FAULTS if name not in page and name.rsplit("-", 1)[0] not in page] == []


def test_the_readme_is_short() -> None:
    """At most 90 lines; details belong in docs/."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90


def test_every_dependency_is_pinned_within_its_range() -> None:
    """`make serve` must install the same versions every time, and they must be versions that we support."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["serve"], *extras["dev"]]
    pinned = pins()

    for requirement in wanted:
        name, bounds = re.match(r"([A-Za-z0-9_.-]+)([^;]*)", requirement).groups()
        version = pinned.get(_plain(name))
        assert version, f"{name} is not pinned in constraints.txt"
        for operator, bound in re.findall(r"(>=|<)\s*([\d.]+)", bounds):
            fits = version >= _version(bound) if operator == ">=" else version < _version(bound)
            assert fits, f"{name} {version} is pinned, {requirement} is supported"


def test_torch_is_pinned_to_the_release_that_has_a_cpu_build() -> None:
    """A newer or unpinned torch brings gigabytes of CUDA to a machine without a GPU."""
    assert pins()["torch"] == (2, 13, 0)


def test_every_make_target_of_the_readme_exists() -> None:
    """A newcomer's first commands are the make targets of the README."""
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|\$ )make ([a-z][a-z-]+)", (ROOT / "README.md").read_text()))

    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_table_begins_after_an_empty_line(page: Path) -> None:
    """GitHub shows such a table anyway; the site shows its source."""
    lines = ["", *page.read_text().splitlines()]

    assert [
        row for before, row in pairwise(lines) if row.startswith("|") and before and not before.startswith("|")
    ] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_pages_can_be_read(page: Path) -> None:
    """Paragraphs and items have at most five lines, cells of tables at most two sentences."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    parts = re.split(r"\n(?=\s*\n|#|\||\s*(?:[-*]|\d+\.) )", text)
    cells = [
        re.sub(r"`[^`]*`", "x", cell).strip()
        for row in re.findall(r"^\|.*", text, re.MULTILINE)
        for cell in row.split("|")
    ]

    assert [part for part in parts if len(part.strip().splitlines()) > 5] == []
    assert [cell for cell in cells if len(re.findall(r"\.(?= [A-Z]|$)", cell)) > 2] == []


def test_the_clients_page_tells_the_demo_model_s_context_and_the_agents_that_were_tried() -> None:
    """Whoever tries a coding agent on the demo model must learn there why its first prompt is refused."""
    config = json.loads((ROOT / "replica" / "demo" / "model" / "config.json").read_text())
    tried = json.loads((ROOT / "tests" / "agents" / "npm" / "package.json").read_text())["dependencies"]
    page = " ".join((ROOT / "docs" / "clients.md").read_text().split())

    assert f"context of {config['max_position_embeddings']:,} tokens holds none of them" in page
    for package in ("@anthropic-ai/claude-code", "@openai/codex", "@qwen-code/qwen-code", "opencode-ai"):
        assert f"| {tried[package]} |" in page, package
