"""docs/analyze.md shows what the command really prints."""

import re
import subprocess
import sys
from pathlib import Path

import homing

PAGE = Path(homing.__file__).parent / "docs" / "analyze.md"
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
