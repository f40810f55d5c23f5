"""Parts of a streamed body straight to the socket: most of what an event costs is the way there.

uvicorn hands every part through each middleware's `send` and through h11, which for a body in chunks does no more than
write its length before it. h11 still reads requests, writes heads and ends bodies: it refuses what is ambiguous, and a
head without end, where faster parsers do not.
"""

from __future__ import annotations

from typing import cast

from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

NAME = "phasewise.direct"  # of the ASGI extension


class Direct:
    """Writes the parts of one response past ASGI. Its head has been sent as usual, and so is its last part."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def ready(self) -> bool:
        """True if a part can be written now: in chunks, into a socket that takes it."""
        cycle = self._cycle
        begun = cycle.response_started and not cycle.response_complete and not cycle.disconnected
        return begun and not cycle.flow.write_paused and cycle.scope["http_version"] == "1.1"

    def write(self, part: bytes) -> None:
        """A part of the body that is not empty."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))


class Protocol(H11Protocol):
    """uvicorn's over h11; every request's scope has a `Direct` among its extensions."""

    def handle_events(self) -> None:
        super().handle_events()  # the task of a new cycle has not begun yet
        if self.cycle is not None:
            scope = cast(Scope, self.cycle.scope)
            scope.setdefault("extensions", {}).setdefault(NAME, Direct(self.cycle))


def direct(scope: Scope) -> Direct | None:
    """The direct writer of a request, if its server has one."""
    return cast("Direct | None", scope.get("extensions", {}).get(NAME))
