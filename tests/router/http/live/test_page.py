"""The live page: one file that nothing foreign can get into, and a stream that only admins see."""

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
    """A front with the keys of an admin and of another tenant."""
    keys = [
        {"key_sha256": sha256(name.encode()).hexdigest(), "tenant": name, "admin": name == "admin"}
        for name in ("admin", "other")
    ]
    front.tenants = tenants_of({"keys": keys})
    return front


async def test_the_page_is_served_to_everybody_and_lets_nothing_else_in(keyed: Front):
    """It holds nothing, so it can ask for the key itself; its policy admits its own script and style only."""
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
    """It works offline, and what clients send cannot become markup."""
    text = FILE.read_text()

    assert re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?(?!data:,)\w", text) == []
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text) == []
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text)
    assert len(re.findall("<script", text)) == len(re.findall("<style", text)) == 1


@pytest.mark.parametrize(("key", "status"), [("", 401), ("wrong", 401), ("other", 403)])
async def test_only_admins_see_the_stream(keyed: Front, key: str, status: int):
    """It shows when every tenant sends how much."""
    async with serving(keyed) as client:
        response = await client.get("/live", headers={"authorization": f"Bearer {key}"} if key else {})

    assert response.status_code == status
    assert response.json()["error"]["message"]


async def test_an_admin_sees_the_cluster_and_no_prompt(keyed: Front, backend: FakeBackend):
    """Hashes, lengths and counts; what was sent stays between a tenant and the replicas."""
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
    """As everywhere else: whoever reaches the port of such a server may do everything."""
    backend.limits = None

    async with client.stream("GET", "/live") as response:
        first = json.loads((await anext(response.aiter_lines()))[6:])

    assert [name for name in first["set"] if name.startswith(("replica", "model"))] == []


async def test_a_head_request_ends(client: httpx.AsyncClient):
    """Monitors send them."""
    response = await client.head("/live")

    assert (response.status_code, response.content) == (200, b"")
