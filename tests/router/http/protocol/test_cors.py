"""CORS: pages of the configured origins may call the server, others may not, and no further headers are sent."""

import httpx
import msgspec
import pytest

from homing.router.http.front import Front
from homing.router.http.protocol.cors import CorsPolicy
from homing.router.http.protocol.exchange import Request

from ..conftest import serving
from ..fakes import FakeBackend

PAGE, OTHER = "https://a.example", "https://b.example"
ASKS = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}


def request(method: str = "GET", **headers: str) -> Request:
    return Request(
        method, "/", {name.replace("_", "-"): value for name, value in headers.items()}, b"", keep_alive=True
    )


def test_without_the_setting_there_is_no_policy():
    """Servers behind a gateway leave CORS to the gateway."""
    assert CorsPolicy.of("") is None
    assert CorsPolicy.of(" , ") is None


@pytest.mark.parametrize(("setting", "shown"), [(f"{PAGE}/, {OTHER}", PAGE), ("*", "*")])
def test_a_named_origin_may_read_answers(setting: str, shown: str):
    """The header names the origin itself or `*`; a trailing slash in the setting is not part of an origin."""
    policy = CorsPolicy.of(setting)
    assert policy is not None

    assert dict(policy.headers(request(origin=PAGE)))["access-control-allow-origin"] == shown


def test_other_origins_are_told_nothing_and_caches_are_warned():
    """`vary` keeps caches from serving one origin's response to another."""
    policy = CorsPolicy.of(PAGE)
    assert policy is not None

    assert dict(policy.headers(request(origin=OTHER))) == {"vary": "origin"}
    assert dict(policy.headers(request())) == {"vary": "origin"}


async def test_a_preflight_is_answered_before_any_endpoint(front: Front, backend: FakeBackend):
    """Browsers send preflight requests without an API key."""
    front.settings = msgspec.structs.replace(front.settings, cors_origins=PAGE)
    async with serving(front) as client:
        response = await client.options("/v1/chat/completions", headers=ASKS)
        plain = await client.get("/health", headers={"origin": PAGE})

    assert response.status_code == 204
    assert "content-length" not in response.headers, "RFC 9110, 8.6"
    assert response.headers["access-control-allow-origin"] == PAGE
    assert response.headers["access-control-allow-headers"] == "authorization"
    assert "POST" in response.headers["access-control-allow-methods"]
    assert plain.headers["access-control-allow-origin"] == PAGE
    assert "x-request-id" in plain.headers["access-control-expose-headers"]


async def test_without_the_setting_a_preflight_is_a_wrong_method(client: httpx.AsyncClient, backend: FakeBackend):
    """It gets a 405 like any other unsupported method."""
    assert (await client.options("/v1/chat/completions", headers=ASKS)).status_code == 405
