"""Starting and stopping the server: `run`, and `create_app` for a process that brings its own HTTP server.

Importing this module is cheap; FastAPI, uvicorn and torch are imported when the server starts.
"""

from __future__ import annotations

import gc
import ipaddress
import json
import shlex
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from phasewise.errors import UserError
from phasewise.model.source import forget
from phasewise.serve.guard.policy import ServePolicy

if TYPE_CHECKING:
    from fastapi import FastAPI

    from phasewise.llm import LLM
    from phasewise.request.params import SLO
    from phasewise.serve.front import ServedFront
    from phasewise.serve.guard.keys import KeyRing
    from phasewise.serve.service import Service
    from phasewise.serve.watch.traces import Tracer

POLICY = ServePolicy()
BACKLOG = 2048  # connections that wait to be accepted
METHODS = ("GET", "HEAD", "POST", "DELETE", "OPTIONS")
OPEN_TO_ALL = (
    "other machines can reach this server without a key. --keys FILE requires keys (`phasewise keys new NAME` makes "
    "one); --host 127.0.0.1 keeps other machines out"
)


def run(
    llm: LLM | Callable[[], LLM], *, host: str = "127.0.0.1", port: int = 8000, name: str | None = None,
    slo: SLO | None = None, policy: ServePolicy = POLICY,
) -> None:  # fmt: skip
    """Serve a model until SIGINT or SIGTERM, then return.

    `llm` may be a function that loads it: it is called once the port is taken, so that a port in use is known at once,
    and what it loaded is closed at the end. Port 0 picks a free one. `name` is what clients call the model (None: what
    it was loaded as, of a path the last part), `slo` the targets of requests that name none, `policy` says who may ask
    for how much, and how answers are read. Prints the URL and a request to try when ready. On a signal nothing new is
    accepted, and running requests have `server.PATIENCE` seconds before they are cancelled; a second signal cancels
    them at once. Raises UserError if the server cannot start.

        run(lambda: LLM("pocket", draft="prompt_lookup"), port=8000)
    """
    began = time.monotonic()
    with bound(host, port) as sock:
        impatient(sock, policy.write_timeout)
        check(policy)
        loaded = llm() if callable(llm) else llm
        app = create_app(loaded, name=name, slo=slo, policy=policy)
        forget()  # a file's vocabulary, as lists of words
        gc.collect()
        gc.freeze()  # what is imported and loaded stays: looking through it again takes a tenth of a second
        try:
            called = app.state.service.name
            until_signal(app, sock, host, policy, lambda url: banner(loaded, called, url, time.monotonic() - began))
        finally:
            if loaded is not llm:
                loaded.close()


def check(policy: ServePolicy) -> None:
    """Raise UserError for mistakes that are known before a model is loaded; logs are written as it says from now on."""
    try:
        from phasewise.serve.guard.keys import read
        from phasewise.serve.watch.logs import configure
        from phasewise.serve.watch.traces import exporter
    except ImportError as error:
        raise UserError(f"serving needs the extra ({error}): pip install 'phasewise[serve]'") from error
    if policy.keys is not None:
        read(policy.keys)
    if policy.tls is not None:
        check_tls(*policy.tls)
    if policy.otel is not None:
        exporter(policy.otel).shutdown()
    if policy.log is not None:
        configure(policy.log)


def until_signal(
    app: FastAPI, sock: socket.socket, host: str, policy: ServePolicy, banner: Callable[[str], str]
) -> None:
    """Serve an application on a bound socket until SIGINT or SIGTERM; `banner` says what is printed of its address."""
    from phasewise.ops.native.room import give_back_code
    from phasewise.serve.server import serve

    url = address(host, sock, "http" if policy.tls is None else "https")

    def ready() -> None:
        give_back_code()
        if policy.keys is None and not loopback(sock):
            print(f"warning: {OPEN_TO_ALL}", file=sys.stderr, flush=True)
        print(banner(url), flush=True)
        if policy.playground:
            print(f"Playground: {url}/", flush=True)

    listen(sock, host)
    serve(app, sock, ready, policy.tls, policy.keep_alive)


def create_app(
    llm: LLM,
    *,
    name: str | None = None,
    slo: SLO | None = None,
    policy: ServePolicy = POLICY,
    tracer: Tracer | None = None,
) -> FastAPI:
    """The ASGI application around a model. Its lifespan starts and ends the engine's thread. `tracer`: instead of one
    that the policy asks for."""
    from fastapi import FastAPI

    from phasewise import __version__
    from phasewise.serve.batches.endpoint import add_batches
    from phasewise.serve.described import describe
    from phasewise.serve.guard.keys import KeyRing
    from phasewise.serve.reloader import Reloader
    from phasewise.serve.service import Service
    from phasewise.serve.watch.traces import Tracer, exporter

    service = Service(llm, name or public_name(llm.name), policy, slo)
    keys = None if policy.keys is None else KeyRing(policy.keys, service.names)
    if policy.otel is not None and tracer is None:
        tracer = Tracer(exporter(policy.otel))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        if batches is not None:
            batches.start()
        yield
        if batches is not None:
            await batches.stop()
        service.stop()
        if tracer is not None:
            tracer.close()

    app = FastAPI(title="phasewise", version=__version__, lifespan=lifespan)
    app.state.service, app.state.again = service, Reloader(service, keys, policy.recipes)
    if keys is not None:
        service.metrics.registry.register(keys)
    guard(app, service, keys, policy, tracer)
    add_routes(app, service)
    show(app, service, keys, policy)
    if (batches := add_batches(app, policy.batches, keys)) is not None:
        service.metrics.registry.register(batches)
    describe(app)
    return app


def guard(app: FastAPI, front: ServedFront, keys: KeyRing | None, policy: ServePolicy, tracer: Tracer | None) -> None:
    """Adds what stands before all endpoints: the gate, other origins, and the answers to errors."""
    from starlette.exceptions import HTTPException
    from starlette.middleware.cors import CORSMiddleware

    from phasewise.errors import PhasewiseError
    from phasewise.serve.guard.gate import Gate

    app.add_middleware(Gate, service=front, keys=keys, policy=policy, tracer=tracer)
    if policy.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=policy.origins, allow_methods=METHODS, allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )  # fmt: skip
    for error in (PhasewiseError, HTTPException, Exception):
        app.add_exception_handler(error, front.refuse)


def add_routes(app: FastAPI, service: Service) -> None:
    """Adds the endpoints, each described with what it answers."""
    from starlette.responses import Response

    from phasewise.serve.described import POSTED, answers, asks, error_of
    from phasewise.serve.guard.gate import OPEN

    plain = Response  # a body that FastAPI does not describe
    health = answers() | {503: {**answers()[200], "description": "The engine has failed, or the server shuts down."}}
    app.add_api_route("/health", service.health, responses=health, response_class=plain)
    app.add_api_route(
        "/metrics", service.show_metrics, responses=answers(401, 403, kinds=("text/plain",)), response_class=plain
    )
    app.add_api_route("/v1/models", service.models, responses=answers(401), response_class=plain)
    named = answers(401, 403, 404)
    app.add_api_route("/v1/models/{name:path}", service.model, responses=named, response_class=plain)
    for path, get in service.gets:
        app.add_api_route(path, get, responses=health if path in OPEN else answers(401), response_class=plain)
    stored, kept = answers(401, 404), "/v1/responses/{id}"
    app.add_api_route(kept, service.responses.retrieve, responses=stored, response_class=plain)
    app.add_api_route(kept, service.responses.delete, methods=["DELETE"], responses=stored, response_class=plain)
    for path, endpoint, kind in service.posts:
        posted = answers(*POSTED, kinds=("application/json", "text/event-stream"), error=error_of(path))
        app.add_api_route(
            path, endpoint, methods=["POST"], responses=posted, response_class=plain, openapi_extra=asks(kind)
        )


def show(app: FastAPI, service: Service, keys: KeyRing | None, policy: ServePolicy) -> None:
    """Adds the event stream and the page that draws it. The stream never ends, so no document of requests lists it."""
    from starlette.responses import Response

    from phasewise.serve.playground.files import add_to
    from phasewise.serve.watch.events import ENDLESS, Events

    service.events = Events(service.engine, service.metrics.kv_limit, keys, policy.open_metrics)
    app.add_api_route(ENDLESS, service.events.stream, include_in_schema=False, response_class=Response)
    if policy.playground:
        add_to(app)


def public_name(model: str) -> str:
    """The name by which clients call a model. Of a path it is the last part: clients learn nothing of this machine."""
    path = Path(model).expanduser()
    return path.resolve().name or "model" if path.exists() else model


def bound(host: str, port: int) -> socket.socket:
    """A socket that holds the address but does not listen yet. Raises UserError if it cannot be had."""
    sock: socket.socket | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, where = found[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.bind(where)  # two sockets that may be reused could both have an address on which neither listens yet
        except OSError:  # connections of a server that has ended may linger there
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
        return sock
    except (OSError, OverflowError, UnicodeError) as error:
        if sock is not None:
            sock.close()
        raise _taken(host, port, error) from error


def listen(sock: socket.socket, host: str) -> None:
    """Listen on a bound socket. Raises UserError where another process has begun to since it was bound."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # of its connections: a next server can bind
        sock.listen(BACKLOG)
    except OSError as error:
        raise _taken(host, sock.getsockname()[1], error) from error


def _taken(host: str, port: int, error: Exception) -> UserError:
    reason = getattr(error, "strerror", None) or error
    return UserError(f"cannot listen on {host} port {port} ({reason}): choose another host or port")


def impatient(sock: socket.socket, seconds: float) -> None:
    """Connections that it accepts end once their peer has taken nothing of what it was sent for so long, where the
    system can do that (Linux): whoever never reads is as good as gone."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(seconds * 1000)))


def loopback(sock: socket.socket) -> bool:
    """True if only this machine can reach the address."""
    return ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]).is_loopback


def check_tls(certificate: Path, key: Path) -> None:
    """Raise UserError if these files are no certificate with its private key."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: "")
    except OSError as error:  # what ssl raises are such, too
        reason = error.strerror or error
        raise UserError(
            f"--tls-cert {certificate} and --tls-key {key} cannot be used ({reason}): give a certificate and its "
            "private key without a passphrase, as PEM files"
        ) from error


def address(host: str, sock: socket.socket, scheme: str = "http") -> str:
    """The URL at which this machine reaches the server."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"{scheme}://{f'[{shown}]' if ':' in shown else shown}:{sock.getsockname()[1]}"


def banner(llm: LLM, name: str, url: str, seconds: float) -> str:
    """The text that is printed when the server is ready: its address, and a request to paste."""
    body: dict[str, object] = {"model": name, "max_tokens": 64}
    messages = [{"role": "user", "content": "Hello!"}]
    try:
        llm.encode_chat(messages)
        path, body["messages"] = "/v1/chat/completions", messages
    except UserError:  # no chat template
        path, body["prompt"] = "/v1/completions", "Once upon a time"
    curl = f"curl {url}{path} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    return f"phasewise serves {name} at {url} (ready in {seconds:.1f} s). Try:\n{curl}"
