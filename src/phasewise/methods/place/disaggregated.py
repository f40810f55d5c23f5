"""Prompts on some engines, tokens on another, so that neither waits for the other (DistServe, arXiv 2401.09670).

Promises colocated's tokens: the KV moves as it is, evicted or quantised, and draws depend on seed and position alone.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from phasewise.engine import Engine
from phasewise.errors import UserError
from phasewise.kv.handoff import Handoff, Header, Link, Loopback, State, landing, layout, pack, unpack
from phasewise.kv.layer_kv import ROUND
from phasewise.place import Placed, Plan
from phasewise.request import Left, Request
from phasewise.trace import Counters

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Disaggregated:
    """`prefill` engines share `share` of the KV budget and compute prompts and first tokens; one engine decodes.

    The decoding engine pulls: a finished prompt stays with its prefill engine until there is room, and a full decoding
    engine so stops new prompts. A move that is lost or does not fit within `deadline` seconds is recomputed from
    tokens. Requests that end with their first token never move. Engines take turns in one thread here; the placement
    search, several decoding engines and layer-wise sending are left out.
    """

    prefill: int = 1
    share: float = 0.5
    deadline: float = 10.0

    paper: ClassVar[str] = "arXiv 2401.09670"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}

    def __post_init__(self) -> None:
        if self.prefill < 1:
            raise UserError(f"disaggregated: prefill={self.prefill} must be at least 1")
        if not 0.0 < self.share < 1.0:
            raise UserError(f"disaggregated: share={self.share} must lie between 0 and 1, so that both sides have KV")
        if self.deadline <= 0.0:
            raise UserError(f"disaggregated: deadline={self.deadline} must be positive (seconds)")

    def build(self, plan: Plan) -> Placed:
        prefills = [plan.engine(("prefill",), self.share / self.prefill) for _ in range(self.prefill)]
        return Pools(prefills, plan.engine(("prefill", "decode"), 1.0 - self.share), Loopback(), self.deadline)


class Pools:
    """Engines for prompts and one for everything after them, with the verbs of a single engine.

    A caller's request lives in a prefill engine until its KV has moved; from then on the decoding engine works on a
    twin of it, and what the twin emits is emitted by the caller's request too (stop strings are watched here).
    """

    def __init__(self, prefills: Sequence[Engine], decode: Engine, link: Link, deadline: float) -> None:
        self.prefills, self.decode, self.link, self.deadline = list(prefills), decode, link, deadline
        self.model = decode.model
        self.clock = decode.parts.clock
        self._layout = layout(self.model.config, decode.store)
        self._home: dict[Request, Engine] = {}  # requests that are still with a prefill engine
        self._moving: dict[int, Handoff] = {}  # by ticket
        self._caller: dict[Request, Request] = {}  # twin in the decoding engine: the caller's request
        self._tickets = itertools.count()

    # ---- what users of an engine call
    @property
    def engines(self) -> list[Engine]:
        return [*self.prefills, self.decode]

    @property
    def counters(self) -> Counters:
        """Of all engines together."""
        return sum((engine.counters for engine in self.engines), Counters())

    @property
    def idle(self) -> bool:
        return not (self._home or self._caller)

    @property
    def waiting(self) -> list[Request]:
        twins = (self._caller[twin] for twin in self.decode.waiting)
        return [request for engine in self.prefills for request in engine.waiting] + list(twins)

    @property
    def running(self) -> list[Request]:
        """With KV somewhere, or on the way."""
        here = [request for engine in self.prefills for request in (*engine.running, *engine.departed)]
        return here + [self._caller[twin] for twin in self.decode.running]

    @property
    def kv_bytes(self) -> int:
        return sum(engine.kv_bytes for engine in self.engines)

    @property
    def prefix_bytes(self) -> int:
        return sum(engine.prefix_bytes for engine in self.engines)

    def add(self, request: Request) -> None:
        """To the home of its siblings, else to the prefill engine with the fewest rows to compute."""
        if any(engine.queues.named(request.id) for engine in self.engines):
            raise UserError(f"a request with id {request.id!r} is already running: give each request its own id")
        self.decode.check(request)
        home = None if request.parent is None else self._home.get(request.parent)
        engine = home or min(self.prefills, key=_load)
        engine.add(request)
        self._home[request] = engine

    def cancel(self, request: Request) -> bool:
        home = self._home.pop(request, None)
        if home is not None:
            self._close(request)
            return home.cancel(request)
        twin = next((twin for twin, caller in self._caller.items() if caller is request), None)
        if twin is None:
            return False
        self._leave(twin, Left("cancelled", "cancelled"))
        return True

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """One step of every engine, and what the link has brought."""
        progressed: dict[Request, None] = {}  # ordered, each once
        for engine in self.prefills:
            for request in engine.step():
                progressed[request] = None
                if request.left is not None:
                    del self._home[request]
        self._send()
        self._receive()
        for twin in list(self.decode.step()):
            progressed[self._mirror(twin)] = None
        return list(progressed)

    def forget_prefixes(self) -> None:
        for engine in self.engines:
            engine.forget_prefixes()

    # ---- from prefill to decode
    def _send(self) -> None:
        """Pull finished prompts over, first come first served, as long as there is room for them."""
        moving = {handoff.request for handoff in self._moving.values()}
        done = [request for engine in self.prefills for request in engine.departed if request not in moving]
        for request in sorted(done, key=lambda request: request.trace.arrived):
            assert request.kv is not None
            room = landing(request.kv)
            if not self._has_room(room):
                return
            now = self.clock()
            handoff = Handoff(next(self._tickets), request, room, now + self.deadline)
            self._moving[handoff.ticket] = handoff
            request.trace.sent = now
            handoff.to(State.SENDING)
            try:
                self.link.send(*pack(request, self._layout, handoff.ticket))
            except Exception as error:
                self._recompute(handoff, f"{type(error).__name__}: {error}")

    def _has_room(self, n_bytes: int) -> bool:
        """Set room aside for one more. Requests that wait for memory go first, and those that run may grow a bit."""
        decode = self.decode
        running = len(decode.running) + len(self._moving)
        if decode.waiting or running >= decode.parts.max_running:
            return False
        growth = running * ROUND * decode.store.row_bytes
        return decode.store.room(n_bytes + growth) and decode.room.promise(n_bytes)

    def _receive(self) -> None:
        while (message := self.link.receive()) is not None:
            handoff = self._moving.get(message[0]["ticket"])
            if handoff is None:
                continue  # cancelled or given up in the meantime
            handoff.to(State.DELIVERED)
            try:
                self._take_over(handoff, *message)
            except Exception as error:
                self._recompute(handoff, f"{type(error).__name__}: {error}")
        now = self.clock()
        for handoff in [h for h in self._moving.values() if h.deadline < now]:
            self._recompute(handoff, f"nothing arrived within {self.deadline} s")

    def _take_over(self, handoff: Handoff, header: Header, tensors: Sequence[Tensor]) -> None:
        decode = self.decode
        decode.room.promise(-handoff.room)
        handoff.room = 0
        twin = Request.from_header(header["request"])
        twin.kv, twin.state = unpack(header, tensors, decode.store, self._layout)
        try:
            decode.resume(twin)
        except Exception:
            twin.release()
            raise
        handoff.to(State.OWNED)
        decode.counters.handoffs += 1
        self._caller[twin] = handoff.request
        self._release(handoff)

    def _recompute(self, handoff: Handoff, why: str) -> None:
        """The one answer to every failure of a move: start again from the tokens, in the decoding engine."""
        caller = handoff.request
        log.warning("the hand-off of %s failed and its prompt is computed again: %s", caller.id, why)
        twin = Request.from_header(caller.header())
        twin.computed = caller.computed = 0
        self._release(handoff)
        self._caller[twin] = caller
        self.decode.add(twin)

    def _release(self, handoff: Handoff) -> None:
        caller = handoff.request
        self._close(caller)
        self._home.pop(caller).depart(caller)
        caller.trace.owned = self.clock()

    def _close(self, request: Request) -> None:
        """End the move of a request, if there is one: what still arrives of it is ignored."""
        for handoff in [h for h in self._moving.values() if h.request is request]:
            self.decode.room.promise(-handoff.room)
            handoff.to(State.RELEASED)
            del self._moving[handoff.ticket]

    # ---- the caller's side
    def _mirror(self, twin: Request) -> Request:
        """Bring the caller's request up to date with its twin."""
        caller = self._caller[twin]
        new = twin.tokens[caller.known :]
        caller.computed, caller.high_water = twin.computed, twin.high_water
        left = twin.left
        try:
            if new:
                taken = caller.emit(new, self.model.config.eos, self.clock())
                self.decode.counters.emitted -= len(new) - taken
                left = caller.left or left
        except Exception as error:  # raised by the caller's own watch
            left = Left("failed", f"{type(error).__name__}: {error}")
        if left is not None:
            self._leave(twin, left)
        return caller

    def _leave(self, twin: Request, left: Left) -> None:
        caller = self._caller.pop(twin)
        self.decode.cancel(twin)  # unless it has left by itself
        caller.left = left
        caller.trace.left = self.clock()


def _load(engine: Engine) -> int:
    """Prompt rows an engine has still to compute."""
    return sum(request.prompt_len - request.computed for request in (*engine.waiting, *engine.running))
