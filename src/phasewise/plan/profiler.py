"""Steps of the real engine, of sizes that are asked for, each with what it computed and how long it took."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product

from phasewise import catalog
from phasewise.bench.prompts import Prompts
from phasewise.engine.engine import Engine
from phasewise.errors import UserError
from phasewise.kv.prefix import BLOCK
from phasewise.options import DEFAULTS
from phasewise.plan.cost import StepWork
from phasewise.plan.fit import Timed
from phasewise.request.params import Params
from phasewise.request.request import Request

STEPS, LONG_STEPS = 4, 2  # of a size, one after the other: contexts grow meanwhile; of many rows, fewer
LONG = 128  # rows of a prompt that are many


@dataclass(frozen=True)
class Size:
    """A step's size: rows of a prompt, requests that decode, and the rows that each of them has before. Without any,
    each step has a new prompt, and computes all of it."""

    prefill: int
    decode: int
    context: int

    @property
    def steps(self) -> int:
        """The number of steps that are measured."""
        return LONG_STEPS if self.prefill >= LONG else STEPS

    @property
    def tokens(self) -> int:
        """Tokens that a request of this size needs room for."""
        return self.context + max(self.prefill, 1) * (self.steps + 1) + 2


def sizes(prefills: Sequence[int], decodes: Sequence[int], contexts: Sequence[int]) -> list[Size]:
    """All prompts alone and all decodes alone; of the steps of both, every other one, as on a chessboard."""
    found = []
    for c, (i, p), (j, d) in product(contexts, enumerate((0, *prefills)), enumerate((0, *decodes))):
        if (p or d) and (not p or not d or (i + j + contexts.index(c)) % 2 == 0):
            found.append(Size(p, d, c))
    return found


class StepProfiler:
    """Runs steps of chosen sizes on an otherwise idle engine and times them. `clock` gives seconds."""

    def __init__(
        self, engine: Engine, prompts: Prompts, recipe: str = "", clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.engine, self.prompts, self.recipe, self.clock = engine, prompts, recipe, clock
        self._prompt: list[int] = []

    def check(self, every: Sequence[Size]) -> None:
        """Raise UserError where the model's context or the KV budget is too small for a size."""
        context, limit = self.engine.model.config.max_positions, self.engine.ledger.limit
        for size in every:
            if size.tokens > context:
                raise UserError(f"a step of {size.prefill} prompt rows after {size.context} needs {size.tokens} "
                                f"positions, but the model's context is {context}: ask for smaller ones")  # fmt: skip
            need = (size.decode + 3) * self.engine.recipes[self.recipe].need(size.tokens)
            if need > limit:
                raise UserError(f"{size.decode} requests of {size.tokens} tokens need {need:,} bytes of KV, but the "
                                f"budget is {limit:,}: raise --kv-bytes, or ask for smaller steps")  # fmt: skip
            if size.decode >= self.engine.parts.max_running:
                raise UserError(f"{size.decode} decodes at once need --max-running {size.decode + 1} or more")

    def measure(self, size: Size, rounds: int) -> list[Timed]:
        """Steps of about this size, each with its median time over the rounds."""
        return medians([self.run(size) for _ in range(rounds)])

    def keep_at(self, size: Size, steps: int, told: Callable[[], object], enough: Callable[[], bool]) -> None:
        """Run so many steps of about this size, or until `enough`; `told` is called after each."""
        with self._set(size, steps):
            for _ in range(steps):
                if enough():
                    return
                self._next(size)
                self.engine.step()
                told()

    def leave(self) -> None:
        """Nothing stays behind."""
        self.engine.forget_prefixes()
        self._prompt = []

    def run(self, size: Size) -> list[Timed]:
        """Its steps, once."""
        with self._set(size, size.steps):
            return [self._timed(size) for _ in range(size.steps)]

    @contextmanager
    def _set(self, size: Size, steps: int) -> Iterator[None]:
        """The engine is about to make so many steps of a size."""
        prompt = self._known(size)
        try:
            decoding = [self._add(prompt, steps + 8) for _ in range(size.decode)]
            self._until(lambda: all(request.n_out > 0 for request in decoding))
            if size.prefill:
                self._plan(size.prefill + size.decode)
            if size.prefill and size.context:
                rest = self.prompts(size.prefill * (steps + 1))
                self._add(prompt[: size.context // BLOCK * BLOCK] + rest, 1)
            self._next(size)
            self.engine.step()  # warms up, and admits
            yield
        finally:
            for request in (*self.engine.running, *self.engine.waiting):
                self.engine.cancel(request)

    def _known(self, size: Size) -> list[int]:
        """A prompt whose whole blocks are in the prefix cache; the same one as long as contexts are the same."""
        n = size.context + (size.context % BLOCK == 0)  # all but its last row is in whole blocks
        self._plan(max(size.context, 512) + size.decode)
        if len(self._prompt) != n:
            self.engine.forget_prefixes()
            self._prompt = self.prompts(n)
            if n > BLOCK:
                self._finish(self._add(self._prompt, 1))
        return self._prompt

    def _next(self, size: Size) -> None:
        if size.prefill and not size.context:
            self._add(self.prompts(size.prefill), 1)

    def _timed(self, size: Size) -> Timed:
        self._next(size)
        there = (*self.engine.running, *self.engine.waiting)
        before = {request: (request.computed, request.prefilling) for request in there}
        start = self.clock()
        self.engine.step()
        seconds = self.clock() - start
        return Timed(_step(before), seconds)

    def _plan(self, rows: int) -> None:
        """Limit steps to so many rows from now on, decodes first."""
        self.engine.parts.schedule = catalog.build("schedule", f"{DEFAULTS['schedule']}:budget={rows}")

    def _add(self, prompt: Sequence[int], new: int) -> Request:
        request = Request(prompt, Params(max_tokens=new, ignore_eos=True), recipe=self.recipe)
        self.engine.add(request)
        return request

    def _finish(self, request: Request) -> None:
        self._until(lambda: request.left is not None)

    def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            if self.engine.idle:
                raise UserError("a request that was to be measured has left early: is its recipe one that decodes?")
            self.engine.step()


def medians(runs: Sequence[Sequence[Timed]]) -> list[Timed]:
    """Returns the median time of each step over several runs of the same steps."""
    return [Timed(same[0].step, statistics.median(one.seconds for one in same)) for same in zip(*runs, strict=True)]


def _step(before: dict[Request, tuple[int, bool]]) -> StepWork:
    """Returns the work of a step, from where its requests were before and are now."""
    step = StepWork()
    for request, (computed, prefilling) in before.items():
        rows = request.computed - computed
        if prefilling:
            step.prefill_rows += rows
            step.pairs += computed * rows + rows * (rows + 1) / 2
            step.prefixes += request.computed if rows else 0
            step.emits += not request.prefilling
            step.ended += 0 if request.prefilling else request.prompt_len
        else:
            step.decode_rows += rows
            step.context += request.computed
            step.emits += rows
    return step


def halfway(values: Sequence[int]) -> list[int]:
    """Between each two of a grid: where a fit has seen nothing."""
    return [round((a * b) ** 0.5) for a, b in zip(values, values[1:])]  # noqa: RUF007


def spared(size: Size, engine: Engine) -> Size:
    """The same, with a context that leaves room for its steps."""
    return replace(size, context=min(size.context, engine.model.config.max_positions - (size.tokens - size.context)))
