"""uvicorn with a polite end: on a signal, stop accepting, let requests finish for a while, cancel the rest, return."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from phasewise.serve.direct import Protocol
from phasewise.serve.front import ServedFront
from phasewise.serve.reloader import Reloader

PATIENCE = 5.0  # seconds that running requests have to finish after SIGINT or SIGTERM
LAST_WORDS = 2  # seconds more for their last bytes to reach the clients


class Server(uvicorn.Server):
    """Calls `ready` once it accepts connections; a signal ends it without an error, but SIGHUP has files read again."""

    def __init__(
        self, config: uvicorn.Config, service: ServedFront, again: Reloader, ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._service, self._again, self._ready = service, again, ready
        self._signals = 0
        self._reading: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload)
            self._ready()

    def _reload(self) -> None:
        """SIGHUP ends nothing: what may change is read again."""
        task = asyncio.create_task(self._again())
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.close()
        asyncio.get_running_loop().call_later(PATIENCE, self._service.cancel_all)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal asks for the end, the second cancels what still runs, the third does not wait for it."""
        self._signals += 1
        self.should_exit = True
        if self._signals == 2:
            self._service.cancel_all()
        self.force_exit = self._signals > 2


def serve(
    app: FastAPI, sock: socket.socket, ready: Callable[[], None], tls: tuple[Path, Path] | None = None,
    keep_alive: float = 75.0,
) -> None:  # fmt: skip
    """Serve on a bound socket until SIGINT or SIGTERM. `tls`: the files of certificate and private key; `keep_alive`:
    the seconds that a connection without a request stays open."""
    certificate, key = tls or (None, None)
    config = uvicorn.Config(
        app, http=Protocol, ws="none", log_config=None, log_level="error", access_log=False, server_header=False,
        timeout_keep_alive=keep_alive,  # type: ignore[arg-type]  # its timer takes parts of a second
        timeout_graceful_shutdown=int(PATIENCE) + LAST_WORDS, ssl_certfile=certificate, ssl_keyfile=key,
    )  # fmt: skip
    Server(config, app.state.service, app.state.again, ready).run([sock])
