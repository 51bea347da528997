"""The files of deploy/, read as the programs that they are for read them."""

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
#: The ports of Ray that docs/deploy.md tells a firewall's keeper of.
PORT_FLAG = re.compile(r"--((?:[a-z-]+-)?port)=(\d+)")


def read_yaml(path: str) -> Any:
    """The one document of a file under deploy/."""
    return yaml.safe_load((DEPLOY / path).read_text())


def read_all(path: str) -> list[dict[str, Any]]:
    """The documents of a file under deploy/."""
    return list(yaml.safe_load_all((DEPLOY / path).read_text()))


def pinned(package: str) -> str:
    """Its version in constraints.txt."""
    found = re.search(rf"^{package}==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found, f"{package} is not pinned"
    return found[1]


def serve_commands(text: str) -> list[str]:
    """Every `homing serve …` in a text, with lines that go on joined."""
    joined = re.sub(r"\s*\\?\n\s+(?=--)", " ", text)
    return re.findall(r"homing (serve\b[^\n'\"`#|]*)", joined)
