"""Pushed KV: it flows to the next worker while its prompt is still computed.

    Outbox   at the prompt's worker: after each step, what that step has made final goes into the buffer as a piece
    Inbox    at the next worker: room for the whole prompt, taken when the prompt starts, and filled as pieces come

A piece is known by request, attempt and number; it may come late, twice or never. The receiver owns the request once
the last piece is there and every row of every layer with it; pieces that never come end in a new start from tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from phasewise.cluster.segments import Landing, SegmentBlock, Sent, cut, size
from phasewise.cluster.transfer_buffer import Parcel, TransferBuffer
from phasewise.kv.handoff import Header, Layouts, drawers, fits, unpack
from phasewise.request.header import request_of
from phasewise.request.request import Request

if TYPE_CHECKING:
    from phasewise.engine.engine import Engine
    from phasewise.kv.store import Store

log = logging.getLogger(__name__)
Message = dict[str, Any]
Post = Callable[[Message], None]


@dataclass(slots=True, eq=False)
class _Sending:
    """A request whose KV leaves piece by piece, and the pieces that nobody is known to have taken: parcel, bytes."""

    request: Request
    attempt: int
    until: float
    sent: Sent = field(default_factory=Sent)
    parcels: dict[int, tuple[Parcel, int]] = field(default_factory=dict)


class Outbox:
    """The pieces a worker has put down. Their bytes count against its budget until the receiver has copied them."""

    def __init__(self, engine: Engine, transfer_buffer: TransferBuffer, post: Post, lease: float) -> None:
        self.engine, self.transfer_buffer, self.lease = engine, transfer_buffer, lease
        self._post = post
        self._sending: dict[str, _Sending] = {}

    @property
    def bytes(self) -> int:
        return sum(n for sending in self._sending.values() for _, n in sending.parcels.values())

    def pushes(self, name: str) -> bool:
        return name in self._sending

    def open(self, request: Request, attempt: int) -> None:
        """The request's KV is to leave as it is computed."""
        self._sending[request.id] = _Sending(request, attempt, self._lease())

    def send(self) -> None:
        """Put down what the step has made final, as far as the budget allows; the rest goes with a later piece."""
        engine = self.engine
        for sending in self._sending.values():
            request = sending.request
            if request not in engine.queues or request in engine.departed:
                continue
            runtime = engine.runtime(request)
            # whoever evicts rewrites the rows of a prompt sooner or later: what was sent early would be sent in vain
            if any(phase.evict is not None for phase in runtime.phases):
                continue
            blocks = sending.sent.more(request, runtime.store.shareable(request))
            if not blocks or request.kv is None or not engine.room.promise(n := size(request.kv, blocks)):
                continue
            try:
                parcel = self.transfer_buffer.put(cut(request.kv, blocks))
            except Exception as error:
                log.warning("a piece of %s could not be put down: %s", request.id, error)
                engine.room.promise(-n)
                continue
            number = sending.sent.note(blocks)
            sending.parcels[number] = parcel, n
            sending.until = self._lease()
            engine.counters.kv_bytes_sent += n
            self._post({
                "event": "piece", "id": request.id, "attempt": sending.attempt, "piece": number,
                "blocks": [block.plain() for block in blocks], "parcel": parcel,
            })  # fmt: skip

    def last(self, name: str) -> tuple[int, list[SegmentBlock] | None]:
        """The number of the last piece, and the rows it has to bring; None = all of the KV, whatever was sent."""
        sending = self._sending[name]
        blocks = sending.sent.rest(sending.request)
        if blocks is None:
            self.engine.counters.push_fallbacks += 1
        return sending.sent.count, blocks

    def keep(self, name: str, attempt: int) -> None:
        """Nobody waits for the request's KV any more."""
        if name in self._sending and self._sending[name].attempt == attempt:
            self.engine.counters.push_fallbacks += 1
            self.release(name, attempt)

    def release(self, name: str, attempt: int, numbers: list[int] | None = None) -> None:
        """These pieces, or the whole request, are out of our hands; nothing happens if they were before."""
        sending = self._sending.get(name)
        if sending is None or sending.attempt > attempt:
            return
        for number in list(sending.parcels) if numbers is None else numbers:
            if number in sending.parcels:
                parcel, n = sending.parcels.pop(number)
                self.transfer_buffer.drop(parcel)
                self.engine.room.promise(-n)
        if numbers is None:
            del self._sending[name]

    def renew(self, name: str) -> None:
        if name in self._sending:
            self._sending[name].until = self._lease()

    def expired(self) -> list[tuple[str, int]]:
        """Requests with pieces that nobody has asked about for a whole lease, and their attempts."""
        now = self.engine.parts.clock()
        return [(name, s.attempt) for name, s in self._sending.items() if s.parcels and s.until < now]

    def _lease(self) -> float:
        return self.engine.parts.clock() + self.lease


@dataclass(slots=True, eq=False)
class _Coming:
    """A request on its way here."""

    attempt: int
    landing: Landing
    until: float
    last: tuple[Header, list[Tensor]] | None = None  # what the last piece has brought besides rows


class Inbox:
    """Requests on their way here, each with room for its whole prompt.

    `own` goes on with a request whose KV is complete. Raises whatever it raises, the KV freed.
    """

    def __init__(
        self,
        engine: Engine,
        transfer_buffer: TransferBuffer,
        post: Post,
        layouts: Layouts,
        own: Callable[[Request, int], None],
    ) -> None:
        self.engine, self.transfer_buffer, self.layouts = engine, transfer_buffer, layouts
        self._post, self._own = post, own
        self._coming: dict[str, _Coming] = {}

    def __len__(self) -> int:
        return len(self._coming)

    def __contains__(self, name: str) -> bool:
        return name in self._coming

    @property
    def bytes(self) -> int:
        return sum(coming.landing.bytes for coming in self._coming.values())

    def fits(self, store: Store, tokens: int) -> bool:
        """Returns whether so many tokens fit besides the requests that wait, and those that run and may grow."""
        engine = self.engine
        if len(engine.running) + len(engine.waiting) + len(self) >= engine.parts.max_running:
            return False
        waiting = sum(engine.runtime(request).need(request.known + 1) for request in engine.waiting)
        return store.room(store.cost(tokens) + waiting + engine.growth)

    def expect(self, command: Message, until: float) -> bool:
        """Take room for a request of so many tokens; False if there is none."""
        store = self.engine.recipes[command["recipe"]].store
        if not self.fits(store, command["tokens"]):
            return False
        try:
            landing = Landing(store, command["tokens"])
        except Exception as error:  # the machine has less memory than the budget says
            log.warning("no room could be taken for %s: %s", command["id"], error)
            return False
        self.engine.room.promised += landing.bytes
        self._coming[command["id"]] = _Coming(command["attempt"], landing, until)
        return True

    def piece(self, command: Message) -> None:
        """Lay down the rows of a piece; once all are there, the request is ours."""
        name, number = command["id"], command["piece"]
        coming = self._coming.get(name)
        if coming is None or coming.attempt != command["attempt"] or coming.landing.has(number):
            return  # called off, or said twice
        answer = {"id": name, "attempt": coming.attempt}
        try:
            seconds = self._lay(coming, command)
            request = self._complete(coming)
            if request is None:
                if "packed" not in command:
                    self._post({"event": "landed", **answer, "pieces": [number]})
                return
            self._forget(name)
            self._own(request, coming.attempt)
        except Exception as error:
            self.drop(name, coming.attempt)
            self._post({"event": "refused", **answer, "why": f"{type(error).__name__}: {error}"})
        else:
            self.engine.counters.handoffs += 1
            self._post({"event": "owned", **answer, "seconds": seconds})

    def _lay(self, coming: _Coming, command: Message) -> float:
        """-> seconds that the transfer buffer took to bring the piece here"""
        clock = self.engine.parts.clock
        began = clock()
        tensors = self.transfer_buffer.get(command["parcel"])
        seconds = clock() - began
        blocks, rows = command["blocks"], tensors
        if "packed" in command:
            fits(command["packed"], *self.layouts.of(command["packed"]["request"]["recipe"]))
            first = len(tensors) if blocks is None else command["rows_at"]
            coming.last, rows = (command["packed"], tensors[:first]), tensors[first:]
        if blocks is not None:
            coming.landing.lay(command["piece"], [SegmentBlock.of(block) for block in blocks], rows)
        else:
            self._close(coming)  # nothing that came before counts
        return seconds

    def _complete(self, coming: _Coming) -> Request | None:
        """The request with its KV, if that is all there."""
        if coming.last is None:
            return None
        header, tensors = coming.last
        request = request_of(header["request"])
        if not coming.landing.layers:
            request.kv, request.state = unpack(header, tensors, *self.layouts.of(request.recipe))
        elif coming.landing.covers(request.computed):
            request.state = drawers(header, tensors)
            self.engine.room.promised -= coming.landing.bytes
            request.kv = coming.landing.finish(request.computed)
        else:
            return None
        return request

    def drop(self, name: str, attempt: int) -> None:
        """Give back the room of a request, up to this attempt at it."""
        if name in self._coming and self._coming[name].attempt <= attempt:
            self._close(self._forget(name))

    def renew(self, name: str, until: float) -> None:
        if name in self._coming:
            self._coming[name].until = until

    def expired(self) -> list[tuple[str, int]]:
        """Requests that nobody has asked about for a whole lease, and their attempts."""
        now = self.engine.parts.clock()
        return [(name, coming.attempt) for name, coming in self._coming.items() if coming.until < now]

    def _forget(self, name: str) -> _Coming:
        return self._coming.pop(name)

    def _close(self, coming: _Coming) -> None:
        self.engine.room.promised -= coming.landing.bytes
        coming.landing.close()
