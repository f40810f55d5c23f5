"""OpenTelemetry spans of requests that are over: a span per HTTP request, below it what its sequences went through.

Nothing happens while a request runs: the spans are made of the times in its traces once all of it has ended, and are
exported by a thread of the SDK, which gives up what a collector does not take.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from phasewise.errors import UserError
from phasewise.version import __version__

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.sdk.trace.export import SpanExporter

    from phasewise.serve.guard.context import RequestContext
    from phasewise.serve.loop import OutputStream

OPERATIONS = {
    "/v1/completions": "text_completion", "/v1/chat/completions": "chat", "/v1/messages": "chat",
    "/v1/responses": "chat", "/v1/embeddings": "embeddings",
}  # fmt: skip  # as the GenAI semantic conventions call them
UNTOLD = ("/health", "/health/live", "/health/ready", "/metrics", "/events")  # of whoever watches, all the time
SECONDS = 5.0  # that a collector has to take a batch
LAST_WORDS = 2.0  # seconds that the last batch has when the server ends
PARENT = (b"traceparent", b"tracestate")


def exporter(endpoint: str) -> SpanExporter:
    """OTLP over HTTP, to a collector's address. Raises UserError."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"--otel {endpoint}: give a collector's URL, as in http://localhost:4318")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise UserError(f"traces need the extra ({error}): pip install 'phasewise[otel]'") from error
    whole = endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
    return OTLPSpanExporter(whole, timeout=SECONDS)


class Tracer:
    """Makes spans of exchanges that have ended, and hands them to a processor (None: batches, for the exporter)."""

    def __init__(self, out: SpanExporter, processor: SpanProcessor | None = None) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": "phasewise", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor or BatchSpanProcessor(out))
        self._tracer = self._provider.get_tracer("phasewise", __version__)
        self._parents = TraceContextTextMapPropagator()
        self._epoch = time.time_ns() - time.monotonic_ns()

    def ended(self, exchange: RequestContext) -> None:
        """All of a request is over."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        if exchange.path in UNTOLD:
            return
        operation = OPERATIONS.get(exchange.path)
        name = f"{operation} {exchange.model}" if operation and exchange.model else exchange.method
        parent = self._parents.extract({name.decode(): value.decode("latin-1") for name, value in exchange.parent})
        span = self._tracer.start_span(
            name, parent, SpanKind.SERVER, _said_of(exchange, operation), start_time=self._at(exchange.began)
        )
        if exchange.error is not None or (exchange.status or 500) >= 500:
            span.set_attribute("error.type", exchange.error or str(exchange.status))
            if (exchange.status or 500) >= 500:
                span.set_status(Status(StatusCode.ERROR))
        below = set_span_in_context(span)
        for number, feed in enumerate(exchange.feeds or ()):
            self._stages(number, feed, below)
        span.end(self._at(time.monotonic()))

    def _stages(self, number: int, feed: OutputStream, below: Context) -> None:
        """The stages of one sequence, as far as it came."""
        trace = feed.trace
        assert trace is not None and trace.left is not None
        first = trace.tokens[0] if trace.tokens else trace.left
        stages: list[tuple[str, float, float, dict[str, Any]]] = [
            ("queue", feed.arrived, trace.left if trace.admitted is None else trace.admitted, {})
        ]
        if trace.admitted is not None:
            prompt = {"gen_ai.usage.input_tokens": feed.request.prompt_len}
            stages.append(("prefill", trace.admitted, first, prompt))
        if trace.handoff is not None:
            assert trace.sent is not None and trace.owned is not None
            stages.append(("hand-off", trace.sent, trace.owned, {}))
        if trace.tokens:
            stages.append(("decode", first, trace.left, {"gen_ai.usage.output_tokens": sum(trace.counts)}))
        for name, start, end, said in stages:
            said = {"phasewise.sequence": number, **said}
            span = self._tracer.start_span(name, below, attributes=said, start_time=self._at(start))
            span.end(self._at(max(start, end)))

    def close(self) -> None:
        """Exports what is left, if an exporter takes it."""
        ending = threading.Thread(target=self._provider.shutdown, name="last traces", daemon=True)
        ending.start()
        ending.join(LAST_WORDS)

    def _at(self, seconds: float) -> int:
        """Nanoseconds since the epoch, of a time by the engine's clock."""
        return int(seconds * 1e9) + self._epoch


def _said_of(exchange: RequestContext, operation: str | None) -> dict[str, Any]:
    """Attributes, as the semantic conventions of HTTP and GenAI call them; those that are not known are left out."""
    said: Mapping[str, Any] = {
        "http.request.method": exchange.method,
        "url.path": exchange.path,
        "http.response.status_code": exchange.status,
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "phasewise" if operation else None,
        "gen_ai.request.model": exchange.model,
        "gen_ai.usage.input_tokens": exchange.prompt_tokens if operation else None,
        "gen_ai.usage.output_tokens": exchange.output_tokens if operation else None,
        "gen_ai.response.finish_reasons": tuple(exchange.ways.elements()) or None,
        "phasewise.request.id": exchange.id,
        "phasewise.key": exchange.quota.key.name if exchange.quota is not None else None,
    }
    return {name: value for name, value in said.items() if value is not None}
