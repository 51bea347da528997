"""Build the wheel, install it into a new environment and use it there, so that CI tests what it ships.

Run as `python tests/wheel_check.py`. First with the packages of the running environment, through a .pth file, which
needs no index; then `plain_install.py` installs it alone and routes to an engine.
"""

import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

USE = """
import json, pathlib, homing
from homing.kvcache.hashing import BlockHasher
from homing.replica.demo import demo_model_path
at = pathlib.Path(homing.__file__).parent
assert "site-packages" in str(at), at
assert (at / "py.typed").is_file()
assert json.loads((demo_model_path() / "config.json").read_text())["model_type"] == "llama"
assert (demo_model_path() / "model.safetensors").stat().st_size > 1_000_000
assert (at / "router/http/live/page.html").is_file()
print("homing", homing.__version__, "used from its wheel")
"""


def run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def run_and_show(*command: str | Path) -> None:
    """Run a command that prints what it measures."""
    code = subprocess.run([str(part) for part in command], check=False).returncode
    if code:
        sys.exit(code)


def build(into: Path) -> Path:
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", into, ROOT)
    return next(into.glob("homing-*.whl"))


def check_contents(wheel: Path) -> None:
    """Check that the wheel installs only `homing/` and its metadata, without tests and docs."""
    names = zipfile.ZipFile(wheel).namelist()
    strays = [name for name in names if not name.startswith(("homing/", "homing-"))]
    unwanted = [name for name in names if "/tests/" in name or "/docs/" in name]
    assert not strays, strays
    assert not unwanted, unwanted
    print(f"{wheel.name}: {len(names)} files, {wheel.stat().st_size / 1e6:.1f} MB")


def use(wheel: Path, folder: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    target = run(folder / "bin/python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, wheel)
    (Path(target) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    print(run(folder / "bin/python", "-I", "-c", USE, cwd=folder).strip())
    print(run(folder / "bin/python", "-I", "-m", "homing.cluster.cli.main", "--help", cwd=folder).splitlines()[0])


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        wheel = build(Path(scratch))
        check_contents(wheel)
        use(wheel, Path(scratch) / "env")
        run_and_show(sys.executable, ROOT / "tests/plain_install.py", wheel)


if __name__ == "__main__":
    main()
