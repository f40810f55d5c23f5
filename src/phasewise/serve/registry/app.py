"""Starting the server of many models: `run_models`."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from phasewise import __version__
from phasewise.errors import PhasewiseError, UserError
from phasewise.serve import app as one
from phasewise.serve.batches.endpoint import add_batches
from phasewise.serve.described import POSTED, answers, asks, describe, error_of
from phasewise.serve.guard.gate import OPEN
from phasewise.serve.guard.keys import KeyRing
from phasewise.serve.guard.policy import ServePolicy
from phasewise.serve.playground.files import add_to
from phasewise.serve.registry.front import POSTS, RegistryFront
from phasewise.serve.registry.registry import ModelRegistry
from phasewise.serve.registry.slot import ModelEntry
from phasewise.serve.reloader import Reloader
from phasewise.serve.responses.endpoint import Stored
from phasewise.serve.service import Service
from phasewise.serve.watch.events import ENDLESS, Events
from phasewise.serve.watch.traces import Tracer, exporter


def run_models(
    entries: Sequence[ModelEntry], *, limit: int, wait: float, host: str = "127.0.0.1", port: int = 8000,
    policy: ServePolicy = one.POLICY,
) -> None:  # fmt: skip
    """Serve models until SIGINT or SIGTERM, then return. `limit`: bytes of weights and KV of all loaded ones; `wait`:
    seconds for which a request waits for its model to be loaded. Raises UserError if the server cannot start."""
    if policy.kv_events is not None:
        raise UserError("--kv-events tells of one model's prefixes: leave it out where several are served")
    began = time.monotonic()
    with one.bound(host, port) as sock:
        one.impatient(sock, policy.write_timeout)
        one.check(policy)
        app = create_app(entries, limit, wait, policy)
        names = [entry.name for entry in entries]
        one.until_signal(app, sock, host, policy, lambda url: banner(names, url, time.monotonic() - began))


def create_app(entries: Sequence[ModelEntry], limit: int, wait: float, policy: ServePolicy = one.POLICY) -> FastAPI:
    """The ASGI application of a registry. Its lifespan loads what is to be there from the start, and unloads all."""

    def app_of(service: Service) -> Starlette:
        """The application of one model: its endpoints, behind the gate that all models share. It is not FastAPI's,
        which remembers every endpoint that it has ever seen, and with it the weights."""

        async def tokenizer_info(request: Request) -> Response:
            return await dict(service.gets)["/tokenizer_info"]()

        service.events = Events(service.engine, service.metrics.kv_limit, keys, policy.open_metrics)
        routes = [Route(path, endpoint, methods=["POST"]) for path, endpoint, _ in service.posts]
        handlers: dict[Any, Any] = dict.fromkeys((PhasewiseError, HTTPException), service.refuse)
        return Starlette(routes=[*routes, Route("/tokenizer_info", tokenizer_info)], exception_handlers=handlers)

    registry = ModelRegistry(entries, limit, app_of, Stored(policy.stored_bytes))
    front = RegistryFront(registry, wait)
    keys = None if policy.keys is None else KeyRing(policy.keys, registry.names)
    tracer = None if policy.otel is None else Tracer(exporter(policy.otel))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        registry.start()
        if batches is not None:
            batches.start()
        yield
        if batches is not None:
            await batches.stop()
        await registry.stop()
        if tracer is not None:
            tracer.close()

    app = FastAPI(title="phasewise", version=__version__, lifespan=lifespan)
    app.state.service, app.state.again = front, Reloader(None, keys, None)
    if keys is not None:
        front.metrics.registry.register(keys)
    one.guard(app, front, keys, policy, tracer)
    _add_routes(app, front)
    if (batches := add_batches(app, policy.batches, keys)) is not None:
        front.metrics.registry.register(batches)
    if policy.playground:
        add_to(app)
    describe(app)
    return app


def _add_routes(app: FastAPI, front: RegistryFront) -> None:
    """Adds the endpoints, each described with what it answers."""
    plain = Response  # a body that FastAPI does not describe
    health = answers() | {503: {**answers()[200], "description": "The server shuts down."}}
    for path in OPEN:
        app.add_api_route(path, front.health, responses=health, response_class=plain)
    app.add_api_route("/version", front.version, responses=answers(401), response_class=plain)
    text = answers(401, 403, kinds=("text/plain",))
    app.add_api_route("/metrics", front.show_metrics, responses=text, response_class=plain)
    app.add_api_route("/v1/models", front.models, responses=answers(401), response_class=plain)
    named = answers(401, 403, 404)
    app.add_api_route("/v1/models/{name:path}", front.model, responses=named, response_class=plain)
    stored, kept = answers(401, 404), "/v1/responses/{id}"
    app.add_api_route(kept, front.retrieve, responses=stored, response_class=plain)
    app.add_api_route(kept, front.delete, methods=["DELETE"], responses=stored, response_class=plain)
    info = answers(401, 403, 404, 503)
    app.add_api_route("/tokenizer_info", front.dispatcher.get, responses=info, response_class=plain)
    app.add_api_route(ENDLESS, front.dispatcher.events, include_in_schema=False, response_class=plain)
    for path, kind in POSTS:
        posted = answers(*POSTED, kinds=("application/json", "text/event-stream"), error=error_of(path))
        app.add_api_route(
            path, front.dispatcher.post, methods=["POST"], responses=posted, response_class=plain,
            openapi_extra=asks(kind), name=path,
        )  # fmt: skip


def banner(names: Sequence[str], url: str, seconds: float) -> str:
    """The text that is printed when the server is ready: its address, its models, and a request to paste."""
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    body = json.dumps({"model": names[0], "max_tokens": 64, "messages": [{"role": "user", "content": "Hello!"}]})
    curl = f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    return f"phasewise serves {len(names)} models at {url} (ready in {seconds:.1f} s): {shown}. Try:\n{curl}"
