"""Spans as a collector receives them: over a real socket, encoded as OTLP protobuf."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import msgspec
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from homing.router.server import RouterServer

from .conftest import LoadedText

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """An HTTP collector that stores the spans it receives."""

    def __init__(self) -> None:
        self.spans: list[object] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                sent = ExportTraceServiceRequest.FromString(body)
                outer.spans += [
                    span for each in sent.resource_spans for scope in each.scope_spans for span in scope.spans
                ]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def attributes(span) -> dict[str, object]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


async def test_a_request_is_a_span_of_the_trace_that_it_came_with(collector, settings, backend, text_model) -> None:
    """The span has the phases, replica and cached tokens, and the backend's `traceparent` names it as the parent."""
    traced = msgspec.structs.replace(settings, otlp_endpoint=collector.url)
    server = RouterServer(traced, backend, texts=LoadedText(text_model), grace_s=1.0)
    port = await server.start("127.0.0.1", 0)
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        url, headers = f"http://127.0.0.1:{port}", {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        await client.post(f"{url}/v1/completions", json={"prompt": "A fox", "max_tokens": 3}, headers=headers)
        await client.post(f"{url}/v1/completions", json={"prompt": 5})
        await client.post(f"{url}/v1/models/of-one-client", json={})
        await client.post(f"{url}/nothing/of-one-client", json={})
        await client.get(f"{url}/health")
    (asked,) = backend.requests
    await server.stop()

    good, bad, *unknown = collector.spans
    fields = attributes(good)
    assert good.name == "POST /v1/completions"
    assert (good.trace_id.hex(), good.parent_span_id.hex()) == (TRACE, PARENT)
    assert asked.traceparent == f"00-{TRACE}-{good.span_id.hex()}-01"
    assert fields["homing.replica"] == "r0"
    assert fields["homing.cached_tokens"] == 3
    assert fields["gen_ai.usage.output_tokens"] > 0
    assert fields["http.response.status_code"] == 200
    assert fields["homing.prefill_s"] >= 0
    assert fields["homing.decode_s"] >= 0
    assert attributes(bad)["http.response.status_code"] == 400
    assert [span.name for span in unknown] == ["POST /v1/models/{model}", "POST other"], "names would be unbounded"
    assert bad.trace_id != good.trace_id


async def test_a_collector_that_is_gone_costs_no_request(collector, settings, backend, text_model) -> None:
    """Only the spans are lost."""
    collector.close()
    traced = msgspec.structs.replace(settings, otlp_endpoint=collector.url)
    server = RouterServer(traced, backend, texts=LoadedText(text_model), grace_s=1.0)
    port = await server.start("127.0.0.1", 0)
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        answer = await client.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "A fox"})
    await server.stop()

    assert answer.status_code == 200
