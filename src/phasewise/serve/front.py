"""The interface of what a server offers, one model or many, to the gate before it and to the process around it."""

from __future__ import annotations

from typing import Protocol

from fastapi import Request
from fastapi.responses import Response


class Sleeper(Protocol):
    """Told of every POST that comes and goes; may have put the model to sleep."""

    def enter(self) -> None: ...

    def leave(self) -> None: ...

    async def awake(self) -> None:
        """Return once the model can be asked. Raises Unavailable if it cannot be loaded any more."""
        ...


class ServedFront(Protocol):
    """One model's `Service`, or a `ModelRegistry` of many."""

    @property
    def sleeper(self) -> Sleeper: ...

    async def refuse(self, request: Request, error: Exception) -> Response:
        """The response to any exception."""
        ...

    def close(self) -> None:
        """Take nothing new: the server is shutting down."""
        ...

    def cancel_all(self) -> None:
        """Drop everything, at the end of a shutdown's patience."""
        ...
