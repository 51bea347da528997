"""Several models behind one front: a request's model name selects the tokenizer, limits and replicas."""

from collections.abc import Iterator
from hashlib import sha256

import httpx
import msgspec
import pytest

from homing.replica.messages import ModelLimits
from homing.router.backend import ClusterView
from homing.router.config import RouterSettings
from homing.router.errors import InvalidRequest, ModelNotFound
from homing.router.http.front import Front
from homing.router.metrics import RouterMetrics
from homing.router.replicas.membership import TextSource
from homing.router.tenants.api_keys import tenants_of
from homing.router.text.tokenizer import TextModel

from .conftest import LoadedText, serving
from .fakes import FakeBackend, reply, total_view

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


class FakeModels:
    """A backend that holds one `FakeBackend` per model."""

    def __init__(self, *backends: FakeBackend) -> None:
        self.by_name = {backend.limits.name: backend for backend in backends if backend.limits is not None}

    def choose(self, model: str | None) -> FakeBackend:
        if model is None:
            raise InvalidRequest("field 'model': say which", param="model")
        if model not in self.by_name:
            raise ModelNotFound(model, self.by_name)
        return self.by_name[model]

    def models(self) -> list[ModelLimits]:
        return [limits for backend in self.by_name.values() for limits in backend.models()]

    def texts(self) -> list[TextSource]:
        return [source for backend in self.by_name.values() for source in backend.texts()]

    def exact(self) -> bool:
        return True

    def view(self) -> ClusterView:
        return total_view([backend.view() for backend in self.by_name.values()])

    async def view_in_slices(self) -> ClusterView:
        return self.view()

    def tenant_blocks(self) -> dict[str, dict[bytes, int]]:
        return {}

    def end_requests(self) -> None:
        for backend in self.by_name.values():
            backend.end_requests()

    async def reset_caches(self, model: str | None = None) -> list[str]:
        return [model or "all"]


@pytest.fixture
def owl(limits: ModelLimits, answer_ids: list[int]) -> Iterator[FakeBackend]:
    """A model with a shorter context and a shorter answer."""
    fake = FakeBackend(msgspec.structs.replace(limits, name="org/owl", max_model_len=64), reply(answer_ids[:2]))
    yield fake
    fake.check()


@pytest.fixture
def front(settings: RouterSettings, backend: FakeBackend, owl: FakeBackend, text_model: TextModel) -> Front:
    return Front(settings, FakeModels(backend, owl), RouterMetrics(), texts=LoadedText(text_model))


async def test_all_models_are_listed_and_each_is_found(client: httpx.AsyncClient) -> None:
    """Hugging Face model names contain a slash, which is part of the path."""
    listed = (await client.get("/v1/models")).json()["data"]
    found = (await client.get("/v1/models/org/owl")).json()

    assert [(card["id"], card["max_model_len"]) for card in listed] == [("demo", 256), ("org/owl", 64)]
    assert found == listed[1]


async def test_a_requests_model_says_who_answers(
    client: httpx.AsyncClient, backend: FakeBackend, owl: FakeBackend
) -> None:
    """The named model's limits and replicas apply, and the response carries its name."""
    for name in ("demo", "org/owl"):
        for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", CHAT)):
            answer = await client.post(path, json={**body, "model": name})
            assert answer.json()["model"] == name
    explained = await client.post("/explain", json={"prompt": "x", "model": "org/owl"})
    tokenized = await client.post("/tokenize", json={"prompt": "x", "model": "org/owl"})

    assert (len(backend.requests), len(owl.requests)) == (2, 2)
    assert explained.status_code == 200
    assert tokenized.json()["max_model_len"] == 64


async def test_a_wrong_name_is_told_what_there_is(client: httpx.AsyncClient) -> None:
    """The 404 has OpenAI's format and lists the served models."""
    answer = await client.post("/v1/chat/completions", json={**CHAT, "model": "fox"})

    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert error["message"] == "model 'fox' does not exist; served models: 'demo', 'org/owl'"


async def test_without_a_name_nobody_guesses(client: httpx.AsyncClient) -> None:
    """An answer from the wrong model is worse than an error."""
    answer = await client.post("/v1/completions", json={"prompt": "x"})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")


async def test_one_model_without_replicas_leaves_the_server_ready(
    client: httpx.AsyncClient, backend: FakeBackend, owl: FakeBackend
) -> None:
    """If a load balancer removed the server, the outage of one model would become an outage of both."""
    owl.state = "silent"
    one = await client.get("/ready")
    backend.state = "silent"
    none = await client.get("/ready")

    assert one.json() == {"status": "ready", "replicas": 1, "models": {"demo": 1, "org/owl": 0}}
    assert none.status_code == 503


async def test_caches_are_reset_by_model(client: httpx.AsyncClient) -> None:
    """A benchmark of one model must not clear the caches of the other."""
    some = await client.post("/reset_prefix_cache", json={"model": "org/owl"})
    every = await client.post("/reset_prefix_cache")
    wrong = await client.post("/reset_prefix_cache", json={"modle": "org/owl"})

    assert (some.json()["replicas"], every.json()["replicas"]) == (["org/owl"], ["all"])
    assert (wrong.status_code, "modle" in wrong.json()["error"]["message"]) == (400, True)


async def test_metrics_tell_models_apart(client: httpx.AsyncClient) -> None:
    """A mean over the latencies of a small and a large model says nothing."""
    await client.post("/v1/completions", json={"prompt": "x", "model": "org/owl"})

    page = (await client.get("/metrics")).text
    assert 'homing_time_to_first_token_seconds_count{model="org/owl"} 1.0' in page
    assert 'homing_completion_tokens_total{model="org/owl"} 2.0' in page


async def test_a_tenants_limits_hold_over_all_models(
    settings: RouterSettings, backend: FakeBackend, owl: FakeBackend, text_model: TextModel
) -> None:
    """A tenant must not get its limits once per model."""
    key = {"key_sha256": sha256(b"key").hexdigest(), "tenant": "acme"}
    tenants = tenants_of({"keys": [key], "tenants": {"acme": {"requests_per_minute": 2}}})
    front = Front(settings, FakeModels(backend, owl), RouterMetrics(), texts=LoadedText(text_model), tenants=tenants)

    async with serving(front) as client:
        for name, status in (("demo", 200), ("org/owl", 200), ("demo", 429), ("org/owl", 429)):
            body = {"prompt": "x", "model": name}
            answer = await client.post("/v1/completions", json=body, headers={"authorization": "Bearer key"})
            assert answer.status_code == status
