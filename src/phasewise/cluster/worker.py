"""A worker: one engine that obeys commands, takes turns and reports what came of it.

    command  add      {request, attempt, parent?, push} start (or start again) from tokens; push: KV leaves in pieces
             take     {id, attempt, packed, parcel}     go on with a request whose KV is in the transfer buffer
             expect   {id, attempt, recipe, tokens}     set room aside for a request whose KV will come in pieces
             piece    {id, attempt, piece, blocks, parcel, packed?}  some of its rows; the last one brings the rest too
             release  {id, attempt, pieces?, seconds?}  its KV (or these pieces) was taken over, or is no longer wanted
             keep     {id, attempt}                     nobody expects it any more
             renew    {ids}                             keep these parcels for another lease, and say how you are
             cancel   {id, attempt}                     drop a request
             forget   {}                                drop unused prefixes
             spare    {bytes}                           drop some of them: another worker of the pool is short
             cores    {cores, threads}                  from the next step on, run on these
             learn    {recipes}                         requests may name these as well (recipe_update.py)
             unlearn  {recipes}                         requests name these no more
    event    progress {id, attempt, start, tokens, left, queued, recalled, cached, groups?, scores?, pool?}
             offer    {id, attempt, packed, parcel}     the prompt is done, its KV waits in the transfer buffer
             piece    {id, attempt, piece, blocks, parcel}  some rows of a prompt under way wait in the transfer buffer
             landed   {id, attempt, pieces}             these have been copied
             full     {id, attempt}                     there is no room for what was to be expected
             expired  {id, attempt}                     nobody took it, or sent anything, within the lease
             owned | refused {id, attempt, seconds | why}  the answer to take, and to the last piece
             state    {...numbers, heard, unlearned}    after each command and turn that changed something; why the
                                                        last recipes could not be learned, if so

Commands are numbered (`n`), so that a lost one is not taken for heard. A request is known by its id and the number of
the attempt; what belongs to an older attempt is dropped. A parcel counts against the KV budget of the worker that put
it down until it is released, so a slow receiver makes the sender wait. Workers of a pool lend instead (ownership.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phasewise.cluster.ownership import OwnershipTransfer
from phasewise.cluster.push import Inbox, Outbox
from phasewise.cluster.recipe_update import forget, learn, stores_of
from phasewise.cluster.segments import cut
from phasewise.cluster.transfer_buffer import Parcel, TransferBuffer
from phasewise.kv.handoff import Layouts, landing, pack, unpack
from phasewise.kv.wire import Wire
from phasewise.request.header import request_of
from phasewise.request.request import Departure, Request

if TYPE_CHECKING:
    from phasewise.engine.engine import Engine

log = logging.getLogger(__name__)
Message = dict[str, Any]
LEASE = 20.0  # seconds a parcel is kept without a word from the router


@dataclass(slots=True, eq=False)
class _Job:
    """A request that is computed here."""

    request: Request
    attempt: int
    told: int  # tokens the router knows of


@dataclass(slots=True, eq=False)
class _Offer:
    """A prompt computed here whose KV lies in the transfer buffer."""

    attempt: int
    parcel: Parcel
    n_bytes: int
    until: float
    wire: Wire | None  # that it was written with


class Worker:
    """obey / turn, for the thread or process it lives in. `post` sends an event to the router, `settle` takes cores and
    threads."""

    def __init__(
        self, engine: Engine, transfer_buffer: TransferBuffer, post: Callable[[Message], None], lease: float = LEASE,
        settle: Callable[[Sequence[int] | None, int | None], None] = lambda cores, threads: None,
    ) -> None:  # fmt: skip
        self.engine, self.transfer_buffer, self.lease = engine, transfer_buffer, lease
        self._post, self._settle = post, settle
        self._layouts = Layouts(engine.model.config, stores_of(engine))
        self._lender = OwnershipTransfer.of(engine, transfer_buffer, self._layouts)
        self._jobs: dict[str, _Job] = {}
        self._offers: dict[str, _Offer] = {}
        self._arrivals: dict[str, Message] = {}  # to be taken, in order, once there is room
        self._outbox = Outbox(engine, transfer_buffer, post, lease)
        self._inbox = Inbox(engine, transfer_buffer, post, self._layouts, self._resume)
        self._heard, self._unlearned = 0, ""
        self._verbs: dict[str, Callable[[Message], None]] = {
            "add": self._add, "take": self._take, "expect": self._expect, "piece": self._inbox.piece,
            "release": self._release, "keep": self._keep, "renew": self._renew, "cancel": self._cancel,
            "forget": lambda command: self.engine.forget_prefixes(), "spare": self._spare, "learn": self._learn,
            "unlearn": lambda command: forget(self.engine, self._layouts, command["recipes"]),
            "cores": lambda command: self._settle(command["cores"], command["threads"]),
        }  # fmt: skip
        self._state()

    @property
    def idle(self) -> bool:
        """A turn would change nothing but leases."""
        return self.engine.idle and not self._arrivals and not self.engine.departed

    # ---- commands
    @torch.inference_mode()  # as the engine's steps: buffers made in this mode may only be written in it
    def obey(self, command: Message) -> None:
        self._heard = max(self._heard, command["n"])
        self._verbs[command["do"]](command)
        self._balance()
        self._state()

    def _add(self, command: Message) -> None:
        request = request_of(command["request"])
        self._drop(request.id, command["attempt"])
        parent = self._jobs.get(command.get("parent", ""))
        request.parent = None if parent is None else parent.request
        try:
            self.engine.add(request)
        except Exception as error:
            self._progress(_Job(request, command["attempt"], request.known), Departure("failed", str(error)))
            return
        self._jobs[request.id] = _Job(request, command["attempt"], request.known)
        if command.get("push"):
            request.departs = True
            self._outbox.open(request, command["attempt"])

    def _take(self, command: Message) -> None:
        name, attempt = command["id"], command["attempt"]
        self._drop(name, attempt - 1)
        if name in self._jobs or name in self._arrivals:
            return  # said twice, or late
        self._arrivals[name] = command
        self._land()

    def _expect(self, command: Message) -> None:
        name, attempt = command["id"], command["attempt"]
        self._drop(name, attempt - 1)
        if name in self._jobs or name in self._arrivals or name in self._inbox:
            return  # said twice, or late
        if not self._inbox.expect(command, self.engine.parts.clock() + self.lease):
            self._post({"event": "full", "id": name, "attempt": attempt})

    def _keep(self, command: Message) -> None:
        """Send no more pieces. A worker that can goes on with the request; else its KV is offered when it is done."""
        name, attempt = command["id"], command["attempt"]
        self._outbox.keep(name, attempt)
        job = self._jobs.get(name)
        if job is not None and job.attempt == attempt:
            self.engine.keep_local(job.request)

    def _release(self, command: Message) -> None:
        if "pieces" not in command:
            offer = self._offers.get(command["id"])
            if offer is not None and offer.wire is not None and offer.attempt == command["attempt"]:
                offer.wire.delivered(offer.n_bytes, command["seconds"])
            self._give_up(command["id"], command["attempt"])
        self._outbox.release(command["id"], command["attempt"], command.get("pieces"))

    def _renew(self, command: Message) -> None:
        until = self.engine.parts.clock() + self.lease
        for name in command["ids"]:
            if name in self._offers:
                self._offers[name].until = until
            self._outbox.renew(name)
            self._inbox.renew(name, until)

    def _cancel(self, command: Message) -> None:
        self._drop(command["id"], command["attempt"])

    def _spare(self, command: Message) -> None:
        if self._lender is not None:
            self._lender.spare(command["bytes"])

    def _learn(self, command: Message) -> None:
        self._unlearned = learn(self.engine, self._layouts, command["recipes"])

    def _drop(self, name: str, attempt: int) -> None:
        """Forget all about a request, up to this attempt at it."""
        self._give_up(name, attempt)
        self._outbox.release(name, attempt)
        self._inbox.drop(name, attempt)
        if name in self._arrivals and self._arrivals[name]["attempt"] <= attempt:
            del self._arrivals[name]
        if name in self._jobs and self._jobs[name].attempt <= attempt:
            self.engine.cancel(self._jobs.pop(name).request)

    # ---- turns
    @torch.inference_mode()
    def turn(self) -> bool:
        """Take over what has room, one step of the engine, and tell what came of it. -> whether anything did"""
        before = self._held()
        self._land()
        if not self.engine.idle:
            for request in self.engine.step():
                job = self._jobs.get(request.id)
                if job is not None and job.request is request:
                    self._progress(job, request.left)
            self._outbox.send()
        self._put_down()
        self._expire()
        self._balance()
        changed = before != self._held()
        if changed:
            self._state()
        return changed

    def _held(self) -> tuple[int, ...]:
        """Whatever changes in a turn that is worth telling."""
        kept = len(self._arrivals), len(self._offers), len(self._inbox), self._outbox.bytes
        return self._heard, self.engine.counters.steps, self._wish, *kept

    @property
    def _wish(self) -> int:
        """Bytes that its requests would need to grow, and that the pool has not."""
        return 0 if self._lender is None else self._lender.account.wish

    def _balance(self) -> None:
        if self._lender is not None:
            self._lender.balance()

    def _progress(self, job: _Job, left: Departure | None) -> None:
        request, trace = job.request, job.request.trace
        event = {
            "event": "progress", "id": request.id, "attempt": job.attempt, "start": job.told,
            "tokens": request.tokens[job.told :], "left": None if left is None else astuple(left),
            "queued": trace.queued, "recalled": request.recalled, "cached": request.cached,
        }  # fmt: skip
        if request.groups:
            event["groups"] = request.groups_from(max(job.told, request.prompt_len))
        if request.params.scored:
            scores, request.scores = request.scores, {}  # siblings have forked in the step that brought the first token
            if request.pool is not None:
                event["pool"] = [request.pool.upto, request.pool.total.tolist()]
            event["scores"] = [[at, *score] for at, score in scores.items()]
        self._post(event)
        job.told = request.known
        if left is not None:
            self._jobs.pop(request.id, None)
            self._outbox.release(request.id, job.attempt)

    def _put_down(self) -> None:
        """Offer the prompts that are done, as far as the budget has room for what siblings no longer share."""
        departed = self.engine.departed
        for request in list(departed):
            if self._fits(request):
                self._offer(request)
        if departed and not self._offers and not self._outbox.bytes:  # nobody will make room
            request = departed[0]
            job = self._jobs.pop(request.id)
            self._outbox.release(request.id, job.attempt)
            self.engine.depart(request)
            self._post({"event": "expired", "id": request.id, "attempt": job.attempt})

    def _fits(self, request: Request) -> bool:
        """Returns whether a request's rows have room in the transfer buffer once its KV is freed."""
        assert request.kv is not None
        if self._lender is not None:
            return self._lender.fits(request)
        buffers = [slab.buffer for layer in request.kv.layers for slab in layer.slabs]
        more = request.kv.live_bytes - sum(buffer.bytes for buffer in buffers if buffer.refs == 1)
        return more <= 0 or self.engine.prefixes.room(more)

    def _offer(self, request: Request) -> None:
        """A prompt is done: its KV goes to the transfer buffer, where the decoding side can have it at any time."""
        job = self._jobs.pop(request.id)
        try:
            offer, parcel, n_bytes = self._deposit(request, job.attempt)
        except Exception as error:  # the other side computes it again
            log.warning("the KV of %s could not be put down: %s", request.id, error)
            self._outbox.release(request.id, job.attempt)
            self.engine.depart(request)
            self._post({"event": "expired", "id": request.id, "attempt": job.attempt})
            return
        self.engine.depart(request)
        self._hold(n_bytes)
        self.engine.counters.kv_bytes_sent += n_bytes
        self.engine.counters.kv_bytes_exposed += n_bytes
        until = self.engine.parts.clock() + self.lease
        wire = self.engine.runtime(request).store.wire
        self._offers[request.id] = _Offer(job.attempt, parcel, n_bytes, until, wire)
        self._post({"event": "offer", "id": request.id, "attempt": job.attempt, "parcel": parcel} | offer)

    def _deposit(self, request: Request, attempt: int) -> tuple[Message, Parcel, int]:
        """Put down what another worker needs. -> the offer, the parcel and the bytes of rows in it"""
        assert request.kv is not None
        if self._lender is not None:
            packed, parcel = self._lender.put(request, attempt)
            return {"packed": packed, "room": 0}, parcel, 0
        room, live = landing(request.kv), request.kv.live_bytes
        offer, tensors = self._packed(request, attempt)
        parcel = self.transfer_buffer.put(tensors)
        tensors = tensors[offer.get("rows_at", 0) :]
        n_bytes = min(live, sum(tensor.nbytes for tensor in tensors))  # drawers do not count, as before
        return offer | {"room": room}, parcel, n_bytes

    def _packed(self, request: Request, attempt: int) -> tuple[Message, list[Tensor]]:
        """Pack what another worker needs to go on with a request, but for rows that were sent before."""
        layout = self._layouts.of(request.recipe)[1]
        if not self._outbox.pushes(request.id):
            packed, tensors = pack(request, layout, attempt)
            return {"packed": packed}, tensors
        number, blocks = self._outbox.last(request.id)
        packed, tensors = pack(request, layout, attempt, rows=blocks is None)
        push = {"packed": packed, "piece": number, "blocks": None}
        if blocks is None or request.kv is None:
            return push, tensors
        push |= {"blocks": [block.plain() for block in blocks], "rows_at": len(tensors)}
        return push, tensors + cut(request.kv, blocks)

    def _give_up(self, name: str, attempt: int) -> None:
        offer = self._offers.get(name)
        if offer is not None and offer.attempt <= attempt:
            del self._offers[name]
            self.transfer_buffer.drop(offer.parcel)
            self._hold(-offer.n_bytes)

    def _hold(self, n_bytes: int) -> None:
        """Count what lies in the transfer buffer against the budget: it was this engine's a moment ago."""
        self.engine.room.promised += n_bytes
        self.engine.ledger.add(n_bytes)

    def _expire(self) -> None:
        now = self.engine.parts.clock()
        for name in [name for name, offer in self._offers.items() if offer.until < now]:
            attempt = self._offers[name].attempt
            self._give_up(name, attempt)
            self._outbox.release(name, attempt)
            self._post({"event": "expired", "id": name, "attempt": attempt})
        for name, attempt in [*self._outbox.expired(), *self._inbox.expired()]:
            self._drop(name, attempt)
            self._post({"event": "expired", "id": name, "attempt": attempt})

    # ---- taking over
    def _land(self) -> None:
        """Take arrivals over, first come first served, as far as there is room."""
        for name, command in list(self._arrivals.items()):
            if not self._has_room(command["room"]):
                return
            del self._arrivals[name]
            answer = {"id": name, "attempt": command["attempt"]}
            try:
                seconds = self._go_on(command)
            except Exception as error:
                self._post({"event": "refused", **answer, "why": f"{type(error).__name__}: {error}"})
            else:
                self.engine.counters.handoffs += 1
                self._post({"event": "owned", **answer, "seconds": seconds})

    def _has_room(self, n_bytes: int) -> bool:
        """Requests that wait for memory go first, and those that run may grow a bit. What is lent needs no room."""
        engine = self.engine
        if not n_bytes and self._lender is not None:
            return self._lender.welcome()
        if engine.waiting or len(engine.running) + len(self._inbox) >= engine.parts.max_running:
            return False
        return engine.prefixes.room(n_bytes + engine.growth)

    def _go_on(self, command: Message) -> float:
        """-> seconds that the transfer buffer took to bring the rows here"""
        packed, clock = command["packed"], self.engine.parts.clock
        request, began, seconds = request_of(packed["request"]), clock(), 0.0
        if self._lender is not None:
            request.kv, request.state = self._lender.take(packed, command["parcel"])
        else:
            tensors = self.transfer_buffer.get(command["parcel"])
            seconds = clock() - began
            request.kv, request.state = unpack(packed, tensors, *self._layouts.of(request.recipe))
        self._resume(request, command["attempt"])
        return seconds

    def _resume(self, request: Request, attempt: int) -> None:
        try:
            self.engine.resume(request)
        except Exception:
            request.release()
            raise
        self._jobs[request.id] = _Job(request, attempt, request.known)

    # ---- numbers
    def _state(self) -> None:
        engine = self.engine
        prefix = engine.prefix_bytes
        self._post({
            "event": "state",
            "heard": self._heard,
            "counters": engine.counters.as_dict(),
            "by_recipe": engine.by_recipe,
            "kv_bytes": engine.ledger.held - engine.ledger.resident,
            "prefix_bytes": prefix,
            "lora_bytes": engine.lora_bytes,
            "free": engine.ledger.free + prefix + self._inbox.bytes,  # which the router has promised
            "running": len(engine.running),
            "wish": self._wish,
            "waiting": [request.id for request in engine.waiting],
            "arrivals": list(self._arrivals),
            "unlearned": self._unlearned,
        })  # fmt: skip
