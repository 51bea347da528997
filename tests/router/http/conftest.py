"""Fixtures that serve a `Front` with a fake backend on a real socket."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI

import homing
from homing.replica.messages import ModelLimits
from homing.router.config import RouterSettings
from homing.router.http.app import App
from homing.router.http.front import Front, TextModels
from homing.router.http.protocol.server import HttpServer
from homing.router.metrics import RouterMetrics
from homing.router.replicas.membership import TextSource
from homing.router.server import RouterServer
from homing.router.tenants.api_keys import read_tenants
from homing.router.text.tokenizer import TextModel

from .fakes import FakeBackend, reply

DEMO = Path(homing.__file__).parent / "replica" / "demo" / "model"
ANSWER = "Once a fox met 🦊 an owl. The end."


@pytest.fixture(scope="session")
def text_model() -> Iterator[TextModel]:
    """The demo model's tokenizer and chat template, loaded once per session."""
    model = TextModel.load(DEMO, cache_bytes=1_000_000)
    yield model
    model.close()


class LoadedText(TextModels):
    """Returns the session's text model for every source and never closes it."""

    def __init__(self, model: TextModel) -> None:
        super().__init__(lambda _: model)
        self.model = model
        self.present = True

    async def get(self, source: TextSource) -> TextModel:
        return self.model

    def loaded(self, source: TextSource) -> bool:
        return self.present


@pytest.fixture
def limits(text_model: TextModel) -> ModelLimits:
    """A model with a context of 256 tokens, so that tests reach its limits easily."""
    return ModelLimits(name="demo", path=str(DEMO), vocab_size=4096, max_model_len=256, eos_token_ids=(4,))


@pytest.fixture
def answer_ids(text_model: TextModel) -> list[int]:
    """Token ids that the fake backend generates: the encoding of `ANSWER`."""
    return list(text_model.encode_now([ANSWER], special_tokens=False)[0])


@pytest.fixture
def backend(limits: ModelLimits, answer_ids: list[int]) -> Iterator[FakeBackend]:
    """A backend that answers every request with `ANSWER` and reports three cached prompt tokens."""
    fake = FakeBackend(limits, reply(answer_ids, cached=3))
    yield fake
    fake.check()


@pytest.fixture
def settings() -> RouterSettings:
    return RouterSettings(max_choices=8, max_body_bytes=64 * 1024, default_max_tokens=64, strict_fields=True)


@pytest.fixture
def front(settings: RouterSettings, backend: FakeBackend, text_model: TextModel) -> Front:
    tenants = read_tenants(settings.api_keys_file)
    return Front(settings, backend, RouterMetrics(), texts=LoadedText(text_model), tenants=tenants)


@asynccontextmanager
async def serving(front: Front) -> AsyncIterator[httpx.AsyncClient]:
    """Serve `front` on the loopback interface and yield a client for it."""
    server = HttpServer(App(front), front.settings, clock=front.monotonic)
    port = await server.start("127.0.0.1", 0)
    address = f"http://127.0.0.1:{port}"
    # Reading certificates takes 20 ms, and the environment one.
    async with httpx.AsyncClient(base_url=address, verify=False, trust_env=False) as http:
        yield http
    await server.stop(1.0)
    if front.history is not None:
        front.history.close()


@pytest.fixture
async def client(front: Front) -> AsyncIterator[httpx.AsyncClient]:
    """A client connected to `front` over the loopback interface."""
    async with serving(front) as http:
        yield http


@dataclass
class Live:
    """A running server and its port."""

    port: int
    server: RouterServer


@pytest.fixture
async def live(settings: RouterSettings, backend: FakeBackend, text_model: TextModel) -> AsyncIterator[Live]:
    """The complete server on a free loopback port."""
    server = RouterServer(settings, backend, texts=LoadedText(text_model), grace_s=1.0)
    yield Live(await server.start("127.0.0.1", 0), server)
    await server.stop()


@pytest.fixture
async def openai_client(live: Live) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's own client, without retries."""
    address, http = f"http://127.0.0.1:{live.port}/v1", httpx.AsyncClient(verify=False)
    async with AsyncOpenAI(base_url=address, api_key="k1", max_retries=0, http_client=http) as client:
        yield client
