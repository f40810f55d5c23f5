"""The place of a draft worker: the engine's thread, or a process that works while the engine does. Both get the same
messages in the same order, so both say the same.

The process is a child (child.py): it loads the draft model by itself, has threads of its own, and ends when the engine
hangs up.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from phasewise.child import Channel, Child, name_process
from phasewise.methods.draft._desk import Desk, Guessed, Order
from phasewise.model.model import Model
from phasewise.speculation.companion import common

log = logging.getLogger(__name__)
LIVES = 3  # processes that may die one after the other without an answer
LOADING, SILENT = 600.0, 60.0  # seconds without a word, before its first one and later, after which it counts as dead
Answers = dict[int, Guessed]  # by key


class Seat(ABC):
    """Takes orders, and gives the answers when they are asked for. At most one order of a key is out."""

    def __init__(self) -> None:
        self.passes = 0  # of the draft model, for answers that were heard
        self._awaited: dict[int, Order] = {}
        self._answers: Answers = {}

    def post(self, orders: Sequence[Order]) -> None:
        """Does not wait for anything. The orders' lists are not changed later."""
        self._awaited |= {order.key: order for order in orders}
        if orders:
            self._post(orders)

    def hear(self, key: int) -> Guessed:
        """The guesses of the order that is out, when they are there; none without an order, or without a desk."""
        while key in self._awaited:
            answers, passes = self._next()
            heard = [each for each in answers if self._awaited.pop(each, None) is not None]
            self._answers |= {each: answers[each] for each in heard}
            self.passes += passes if heard else 0
        return self._answers.pop(key, Guessed())

    def forget(self, key: int) -> None:
        self._awaited.pop(key, None)
        self._answers.pop(key, None)
        self._forget(key)

    @abstractmethod
    def close(self) -> None:
        """Whatever works for it ends, and orders that are out are lost. What is posted later starts it again."""

    @abstractmethod
    def _post(self, orders: Sequence[Order]) -> None: ...

    @abstractmethod
    def _next(self) -> tuple[Answers, int]:
        """The answers to the oldest call for which there are none yet, and the passes they took."""

    @abstractmethod
    def _forget(self, key: int) -> None: ...


class Inline(Seat):
    """In this thread: it works when it is asked for answers. The twin of `Process`."""

    def __init__(self, desk: Desk) -> None:
        super().__init__()
        self.desk = desk
        self._queue: deque[Sequence[Order] | int] = deque()  # orders, and keys to be forgotten

    def close(self) -> None:
        self._awaited.clear()
        self._settle()

    def _post(self, orders: Sequence[Order]) -> None:
        self._queue.append(orders)

    def _next(self) -> tuple[Answers, int]:
        while isinstance(message := self._queue.popleft(), int):
            self.desk.forget(message)
        before = self.desk.passes
        try:
            found = self.desk.work(message)
        except Exception:  # as when the process dies of it: no guesses
            log.exception("the draft model failed, and guesses nothing for this step")
            found = [Guessed() for _ in message]
        return {order.key: guesses for order, guesses in zip(message, found)}, self.desk.passes - before

    def _forget(self, key: int) -> None:
        self._queue.append(key)
        if not self._awaited:
            self._settle()

    def _settle(self) -> None:
        """Nobody will ask for the answers to what is there."""
        for message in self._queue:
            if isinstance(message, int):
                self.desk.forget(message)
        self._queue.clear()


@dataclass(frozen=True, slots=True)
class Furniture:
    """The configuration of a draft worker in another process."""

    path: str  # of the draft model
    dtype: str
    device: str
    sample: str
    threads: int
    tells: bool = False  # what guesses were drawn from


class Process(Seat):
    """In a process of its own, which begins with the first order. If it dies, another one gets the orders that are out
    in full; after `LIVES` deaths in a row nothing is guessed any more."""

    def __init__(self, furniture: Furniture) -> None:
        super().__init__()
        self.furniture = furniture
        self._told: dict[int, list[int]] = {}  # the texts that the process has
        self._children: list[Child] = []  # at most one; the finalizer has this list
        self._ready = False  # the child has said something
        self._deaths = 0
        weakref.finalize(self, _dismiss, self._children)

    @property
    def pid(self) -> int | None:
        return self._children[0].pid if self._children else None

    def close(self) -> None:
        self._awaited.clear()
        self._end()

    def _end(self) -> None:
        _dismiss(self._children)
        self._told.clear()

    def _post(self, orders: Sequence[Order]) -> None:
        if self._deaths >= LIVES:
            self._awaited.clear()
            return
        try:
            child = self._child()
            child.channel.send({"orders": [self._plain(order) for order in orders]})
        except OSError as error:
            self._died(error)

    def _plain(self, order: Order) -> list[Any]:
        """The part of an order that the process does not know yet."""
        told = self._told.get(order.key)
        kept = 0 if told is None else common(told, order.tokens)
        self._told[order.key] = order.tokens
        return [order.key, order.about if told is None else None, kept, order.tokens[kept:], order.guesses]

    def _next(self) -> tuple[Answers, int]:
        try:
            message = self._child().channel.receive(SILENT if self._ready else LOADING)
        except (EOFError, OSError) as error:
            self._died(error)
            return {}, 0
        self._ready = True
        if "answers" not in message:
            return {}, 0
        self._deaths = 0
        return {key: _read(*guesses) for key, *guesses in message["answers"]}, message["passes"]

    def _forget(self, key: int) -> None:
        if self._told.pop(key, None) is not None and self._children:
            with contextlib.suppress(OSError):  # whoever posts next will see that it is dead
                self._children[0].channel.send({"forget": [key]})

    def _child(self) -> Child:
        """The process that is there, or a new one."""
        if not self._children:
            self._children.append(self._start())
            self._ready = False
        return self._children[0]

    def _start(self) -> Child:
        return Child(f"{__name__}:work", asdict(self.furniture))

    def _died(self, error: Exception) -> None:
        """Go on with another one, or without."""
        self._end()
        self._deaths += 1
        words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if self._deaths >= LIVES:
            same = "sampled tokens have the same distribution" if self.furniture.tells else "tokens are the same"
            log.warning("the draft model's process was lost again (%s): from here on nothing is guessed, and %s",
                        words, same)  # fmt: skip
        else:
            log.warning("the draft model's process was lost (%s): it is started again, and tokens are the same", words)
        self._post(list(self._awaited.values()))


def _dismiss(children: list[Child]) -> None:
    for child in children:
        child.kill()  # it has nothing to save
    children.clear()


# ---- guesses in a message: their tokens, and the bytes of their q
def _written(guesses: Guessed) -> tuple[list[int], str]:
    q = b"" if guesses.q is None else guesses.q.float().cpu().numpy().tobytes()
    return guesses.tokens, base64.b64encode(q).decode()


def _read(tokens: list[int], q: str) -> Guessed:
    if not q:
        return Guessed(tokens)
    rows = np.frombuffer(bytearray(base64.b64decode(q)), np.float32)
    return Guessed(tokens, torch.from_numpy(rows).view(len(tokens), -1))


# ---- in the process
def serve(channel: Channel, desk: Desk) -> None:
    """Obey until the other end hangs up."""
    texts: dict[int, tuple[dict[str, Any], list[int]]] = {}
    while True:
        try:
            message = channel.receive()
        except (EOFError, OSError):
            return
        for key in message.get("forget", ()):
            texts.pop(key, None)
            desk.forget(key)
        orders = []
        for key, about, kept, tokens, guesses in message.get("orders", ()):
            known, text = texts.get(key, (about, []))
            texts[key] = known, text[:kept] + tokens
            orders.append(Order(key, *texts[key], guesses))
        if orders:
            before = desk.passes
            found = [[order.key, *_written(guesses)] for order, guesses in zip(orders, desk.work(orders))]
            try:
                channel.send({"answers": found, "passes": desk.passes - before})
            except OSError:
                return


def work(channel: Channel, **configuration: Any) -> None:
    """Be the draft worker of a `Furniture` until the engine hangs up."""
    name_process("phasewise-draft")
    furniture = Furniture(**configuration)
    torch.set_num_threads(furniture.threads)
    dtype = getattr(torch, furniture.dtype)
    model = Model.load(furniture.path, dtype=dtype, device=furniture.device)
    desk = Desk(model, furniture.sample, furniture.tells)
    with contextlib.suppress(OSError):
        channel.send({})  # it is there
        serve(channel, desk)
