"""docs/deploy.md against the commands and files that it names."""

import re

import pytest

from homing.cluster.cli.main import parse

from .files import DEPLOY, ROOT, serve_commands

PAGE = (ROOT / "docs" / "deploy.md").read_text()


@pytest.mark.parametrize("command", sorted({words for words in serve_commands(PAGE) if "--" in words}))
def test_a_serve_command_of_the_page_is_one_that_homing_understands(command: str) -> None:
    """Readers copy these commands."""
    assert parse(command.split()).settings


def test_every_file_that_the_page_names_is_there() -> None:
    """The spelling must match the disk, too."""
    named = set(re.findall(r"\bdeploy/((?:docker|kubernetes|ray|monitoring)/[\w./-]+\w)", PAGE)) - {"docker/auth_token"}

    assert len(named) >= 7
    assert [path for path in sorted(named) if not (DEPLOY / path).exists()] == []


def test_every_place_has_its_part_on_the_page() -> None:
    """One page covers all of them."""
    for path in [*(DEPLOY / "ray").iterdir(), *(DEPLOY / "kubernetes").iterdir()]:
        assert path.name in PAGE, path
