"""docs/tutorial.md, run in bash as a reader would: its helpers, its commands, and what they print."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .running import environment, serving

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tutorial.md").read_text()
START = re.compile(r'make serve ARGS="(.*)"')


def script() -> str:
    """Every helper and command of the page except the first one, which starts the cluster."""
    lines = []
    for kind, block in re.findall(r"```(bash|console)\n(.*?)```", PAGE, re.DOTALL):
        if kind == "bash" and not START.match(block):
            lines.append(block)
        if kind == "console":
            lines += [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]
    return "\n".join(lines).replace(".venv/bin/homing", f"{sys.executable} -P -m homing.cluster.cli.main")


@pytest.mark.cluster
@pytest.mark.slow
def test_the_tutorial_shows_a_hit_loses_it_pins_it_and_survives_a_kill(tmp_path: Path) -> None:
    """It is the first hour of a newcomer, so each of its steps must do what the page says."""
    with serving(tmp_path, "--replicas", "2", *START.search(PAGE)[1].split()) as running:
        done = subprocess.run(
            ["bash", "-c", script()],
            cwd=tmp_path,
            env=environment(tmp_path) | {"URL": running.url, "NO_PROXY": "*"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    cold, hit, lost, pin, kept = (int(found) for found in re.findall(r"cached-tokens: (\d+)", done.stdout))
    assert (cold, lost < 16) == (0, True)
    assert f"x-homing-cached-tokens: {hit}\n" in PAGE
    assert hit == pin == kept == int(re.search(r"pinned-tokens: (\d+)", done.stdout)[1])
    (explained,) = re.findall(r"^\d+ tokens in \d+ full blocks", done.stdout, re.MULTILINE)
    assert explained in PAGE
    assert done.stdout.endswith("the same\n")
