"""OpenTelemetry: one span per POST request, sent to a collector over OTLP/HTTP.

A span continues the trace that the request's `traceparent` header names (W3C Trace Context) and has the phases of a
generation as attributes: seconds in the router's queue, from there to the first token, and of decoding. Names follow
OpenTelemetry's conventions where these have one (`http.*`, `gen_ai.*`). A thread of the SDK sends spans from a bounded
queue; if the collector is down, spans are lost but no requests. Needs the extra `homing[otel]`.
"""

import time
from typing import TYPE_CHECKING, Any

from ..errors import TracingUnavailable
from .protocol.exchange import Exchange, GenerationSummary

if TYPE_CHECKING:
    from opentelemetry.trace import Span

SERVER_ERRORS = 500
#: Time limit for sending one batch of spans, with retries; a stopping router waits for its last batch.
EXPORT_S = 2.0


class RequestSpans:
    """Starts and ends the spans of one router."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint`: URL of the collector's traces, such as http://127.0.0.1:4318/v1/traces.

        Raises TracingUnavailable.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise TracingUnavailable(error) from error
        self._provider = TracerProvider(resource=Resource.create({"service.name": "homing-router"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_S)))
        self._tracer = self._provider.get_tracer("homing.router")
        self._context = TraceContextTextMapPropagator()

    def begin(self, exchange: Exchange, route: str) -> None:
        """Start the span of an exchange, and set the `traceparent` that is passed on with its request.

        `route` names the span: unlike paths, routes are few.
        """
        from opentelemetry.trace import SpanKind, set_span_in_context

        request = exchange.request
        if request.method != "POST":
            return
        parent = self._context.extract(request.headers)
        span = self._tracer.start_span(f"POST {route}", parent, SpanKind.SERVER, start_time=time.time_ns())
        span.set_attribute("http.route", route)
        passed_on: dict[str, str] = {}
        self._context.inject(passed_on, set_span_in_context(span))
        exchange.span, exchange.traceparent = span, passed_on.get("traceparent", "")

    def end(self, exchange: Exchange, duration_s: float) -> None:
        from opentelemetry.trace import StatusCode

        span = exchange.span
        if span is None:
            return
        span.set_attribute("http.request.method", exchange.request.method)
        span.set_attribute("url.path", exchange.request.path)
        span.set_attribute("http.response.status_code", exchange.status or 0)
        span.set_attribute("homing.request_id", exchange.id)
        if (exchange.status or 0) >= SERVER_ERRORS:
            span.set_status(StatusCode.ERROR)
        if exchange.summary is not None:
            _describe(span, exchange.summary, duration_s)
        span.end()

    def close(self) -> None:
        """Send the remaining spans; takes up to EXPORT_S."""
        self._provider.shutdown()


def _describe(span: "Span", summary: GenerationSummary, duration_s: float) -> None:
    fields: dict[str, Any] = {
        "gen_ai.usage.input_tokens": summary.prompt_tokens,
        "gen_ai.usage.output_tokens": summary.output_tokens,
        "homing.replica": summary.replicas,
        "homing.tenant": summary.tenant,
        "homing.cached_tokens": summary.cached_tokens,
        "homing.predicted_cached_tokens": summary.predicted_tokens,
        "homing.queue_s": summary.queue_s,
    }
    if summary.ttft_s is not None:
        spent = summary.phases(duration_s)
        fields |= {f"homing.{name}": spent.get(name) for name in ("wait_s", "prefill_s", "decode_s")}
    for name, value in fields.items():
        if value is not None:
            span.set_attribute(name, value)
