"""A worker with an executor that answers with numbers: the engine's queues, admission, prefix cache and scheduler."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from phasewise.engine.admission import Admission
from phasewise.engine.queues import Queues
from phasewise.kv.buffer import Ledger, stride
from phasewise.plan.beside import Beside, slowed
from phasewise.plan.cost import Cost, Step
from phasewise.plan.drafts import NONE, Drafts
from phasewise.plan.fit import Path, path_of
from phasewise.plan.job import Job
from phasewise.plan.memory import NumberStore, Recipe
from phasewise.plan.serving import Serving
from phasewise.request.counters import Counters
from phasewise.verbs.host import MARGIN
from phasewise.verbs.schedule import Scheduler, Work

TURNS = 2.0  # two who share a core take turns; a worker's threads wait for each other, so all for the one with half


@dataclass(frozen=True)
class Engine:
    """What the engines of all workers have in common. `schedule` makes a scheduler for one; `layers`: of the model;
    `stages`: of each worker, as many steps of which may be under way, each with requests of its own."""

    schedule: Callable[[], Scheduler]
    row_bytes: int
    layers: int
    max_running: int = 64
    prefix_cache: bool = False
    drafts: Drafts = NONE
    stages: int = 1


class UnderWay(NamedTuple):
    """A step that is not over. `prompts`: whether some of its works compute prompts."""

    works: Sequence[Work]
    kept: Sequence[Any] | None  # the KV that each had, where there are stages: who was preempted meanwhile has another
    prompts: bool


class Station:
    """Steps of one engine in virtual time. `departs`: requests leave when their prompt is done, as all do (a prefill
    worker) or as they say themselves. `busy` is the time spent in steps."""

    def __init__(self, engine: Engine, cost: Cost, ledger: Ledger, departs: bool = False) -> None:
        self.engine, self.cost, self.departs = engine, cost, departs
        self.counters = Counters()
        self.store = NumberStore(engine.row_bytes, ledger, engine.prefix_cache)
        self.recipe = Recipe(self.store)
        self.recipes: dict[str, Any] = {"": self.recipe}
        self.max_running, self.row_bytes = engine.max_running, engine.row_bytes
        self.queues = Queues()
        self.waiting = cast("list[Job]", self.queues.waiting)
        self.running = cast("list[Job]", self.queues.running)
        self.departed = cast("list[Job]", self.queues.departed)
        self.room = Admission(self.recipes, self.queues, self.counters, self._no_room, engine.max_running)
        self.schedule = engine.schedule()
        self.busy = 0.0
        self.beside: Beside = {}  # how much longer a step takes where memory is shared ...
        self.others: list[Path] = []  # ... with those who are at steps of these kinds
        self.shared: Beside = {}  # ... and where cores are
        self.sharers: list[Path] = []
        self.path: Path = "decode"  # of the step under way
        self.served = Serving()  # what its server adds to its steps
        self.joules = self.money = 0.0
        self.out: list[Job] = []  # who got tokens in the last step, or left
        self.under_way: deque[UnderWay] = deque()  # steps, the oldest first
        self.free = [0.0] * engine.stages  # when each stage is
        self.guesses = 0  # the most that a request brings to the step that begins

    # ---- requests
    def add(self, job: Job) -> bool:
        """Accept a request; False if it could never run here."""
        tokens = (job.prompt_len if self.departs else job.limit) + MARGIN
        if self.recipe.need(tokens) > self.store.ledger.limit:
            return False
        self._take(job)
        self.queues.join(cast(Any, job), self.queues.waiting)
        return True

    def resume(self, job: Job) -> None:
        """Take over a request whose KV is here."""
        self._take(job)
        self.queues.join(cast(Any, job), self.queues.running)

    def _take(self, job: Job) -> None:
        job.layers = self.engine.layers
        job.guess(self.engine.drafts)

    def depart(self, job: Job) -> None:
        """Somebody else goes on with it: its memory is free again."""
        self.queues.drop(cast(Any, job))
        job.release()

    def _no_room(self, request: Any) -> None:
        """The KV budget is exhausted by this request alone."""
        job: Job = request
        job.left = "failed"
        self.queues.drop(request)
        job.release()
        self.out.append(job)

    @property
    def growth(self) -> int:
        """KV bytes that let every running request grow a bit."""
        return sum(stride(job.known) for job in self.running) * self.engine.row_bytes

    # ---- steps
    def begin(self, now: float) -> tuple[float, float] | None:
        """Plan a step. -> when the next one may begin, and when this one is over: the same where there is one stage;
        None where there is nothing to do, or no room"""
        self.out = []
        if self.waiting:
            self._admit()
        one = self.engine.stages == 1
        live = self.running if one else self._live()
        if not live:
            return None
        planned = self.room.reserve(self.schedule.plan(live, now))
        works = [work for work in planned if work.job.kv is not None]
        if not works:
            return None
        step, prompts, done = self._step(works)
        self.under_way.append(UnderWay(works, None if one else [work.job.kv for work in works], prompts))
        price = self.cost.price(step)
        seconds = price.seconds + self.guesses * self.engine.drafts.seconds
        if self.beside or self.sharers:
            self.path = path_of(step)
            seconds *= slowed(self.beside, self.path, self.others)
            seconds *= slowed(self.shared, self.path, self.sharers, TURNS)
        seconds += self.served.added(step, done)
        self.joules += price.joules
        self.money += price.money
        self.counters.steps += 1
        if one:
            self.busy += seconds
            self.free[0] = over = now + seconds
            return over, over
        return self._through(now, seconds / self.engine.stages)

    def _live(self) -> list[Job]:
        """Who may join another step: nobody twice, and no more than leaves as many for each stage."""
        busy = {id(work.job) for step in self.under_way for work in step.works}
        most = -(-len(self.running) // self.engine.stages)
        return [job for job in self.running if id(job) not in busy][:most]

    def _through(self, now: float, each: float) -> tuple[float, float]:
        """A step goes through all stages, each as long, and waits where the one before it is still there."""
        self.busy += each
        at = now
        for stage, free in enumerate(self.free):
            at = self.free[stage] = max(at, free) + each
        return self.free[0], at

    def _admit(self) -> None:
        for job in list(self.waiting):
            tokens = job.known + 1
            if not self.room.open(tokens, cast(Any, self.recipe)):
                return
            job.kv = self.store.open(job, tokens)
            self.counters.prefix_hits += job.computed
            self.queues.move(cast(Any, job), self.queues.running)

    def _step(self, works: Sequence[Work]) -> tuple[Step, bool, int]:
        """What the works compute, whether prompts are among it, and how many of them are done with it. A part of the
        depth counts as a part of the rows."""
        step, prompts, done = Step(), False, 0
        decodes = context = 0
        self.guesses = 0
        for work in works:
            job, rows = work.job, work.rows
            if job.prefilling:
                prompts = True
                share = 1.0 if work.layers is None else (work.layers[1] - work.layers[0]) / self.engine.layers
                step.prefill_rows += rows * share  # type: ignore[assignment]
                step.pairs += (job.computed * rows + rows * (rows + 1) / 2) * share
                step.prefixes += int((job.computed + rows) * share)
                last = work.layers is None or work.layers[1] == self.engine.layers
                if last and job.computed + rows >= job.prompt_len:
                    done += 1
                    step.emits += 1
                    step.ended += job.prompt_len
            else:
                decodes += rows
                context += job.computed + rows
                step.emits += 1
                guesses = job.computed + rows - job.known
                if guesses > 0:  # all rows of a request read its KV together, but each sees it
                    self.guesses = max(self.guesses, guesses)
                    step.emits += guesses
                    step.pairs += job.computed * (rows - 1) + rows * (rows - 1) / 2
        step.decode_rows, step.context = decodes, context
        return step, prompts, done

    def finish(self, now: float) -> list[Job]:
        """The oldest step is over. -> the requests that got a token, or left; those whose prompt is done and that
        depart are among them, out of the queues and with their KV"""
        counters, self.out = self.counters, []
        works, kept, _ = self.under_way.popleft()
        for i, work in enumerate(works):
            job: Job = work.job
            if job.kv is None or (kept is not None and job.kv is not kept[i]):
                continue  # preempted for another's rows, or cancelled
            was, before = job.prefilling, job.computed
            counters.rows += work.rows
            guesses = 0 if was else max(0, before + work.rows - job.known)
            emits = job.advance(work.rows, work.layers, now)
            if before < job.high_water:
                counters.recomputed += min(job.computed, job.high_water) - before
            if job.computed > job.high_water:
                job.high_water = job.computed
            if not emits:
                continue
            counters.emitted += job.gained
            if guesses:
                counters.drafted += guesses
                counters.accepted += job.gained - 1
            if was:
                self.store.remember(job)
            if job.left is not None:
                self.queues.drop(cast(Any, job))
                job.release()
            elif was and (job.departs or self.departs) and not job.prefilling:
                self.queues.move(cast(Any, job), self.queues.departed)
            self.out.append(job)
        return self.out
