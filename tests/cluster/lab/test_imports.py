"""Serving code does not import the offline tools."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LAB = ROOT / "cluster" / "lab"


def imported(node: ast.AST) -> str:
    match node:
        case ast.ImportFrom():
            return ".".join([node.module or "", *(alias.name for alias in node.names)])
        case ast.Import():
            return " ".join(alias.name for alias in node.names)
    return ""


def test_no_serving_code_imports_the_lab() -> None:
    """In a router, a simulator would cost memory, start-up time and dependencies, and might affect decisions."""
    found = []
    for room in ("events", "kvcache", "replica", "router", "cluster"):
        for path in (ROOT / room).rglob("*.py"):
            if LAB in path.parents:
                continue
            tree = ast.parse(path.read_text())
            found += [f"{path}: {name}" for node in ast.walk(tree) if "lab" in (name := imported(node)).split(".")]

    assert not found
