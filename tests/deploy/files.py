"""Readers for the files of deploy/ and for the commands they contain."""

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
#: Ray's ports in commands; docs/deploy.md lists them for whoever configures a firewall.
PORT_FLAG = re.compile(r"--((?:[a-z-]+-)?port)=(\d+)")


def read_yaml(path: str) -> Any:
    """The only document of a file under deploy/."""
    return yaml.safe_load((DEPLOY / path).read_text())


def read_all(path: str) -> list[dict[str, Any]]:
    """The documents of a file under deploy/."""
    return list(yaml.safe_load_all((DEPLOY / path).read_text()))


def pinned(package: str) -> str:
    """The package's version in constraints.txt."""
    found = re.search(rf"^{package}==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found, f"{package} is not pinned"
    return found[1]


def serve_commands(text: str) -> list[str]:
    """Every `homing serve …` command in a text, with continued lines joined."""
    joined = re.sub(r"\s*\\?\n\s+(?=--)", " ", text)
    return re.findall(r"homing (serve\b[^\n'\"`#|]*)", joined)
