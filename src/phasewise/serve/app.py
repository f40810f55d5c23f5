"""Starting and stopping the server: `run`, and `create_app` for a process that brings its own HTTP server.

Importing this module is cheap; FastAPI, uvicorn and torch are imported when the server starts.
"""

from __future__ import annotations

import json
import shlex
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from phasewise.errors import UserError
from phasewise.serve.policy import Policy

if TYPE_CHECKING:
    from fastapi import FastAPI

    from phasewise.llm import LLM
    from phasewise.request.params import SLO

POLICY = Policy()


def run(
    llm: LLM | Callable[[], LLM], *, host: str = "127.0.0.1", port: int = 8000, name: str | None = None,
    slo: SLO | None = None, policy: Policy = POLICY,
) -> None:  # fmt: skip
    """Serve a model until SIGINT or SIGTERM, then return.

    `llm` may be a function that loads it: it is called once the port is taken, so that a port in use is known at once,
    and what it loaded is closed at the end. Port 0 picks a free one. `name` is what clients call the model (None: what
    it was loaded as), `slo` the targets of requests that name none, `policy` how the server treats them. Prints the URL
    and a request to try when ready. On a signal nothing new is accepted, and running requests have `server.PATIENCE`
    seconds before they are cancelled; a second signal cancels them at once. Raises UserError if the server cannot
    start.

        run(lambda: LLM("pocket", draft="prompt_lookup"), port=8000)
    """
    began = time.monotonic()
    with bound(host, port) as sock:
        try:
            from phasewise.serve.server import serve
        except ImportError as error:
            raise UserError(f"serving needs the extra ({error}): pip install 'phasewise[serve]'") from error
        loaded = llm() if callable(llm) else llm
        app = create_app(loaded, name=name, slo=slo, policy=policy)
        url = address(host, sock)

        def ready() -> None:
            print(banner(loaded, name or loaded.name, url, time.monotonic() - began), flush=True)

        try:
            serve(app, sock, ready)
        finally:
            if loaded is not llm:
                loaded.close()


def create_app(llm: LLM, *, name: str | None = None, slo: SLO | None = None, policy: Policy = POLICY) -> FastAPI:
    """The ASGI application around a model. Its lifespan starts and ends the engine's thread."""
    from fastapi import FastAPI
    from starlette.exceptions import HTTPException

    from phasewise import __version__
    from phasewise.errors import PhasewiseError
    from phasewise.serve.service import Service

    service = Service(llm, name or llm.name, policy, slo)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        yield
        service.engine.stop()

    app = FastAPI(title="phasewise", version=__version__, lifespan=lifespan)
    app.state.service = service
    app.add_api_route("/health", service.health)
    app.add_api_route("/metrics", service.show_metrics)
    app.add_api_route("/v1/models", service.models)
    app.add_api_route("/v1/models/{name:path}", service.model)
    app.add_api_route("/v1/responses/{id}", service.responses.retrieve)
    app.add_api_route("/v1/responses/{id}", service.responses.delete, methods=["DELETE"])
    for path, endpoint, kind in service.posts:
        schema = {"required": True, "content": {"application/json": {"schema": kind.model_json_schema()}}}
        app.add_api_route(path, endpoint, methods=["POST"], openapi_extra={"requestBody": schema})
    for error in (PhasewiseError, HTTPException, Exception):
        app.add_exception_handler(error, service.refuse)
    return app


def bound(host: str, port: int) -> socket.socket:
    """A socket that holds the address but does not listen yet. Raises UserError if it cannot be had."""
    sock: socket.socket | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, where = found[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        return sock
    except (OSError, OverflowError, UnicodeError) as error:
        if sock is not None:
            sock.close()
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot listen on {host} port {port} ({reason}): choose another host or port") from error


def address(host: str, sock: socket.socket) -> str:
    """The URL at which this machine reaches the server."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{shown}]:{sock.getsockname()[1]}" if ":" in shown else f"http://{shown}:{sock.getsockname()[1]}"


def banner(llm: LLM, name: str, url: str, seconds: float) -> str:
    """What is printed when the server is ready: where it is, and a request to paste."""
    body: dict[str, object] = {"model": name, "max_tokens": 64}
    messages = [{"role": "user", "content": "Hello!"}]
    try:
        llm.encode_chat(messages)
        path, body["messages"] = "/v1/chat/completions", messages
    except UserError:  # no chat template
        path, body["prompt"] = "/v1/completions", "Once upon a time"
    curl = f"curl {url}{path} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    return f"phasewise serves {name} at {url} (ready in {seconds:.1f} s). Try:\n{curl}"
