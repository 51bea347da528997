"""Print how many lines each folder of the product has: code, blank, docstring, comment and import lines.

python tests/lines.py [REVISION]    without a revision: the working tree
"""

import ast
import io
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cluster", "deploy", "events", "kvcache", "replica", "router")
KINDS = ("files", "code", "blank", "docstring", "comment", "import")


def sources(revision: str | None) -> Iterator[tuple[str, str]]:
    """The path and the text of each Python file of the product."""
    if revision is None:
        for package in PACKAGES:
            for path in (ROOT / package).rglob("*.py"):
                yield path.relative_to(ROOT).as_posix(), path.read_text()
        return
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files:
            if member.name.endswith(".py") and member.name.split("/")[0] in PACKAGES:
                content = files.extractfile(member)
                assert content is not None, f"{member.name} is not a file"
                yield member.name, content.read().decode()


def kinds(text: str) -> Iterator[str]:
    """The kind of each line."""
    marked: dict[int, str] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            marked |= dict.fromkeys(range(node.lineno, (node.end_lineno or 0) + 1), "import")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            marked |= dict.fromkeys(range(node.lineno, (node.end_lineno or 0) + 1), "docstring")
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        yield marked.get(number) or ("code" if bare and not bare.startswith("#") else "comment" if bare else "blank")


def main() -> None:
    """Count and print."""
    folders: dict[str, Counter[str]] = {}
    for path, text in sources(sys.argv[1] if sys.argv[1:] else None):
        count = Counter(kinds(text), files=1)
        for folder in (path.rpartition("/")[0], "all"):
            folders.setdefault(folder, Counter()).update(count)
    print(f"{'':30}", *(f"{kind:>9}" for kind in KINDS), f"{'lines':>9}")
    for folder in sorted(folders):
        count = folders[folder]
        print(f"{folder:30}", *(f"{count[kind]:9,}" for kind in KINDS), f"{count.total() - count['files']:9,}")


if __name__ == "__main__":
    main()
