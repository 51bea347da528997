"""What `pip install homing` gives works without the packages of `homing[serve]`.

`tests/wheel_check.py` does the same with the wheel in an empty environment; here the packages are hidden, in seconds.
"""

import subprocess
import sys

import pytest

from homing.cluster.cli.main import NAMES
from homing.cluster.host import SERVE_PACKAGES

#: Runs `homing` with arguments of the command line, and with the packages of the extra hidden.
WITHOUT = f"""
import sys
from importlib.abc import MetaPathFinder

class Hidden(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {(*SERVE_PACKAGES, "triton", "llvmlite", "flash_attn")}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in {SERVE_PACKAGES} else found(name, *rest)
"""
#: Modules that a plain installation runs, beside the commands.
USED = (
    "homing.events homing.events.sdk homing.router.server homing.router.replicas.service homing.router.text.tokenizer "
    "homing.cluster.control.engines homing.cluster.lab.simulate.command homing.cluster.lab.analyze.command"
).split()


def without(code: str, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", WITHOUT + code, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_every_command_loads_without_the_extra() -> None:
    """A router's user has 350 MB, not 4 GB: an import at the top of a shared module would end that."""
    code = f"""
from importlib import import_module
from homing.cluster.cli.main import NAMES, parse
for module in {USED}:
    import_module(module)
for name in NAMES:
    try:
        parse([name, *({{"keys": ["d"], "scale": ["2"], "drain": ["r"], "analyze": ["f"]}}.get(name, []))])
    except Exception as error:
        sys.exit(f"{{name}}: {{error!r}}")
"""
    done = without(code)

    assert done.returncode == 0, done.stderr
    assert NAMES


@pytest.mark.parametrize("words", ["serve", "serve --detach", "route --engines ray://h:1/l"])
def test_what_needs_the_extra_names_it_in_one_line(words: str) -> None:
    """Without it, the first sign was a traceback after Ray's start."""
    done = without("from homing.cluster.cli.main import main; sys.exit(main())", *words.split())

    assert (done.returncode, done.stderr) == (
        2,
        "homing: this needs the extra: pip install 'homing[serve]', or in a clone '.[serve]'\n",
    )
    assert not done.stdout
