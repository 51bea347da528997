"""The live page: a self-contained file that is safe from injection, and a stream that only admins may read."""

import json
import re
from hashlib import sha256

import httpx
import pytest

from homing.router.http.front import Front
from homing.router.http.live.page import FILE
from homing.router.tenants.api_keys import tenants_of

from ..conftest import serving
from ..fakes import FakeBackend
from .situations import activity


@pytest.fixture
def keyed(front: Front) -> Front:
    """A front with two API keys: an admin's and another tenant's."""
    keys = [
        {"key_sha256": sha256(name.encode()).hexdigest(), "tenant": name, "admin": name == "admin"}
        for name in ("admin", "other")
    ]
    front.tenants = tenants_of({"keys": keys})
    return front


async def test_the_page_is_served_to_everybody_and_lets_nothing_else_in(keyed: Front):
    """The page holds no data and asks for the key itself; its policy allows only its own script and style."""
    async with serving(keyed) as client:
        response = await client.get("/")

    policy = dict(each.strip().split(" ", 1) for each in response.headers["content-security-policy"].split(";"))
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert policy["default-src"] == "'none'"
    assert policy["script-src"].startswith("'sha256-")
    assert policy["style-src"].startswith("'sha256-")
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in response.headers["content-security-policy"]


def test_the_page_needs_nothing_from_elsewhere_and_inserts_text_as_text() -> None:
    """The page works offline, and text sent by clients cannot become markup."""
    text = FILE.read_text()

    assert re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?(?!data:,)\w", text) == []
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text) == []
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text)
    assert len(re.findall("<script", text)) == len(re.findall("<style", text)) == 1
    assert len(text.encode()) <= 60 * 1024


def test_each_model_has_a_heading_of_its_own() -> None:
    """With two models, names in one line ran together. Headings of level 3 begin a line unless styled otherwise."""
    text = FILE.read_text()
    headings = re.findall(r'el\("(\w+)", \{[^}]*\}, (?:model|tree\.model)[,)]', text)
    styles = re.findall(r"(?:^|[\s,}])h3[^{]*\{([^}]*)\}", text)

    assert headings == ["h3", "h3"]
    assert styles
    assert not [style for style in styles if re.search(r"display|float|position", style)]


@pytest.mark.parametrize(("key", "status"), [("", 401), ("wrong", 401), ("other", 403)])
async def test_only_admins_see_the_stream(keyed: Front, key: str, status: int):
    """The stream shows every tenant's traffic."""
    async with serving(keyed) as client:
        response = await client.get("/live", headers={"authorization": f"Bearer {key}"} if key else {})

    assert response.status_code == status
    assert response.json()["error"]["message"]


async def test_an_admin_sees_the_cluster_and_no_prompt(keyed: Front, backend: FakeBackend):
    """The stream has only hashes, lengths and counts; it must not disclose prompts."""
    backend.activities = [activity()]
    async with serving(keyed) as client:
        await client.post(
            "/v1/completions", json={"prompt": "the secret fox"}, headers={"authorization": "Bearer other"}
        )
        async with client.stream("GET", "/live", headers={"authorization": "Bearer admin"}) as response:
            first = await anext(response.aiter_lines())

    assert json.loads(first[6:])["set"]["router"]["id"] == "fake"
    assert "secret" not in first
    assert "fox" not in first


async def test_without_keys_everybody_is_an_admin_and_a_cluster_without_replicas_is_shown(
    client: httpx.AsyncClient, backend: FakeBackend
):
    """Without keys, every client of any endpoint has all rights."""
    backend.limits = None

    async with client.stream("GET", "/live") as response:
        first = json.loads((await anext(response.aiter_lines()))[6:])

    assert [name for name in first["set"] if name.startswith(("replica", "model"))] == []


async def test_a_head_request_ends(client: httpx.AsyncClient):
    """Monitoring tools send HEAD requests, which must not start an endless stream."""
    response = await client.head("/live")

    assert (response.status_code, response.content) == (200, b"")
