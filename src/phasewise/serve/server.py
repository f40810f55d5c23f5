"""uvicorn with a polite end: on a signal, stop accepting, let requests finish for a while, cancel the rest, return."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from phasewise.serve.loop import EngineLoop

PATIENCE = 5.0  # seconds that running requests have to finish after SIGINT or SIGTERM
LAST_WORDS = 2  # seconds more for their last bytes to reach the clients


class Server(uvicorn.Server):
    """Calls `ready` once it accepts connections; a signal ends it without an error."""

    def __init__(self, config: uvicorn.Config, engine: EngineLoop, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._engine, self._ready = engine, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.stopping = True
        asyncio.get_running_loop().call_later(PATIENCE, self._engine.cancel_all)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals():
            yield
            self._captured_signals.clear()  # uvicorn would raise them again: the process would not end with 0


def serve(app: FastAPI, sock: socket.socket, ready: Callable[[], None]) -> None:
    """Serve on a bound socket until SIGINT or SIGTERM."""
    config = uvicorn.Config(
        app, ws="none", log_config=None, log_level="error", access_log=False, server_header=False,
        timeout_graceful_shutdown=int(PATIENCE) + LAST_WORDS,
    )  # fmt: skip
    Server(config, app.state.engine, ready).run([sock])
