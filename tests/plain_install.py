"""Install the plain wheel into an empty environment and route with it to an engine, as a router's user would.

Run as `python tests/plain_install.py WHEEL`; `tests/wheel_check.py` calls it with the wheel it has built. Needs a
package index. The engine is another process: `tests/bench/fake_vllm.py` in the environment of this one.
"""

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from homing.replica.demo import demo_model_path

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
#: What a plain installation may take. Measured: 337 MiB, 126 MiB; time depends on the machine and is only printed.
MOST_INSTALLED = 360 * MIB
MOST_RESIDENT = 140 * MIB
#: Packages of the extra, and what would come with them.
UNWANTED = ("torch", "ray", "numba", "triton", "llvmlite")
CHAT = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}], "max_tokens": 8}


def install(wheel: Path, folder: Path) -> Path:
    """An environment with the wheel and what it depends on, and nothing else, not even pip."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--constraint", str(ROOT / "constraints.txt"), str(wheel)], check=True)
    return python


def size(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def running(words: list[str], cwd: Path) -> Iterator[psutil.Popen]:
    process = psutil.Popen(words, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def ask(url: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.loads(response.read() or b"null")


def wait_for(url: str, process: psutil.Popen, seconds: float = 120) -> float:
    """Seconds until the URL answers 200."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        assert process.poll() is None, f"{process.args} ended with {process.returncode}"
        with contextlib.suppress(OSError):
            ask(url)
            return time.monotonic() - began
        time.sleep(0.05)
    raise SystemExit(f"no answer from {url} in {seconds} s")


def check_size(folder: Path) -> None:
    (packages,) = folder.glob("lib/python*/site-packages")
    found = [name for name in UNWANTED if (packages / name).exists()]
    assert not found, f"a plain installation has {found}"
    installed = size(folder)
    print(f"installed: {installed / MIB:.0f} MiB")
    assert installed <= MOST_INSTALLED


def check_route(python: Path, folder: Path) -> None:
    """Route to an engine over HTTP: the second of two equal chats must come from the cache."""
    engine_port, events, replay, port = free_ports(4)
    model, engine = str(demo_model_path()), f"http://127.0.0.1:{engine_port}"
    fake = [sys.executable, str(ROOT / "tests/bench/fake_vllm.py"), model, *map(str, (engine_port, events, replay))]
    state = ["--state-dir", str(folder / "state")]
    route = [str(python.parent / "homing"), "route", model, "--engine-url", engine, "--port", str(port), *state]
    with running(fake, ROOT) as process:
        wait_for(f"{engine}/v1/models", process)
        with running(route, folder) as router:
            url = f"http://127.0.0.1:{port}"
            ready_s = wait_for(f"{url}/ready", router)
            name = ask(f"{url}/v1/models")["data"][0]["id"]
            chats = [ask(f"{url}/v1/chat/completions", {"model": name, **CHAT}) for _ in range(2)]
            assert all(chat["choices"][0]["message"]["content"] for chat in chats), chats
            status = subprocess.run([python.parent / "homing", "status", *state], capture_output=True, text=True)
            assert status.returncode == 0, status.stderr
            resident = router.memory_info().rss
    print(f"routed two chats: ready in {ready_s:.1f} s, {resident / MIB:.0f} MiB resident")
    assert resident <= MOST_RESIDENT


def check_refusal(python: Path) -> None:
    done = subprocess.run([python.parent / "homing", "serve"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "homing: this needs the extra: pip install 'homing[serve]', or in a clone '.[serve]'\n",
    ), done


def check(wheel: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "env"
        python = install(wheel, folder)
        check_size(folder)
        check_refusal(python)
        check_route(python, folder)


if __name__ == "__main__":
    check(Path(sys.argv[1]))
