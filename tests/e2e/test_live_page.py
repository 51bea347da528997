"""The live page in a real browser: its view of a cluster, its API key form, and its state while disconnected."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import httpx
import pytest
import yaml

from homing.router.config import RouterSettings
from homing.router.server import RouterServer

from ..router.http.fakes import FakeBackend
from .browser import NAMES, Tab, browsing, installed
from .running import LONG_PROMPTS, Serving

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(installed() is None, reason=f"needs a browser: none of {', '.join(NAMES)} is on the PATH"),
]

#: A hostile client's request id, which would run a script if the page rendered it as HTML.
HOSTILE = "<img/src=x/onerror=document.title='broken'>"
STATUS = "document.getElementById('status').textContent"


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    """One browser for all tests of this file."""
    with browsing() as opened:
        yield opened


def text(part: str) -> str:
    return f"document.getElementById('{part}').textContent"


def test_the_page_shows_what_the_cluster_does(cluster: Serving, tab: Tab) -> None:
    """Replicas, prefixes, decisions and evictions are shown; client input stays text; no horizontal scrolling."""
    body = {"prompt": LONG_PROMPTS[9], "max_tokens": 4}
    for _ in range(2):
        cluster.http.post(f"{cluster.url}/v1/completions", json=body, headers={"x-request-id": HOSTILE})
    tab.console.clear()
    tab.look(width=400)
    tab.open(f"{cluster.url}/")

    tab.until(f"document.readyState === 'complete' && {text('replicas')}.includes('serving · events live')")
    tab.until(f"{text('decisions')}.includes('finished')")
    assert HOSTILE in tab.ask(text("decisions"))
    assert "requests" in tab.ask(text("tree"))
    cluster.http.post(f"{cluster.url}/v1/completions", content=b"{")
    tab.until(f"/400: \\d+ .*of \\d+ responses$/.test({text('responses')})")
    assert "200:" not in tab.ask(text("responses"))
    tab.until(f"/[0-9a-f]{{12}}/.test({text('evictions')})")
    assert tab.ask("document.querySelectorAll('.replica').length") == 2
    assert tab.ask(text("about")).count(cluster.cluster()["router_id"]) == 1
    assert tab.ask("document.images.length") == 0
    assert tab.ask("document.documentElement.scrollWidth <= innerWidth")
    tab.ask("document.getElementById('prompt').value = 'Hi'; document.getElementById('ask').requestSubmit()")
    tab.until(f"{text('went')}.includes('prompt tokens from the cache')")
    assert tab.ask(text("answer"))
    tab.ask("document.querySelector('#went button').click()")
    tab.until(f"{text('record-text')}.includes('decisions')")
    assert tab.ask("document.querySelectorAll('#charts svg').length") == 4
    assert tab.console == []
    tab.open("about:blank")


@contextmanager
def router(keys: Path, port: int = 0) -> Iterator[int]:
    """Run a router without replicas in its own thread; yields its port."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    settings = RouterSettings(api_keys_file=str(keys), access_log="")
    server = RouterServer(settings, FakeBackend(None, lambda _: ()), grace_s=60.0)
    try:
        yield asyncio.run_coroutine_threadsafe(server.start("127.0.0.1", port), loop).result()
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def enter(tab: Tab, key: str) -> None:
    tab.ask(f"document.getElementById('secret').value = '{key}'; document.getElementById('key').requestSubmit()")


def test_the_page_asks_for_a_key_and_comes_back_after_a_restart(tab: Tab, tmp_path: Path) -> None:
    """A wrong key is refused with a message; with the right one the page reconnects after its router restarts."""
    keys = tmp_path / "keys.yaml"
    entry = {"key_sha256": sha256(b"right").hexdigest(), "tenant": "operator", "admin": True}
    keys.write_text(yaml.safe_dump({"keys": [entry]}))
    with router(keys) as port:
        tab.open(f"http://127.0.0.1:{port}/")
        tab.until("document.readyState === 'complete' && !document.getElementById('key').hidden")
        enter(tab, "wrong")
        tab.until(f"{text('refused')} === 'this API key is unknown'")
        enter(tab, "right")
        tab.until(f"{STATUS} === 'live'")
        assert tab.ask(text("replicas")) == "No replicas yet."

    tab.until(f"/trying again in \\d+ s/.test({STATUS})")
    assert tab.ask("document.getElementById('main').className") == "stale"

    with router(keys, port):
        tab.until(f"{STATUS}.startsWith('live')")
        assert tab.ask("document.getElementById('main').className") == ""
        tab.open("about:blank")
        assert httpx.get(f"http://127.0.0.1:{port}/live", verify=False).status_code == 401
