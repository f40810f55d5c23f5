"""OpenTelemetry: a span per request, made when it is over; the client's trace goes on; no collector hurts nobody."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from phasewise.errors import UserError
from phasewise.llm import LLM
from phasewise.serve.app import create_app
from phasewise.serve.watch.traces import Tracer, exporter
from tests.serve.running import PATIENCE, Server
from tests.serve.tiny_chat import chat_checkpoint

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
THE: dict[str, Any] = {"prompt": "the fox", "max_tokens": 6, "ignore_eos": True, "temperature": 0}


def traced(*asked: tuple[str, str, dict[str, Any] | None, dict[str, str]], **verbs: str) -> list[ReadableSpan]:
    """The spans of these requests (method, path, body, headers), one after the other."""
    out = InMemorySpanExporter()
    llm = LLM(str(chat_checkpoint()), **verbs)
    app = create_app(llm, name="tiny", tracer=Tracer(out, SimpleSpanProcessor(out)))

    async def run() -> None:
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=PATIENCE) as client:
                for method, path, body, headers in asked:
                    await client.request(method, path, json=body, headers=headers)

    try:
        asyncio.run(run())
    finally:
        llm.close()
    return list(out.get_finished_spans())


def by_name(spans: list[ReadableSpan]) -> dict[str, ReadableSpan]:
    found = {span.name: span for span in spans}
    assert len(found) == len(spans)
    return found


def test_a_request_and_what_it_went_through() -> None:
    spans = by_name(traced(("POST", "/v1/completions", THE, {"x-request-id": "mine"})))
    assert spans.keys() == {"text_completion tiny", "queue", "prefill", "decode"}
    root = spans["text_completion tiny"]
    said = dict(root.attributes or {})
    assert said["gen_ai.request.model"] == "tiny" and said["gen_ai.operation.name"] == "text_completion"
    assert said["gen_ai.usage.output_tokens"] == 6 and said["gen_ai.usage.input_tokens"] == 2
    assert said["gen_ai.response.finish_reasons"] == ("length",) and said["http.response.status_code"] == 200
    assert said["phasewise.request.id"] == "mine" and root.parent is None and "the fox" not in str(said)
    stages = [spans[name] for name in ("queue", "prefill", "decode")]
    times = [(stage.start_time or 0, stage.end_time or 0) for stage in stages]
    assert all(start <= end for start, end in times) and times[0][1] == times[1][0] and times[1][1] == times[2][0]
    assert (root.start_time or 0) <= times[0][0] and times[-1][1] <= (root.end_time or 0)
    for stage in stages:
        assert stage.parent is not None and root.context is not None
        assert stage.parent.span_id == root.context.span_id


def test_the_clients_trace_goes_on() -> None:
    sampled, not_sampled = (f"00-{TRACE}-{SPAN}-{flag}" for flag in ("01", "00"))
    spans = traced(
        ("POST", "/v1/completions", THE, {"traceparent": sampled}),
        ("POST", "/v1/completions", THE, {"traceparent": not_sampled}),
        ("POST", "/v1/completions", {"prompt": 5}, {"traceparent": "00-nonsense"}),
        ("GET", "/metrics", None, {}),
        ("GET", "/v1/models", None, {}),
    )
    ours = [span for span in spans if span.context is not None and f"{span.context.trace_id:032x}" == TRACE]
    (root,) = [span for span in ours if span.name == "text_completion tiny"]
    assert len(ours) == 4 and root.parent is not None and f"{root.parent.span_id:016x}" == SPAN
    bad, models = [span for span in spans if span not in ours]
    assert bad.parent is None and dict(bad.attributes or {})["http.response.status_code"] == 400
    assert "error.type" in (bad.attributes or {}) and dict(models.attributes or {})["url.path"] == "/v1/models"


def test_samples_and_hand_offs() -> None:
    spans = traced(("POST", "/v1/completions", {**THE, "n": 2, "max_tokens": 20}, {}), place="disaggregated")
    names = [span.name for span in spans]
    assert names.count("hand-off") == names.count("decode") == names.count("prefill") == 2
    for span in spans:
        if span.name == "hand-off":
            assert (span.start_time or 0) <= (span.end_time or 0)
    assert {dict(span.attributes or {}).get("phasewise.sequence") for span in spans} == {None, 0, 1}


@contextmanager
def collector() -> Iterator[tuple[str, list[tuple[str, Any]], threading.Event]]:
    """Its address, what it was sent, and whether there is anything."""
    got: list[tuple[str, Any]] = []
    there = threading.Event()

    class Stub(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()
            there.set()

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Stub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", got, there
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_collector_gets_them() -> None:
    with collector() as (url, got, there), Server(otel=url) as server:
        assert server.post("/v1/completions", THE).status_code == 200
        code, errors = server.end(signal.SIGTERM)  # the last batch is sent at the end
        assert (code, errors) == (0, "") and there.wait(PATIENCE)
        path, told = got[0]
        (resource,) = told.resource_spans
        names = [span.name for scope in resource.scope_spans for span in scope.spans]
        assert path == "/v1/traces" and sorted(names) == ["decode", "prefill", "queue", "text_completion tiny"]
        assert {"phasewise"} == {a.value.string_value for a in resource.resource.attributes if a.key == "service.name"}


def test_a_dead_collector_hurts_nobody() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        with Server(otel=f"http://127.0.0.1:{taken.getsockname()[1]}") as server:
            for _ in range(20):
                assert server.post("/v1/completions", THE).status_code == 200
            assert server.settled()["phasewise_kv_live_bytes"] == 0
            assert server.end(signal.SIGTERM)[0] == 0


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://x", "http://"])
def test_an_endpoint_that_is_none(endpoint: str) -> None:
    with pytest.raises(UserError, match="--otel"):
        exporter(endpoint)
