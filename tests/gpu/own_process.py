"""Runs a script of this folder in its own process, because nothing of what it replaces is undone."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_case(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"tests.gpu.{script}", *arguments]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
