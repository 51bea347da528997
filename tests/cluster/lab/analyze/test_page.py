"""docs/analyze.md shows what the command really prints."""

import re
import subprocess
import sys
from pathlib import Path

import homing

ROOT = Path(homing.__file__).parent
PAGE = ROOT / "docs" / "analyze.md"
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)
SESSION = re.compile(r"```console\n\$ homing (.*?)\n(.*?)```", re.DOTALL)


def test_the_example_prints_what_the_page_shows(tmp_path: Path):
    """Readers compare their output; the example also covers the whole command on a log of texts."""
    page = PAGE.read_text()
    code = CODE.search(page)
    session = SESSION.search(page)
    assert code is not None
    assert session is not None

    subprocess.run([sys.executable, "-c", code[1]], cwd=tmp_path, check=True, timeout=60)
    command = [sys.executable, "-m", "homing.cluster.cli.main", *session[1].split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)

    assert done.stdout == session[2]


def test_the_readme_shows_the_advice_of_the_example():
    """The README sends its readers to the example for what it shows."""
    (shown,) = re.findall(r"```\n(1\. messages.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)

    assert shown in PAGE.read_text()
