"""Headless Chromium, driven over its DevTools protocol: opens pages, evaluates scripts, takes screenshots.

Run as a program to take a screenshot: `python -m tests.e2e.browser URL FILE [--width 1280] [--dark]`.
"""

import argparse
import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from .running import until

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions"),
    *("--disable-background-networking", "--no-first-run", "--hide-scrollbars", "--remote-debugging-port=0"),
)
#: A limit that only catches hangs.
PATIENCE_S = 120.0


def installed() -> str | None:
    """Path of the installed browser, or None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class BrowserError(Exception):
    """A DevTools command or a script failed. While a page loads, a retry may succeed."""


class Tab:
    """One tab of a running browser."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._session: str | None = None
        self.console: list[str] = []  #: the page's errors and warnings, including violations of its CSP
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        self._socket.send(json.dumps(message | ({"sessionId": self._session} if self._session else {})))
        while True:
            answer = json.loads(self._socket.recv(PATIENCE_S))
            if answer.get("id") == number:
                if "error" in answer:
                    raise BrowserError(answer["error"])
                return dict(answer["result"])
            if answer.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
                self.console.append(json.dumps(answer["params"]))

    def look(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Set the window's size and the preferred colour scheme."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def ask(self, script: str) -> Any:
        """Evaluate an expression in the page and return its value."""
        result = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise BrowserError(result["exceptionDetails"])
        return result["result"].get("value")

    def until(self, script: str, patience_s: float = PATIENCE_S) -> Any:
        """Poll the expression until its value is truthy, and return that value."""

        def ask() -> Any:
            with contextlib.suppress(BrowserError):
                return self.ask(f"({script}) || null")

        return until(ask, script, patience_s)

    def picture(self, *, whole: bool = True) -> bytes:
        """A PNG screenshot of the whole page, or only of the visible part."""
        return base64.b64decode(self._call("Page.captureScreenshot", captureBeyondViewport=whole)["data"])


@contextlib.contextmanager
def browsing() -> Iterator[Tab]:
    """Start a browser with one empty tab; it is closed when the block ends."""
    binary = installed()
    assert binary is not None, "no browser is installed"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        note = Path(folder, "DevToolsActivePort")
        command = [binary, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                port, path = until(
                    lambda: lines if note.exists() and len(lines := note.read_text().split()) == 2 else None,
                    "the browser listens",
                )
                with connect(f"ws://127.0.0.1:{port}{path}", max_size=None, proxy=None) as socket:
                    yield Tab(socket)
            finally:
                process.terminate()
                process.wait(PATIENCE_S)


def main() -> None:
    parser = argparse.ArgumentParser(description="take a screenshot of a page in headless Chromium")
    parser.add_argument("url")
    parser.add_argument("file", type=Path)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=900)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--whole", action="store_true", help="capture the whole page, not only the visible part")
    parser.add_argument("--seconds", type=float, default=5, help="how long to wait before the screenshot")
    given = parser.parse_args()
    with browsing() as tab:
        tab.look(width=given.width, height=given.height, dark=given.dark)
        tab.open(given.url)
        tab.ask(f"new Promise(resolve => setTimeout(resolve, {given.seconds * 1000}))")
        given.file.write_bytes(tab.picture(whole=given.whole))
        print(*tab.console, sep="\n")


if __name__ == "__main__":
    main()
