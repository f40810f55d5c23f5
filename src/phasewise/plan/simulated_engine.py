"""An engine whose executor answers with numbers: the real queues, admission, prefix cache and scheduler around it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from phasewise.engine.admission import Admission
from phasewise.engine.queues import Queues
from phasewise.errors import UserError
from phasewise.kv.buffer import Ledger, stride
from phasewise.plan.beside import Beside, slowed
from phasewise.plan.cost import Cost, StepWork
from phasewise.plan.decode_run import DecodeRun
from phasewise.plan.drafts import NONE, Drafts
from phasewise.plan.fit import Path, path_of
from phasewise.plan.memory import NumberRuntime, NumberStore
from phasewise.plan.sequence import SimulatedSequence
from phasewise.plan.serving import Serving
from phasewise.request.counters import Counters
from phasewise.verbs.schedule import Scheduler, Work
from phasewise.verbs.traits import MARGIN

TURNS = 2.0  # two who share a core take turns; a worker's threads wait for each other, so all for the one with half


@dataclass(frozen=True)
class EngineSettings:
    """The settings that all workers' engines share. `schedule` makes a scheduler for one; `layers`: of the model;
    `stages`: of each worker, as many steps of which may be under way, each with requests of its own. `decodes_all`: the
    scheduler's trait of this name."""

    schedule: Callable[[], Scheduler]
    row_bytes: int
    layers: int
    max_running: int = 64
    prefix_cache: bool = False
    drafts: Drafts = NONE
    stages: int = 1
    decodes_all: bool = False


class UnderWay(NamedTuple):
    """A step that is not over. `kept`: the KV that each request had, where there are stages; one that was preempted
    meanwhile has another."""

    works: Sequence[Work]
    kept: Sequence[Any] | None


class SimulatedEngine:
    """Steps of one engine in virtual time. `departs`: all requests leave when their prompt is done (a prefill worker);
    elsewhere those leave that say so. `busy` is the time spent in steps, seconds.

    It has what the parts of a real engine ask of theirs: queues, recipes, a ledger and a prefix cache.
    """

    def __init__(self, settings: EngineSettings, cost: Cost, ledger: Ledger, departs: bool = False) -> None:
        self.settings, self.cost, self.departs = settings, cost, departs
        self.counters = Counters()
        self.store = NumberStore(settings.row_bytes, ledger, settings.prefix_cache)
        self.ledger, self.prefixes = ledger, self.store.prefixes
        self._runtime = NumberRuntime(self.store)
        self.recipes: dict[str, Any] = {"": self._runtime}
        self.max_running, self.row_bytes = settings.max_running, settings.row_bytes
        self.parts = self  # `max_running`, `row_bytes` and `recipes` are all that is asked of them
        self.queues = Queues()
        self.waiting = cast("list[SimulatedSequence]", self.queues.waiting)
        self.running = cast("list[SimulatedSequence]", self.queues.running)
        self.departed = cast("list[SimulatedSequence]", self.queues.departed)
        self.room = Admission(self.recipes, self.queues, self.counters, self._no_room, settings.max_running)
        self.schedule = settings.schedule()
        self.busy = 0.0
        self.beside: Beside = {}  # how much longer a step takes where memory is shared ...
        self.others: list[Path] = []  # ... with those who are at steps of these kinds
        self.shared: Beside = {}  # ... and where cores are
        self.sharers: list[Path] = []
        self.path: Path = "decode"  # of the step under way
        self.served = Serving()  # what its server adds to its steps
        self.joules = self.money = 0.0
        self.every_token = False  # whether `finish` names all that got tokens, in `written`
        self.written: list[SimulatedSequence] = []
        self.gained = 0  # tokens of the last step that was finished
        self.failed: list[SimulatedSequence] = []  # found no room although nobody else holds any
        self.advanced = False  # whether there is more of some prompt since the step before, computed or found
        self._found = False  # whether the step under way has found some of a prompt in the prefix cache
        self.under_way: deque[UnderWay] = deque()  # steps, the oldest first
        self.free = [0.0] * settings.stages  # when each stage is
        self.guesses = 0  # the most that a request brings to the step that begins
        self.runs = settings.decodes_all and settings.stages == 1 and not settings.drafts.depth  # may have a `_run`
        self._run: DecodeRun | None = None  # the steps since it began are not written into the requests yet
        self._calm = False  # the last step was decodes alone, and all of them go on
        self._running_on = False  # the step under way is one of `_run`

    # ---- requests
    def runtime(self, request: object) -> NumberRuntime:
        return self._runtime

    def check(self, prompt_len: int, limit: int) -> None:
        """Raise UserError for a request that could never run here; `limit`: tokens that it can ever hold."""
        tokens = (prompt_len if self.departs else limit) + MARGIN
        if (need := self._runtime.need(tokens)) > self.ledger.limit:
            raise UserError(
                f"the request may need {need:,} bytes of KV ({tokens} tokens), but the budget is "
                f"{self.ledger.limit:,}: raise --kv-bytes or lower max_tokens"
            )

    def add(self, job: SimulatedSequence) -> None:
        """Accept a request. Raises UserError if it could never run here."""
        self.check(job.prompt_len, job.limit)
        self._take(job)
        self.queues.join(cast(Any, job), self.queues.waiting)

    def resume(self, job: SimulatedSequence) -> None:
        """Take over a request whose KV is here."""
        self._take(job)
        self.queues.join(cast(Any, job), self.queues.running)

    def _take(self, job: SimulatedSequence) -> None:
        self.settle()
        job.layers = self.settings.layers
        job.guess(self.settings.drafts)

    def drop(self, job: SimulatedSequence) -> None:
        """Forget a request, which somebody else goes on with or nobody wants: its memory is free again."""
        self.settle()
        self.queues.drop(cast(Any, job))
        job.release()

    def keep_local(self, job: SimulatedSequence) -> None:
        """Nobody will take over a request: it goes on here, if this engine can."""
        self.settle()
        job.departs = False
        if job in self.departed and not self.departs:
            self.queues.move(cast(Any, job), self.queues.running)

    def _no_room(self, request: Any) -> None:
        """The KV budget is exhausted by this request alone."""
        job: SimulatedSequence = request
        job.left = "the KV budget is exhausted: raise --kv-bytes"
        self.drop(job)
        self.failed.append(job)

    @property
    def growth(self) -> int:
        """KV bytes that let every running request grow a bit."""
        ahead = 0 if self._run is None else self._run.steps
        return sum(stride(job.known + ahead) for job in self.running) * self.row_bytes

    # ---- steps
    def begin(self, now: float) -> tuple[float, float] | None:
        """Plan a step. Returns when the next one may begin, and when this one is over: the same where there is one
        stage. None where there is nothing to do, or no room."""
        if self._run is not None or self._calm:
            step = self._run_on()
            if step is not None:
                return self._spend(step, 0, now)
        if self.waiting:
            self._admit()
        one = self.settings.stages == 1
        live = self.running if one else self._live()
        if not live:
            return None
        planned = self.room.reserve(self.schedule.plan(live, now))
        works = [work for work in planned if work.job.kv is not None]
        if not works:
            return None
        step, done = self._step(works, now)
        self.under_way.append(UnderWay(works, None if one else [work.job.kv for work in works]))
        return self._spend(step, done, now)

    def _run_on(self) -> StepWork | None:
        """The next step of a run of decodes, which begins if it can; None where the run is over."""
        self._calm = False
        if self.waiting:
            self.settle()
            return None
        if self._run is None:
            self._run = DecodeRun(self.running, self.store.room)
        step = self._run.begin()
        if step is None:
            self.settle()
        else:
            self._running_on, self.guesses = True, 0
        return step

    def settle(self) -> None:
        """Write the steps of a run of decodes into its requests, before anybody looks at them or changes who runs."""
        self._calm = False
        if self._run is None:
            return
        self._run.write()
        self._run = None
        if self._running_on:
            self._running_on = False
            self.under_way.append(UnderWay([Work(job, 1) for job in self.running], None))

    def _spend(self, step: StepWork, done: int, now: float) -> tuple[float, float]:
        """A step takes its time. Returns what `begin` does."""
        price = self.cost.price(step)
        seconds = price.seconds + self.guesses * self.settings.drafts.seconds
        if self.beside or self.sharers:
            self.path = path_of(step)
            seconds *= slowed(self.beside, self.path, self.others)
            seconds *= slowed(self.shared, self.path, self.sharers, TURNS)
        seconds += self.served.added(step, done)
        self.joules += price.joules
        self.money += price.money
        self.counters.steps += 1
        if self.settings.stages == 1:
            self.busy += seconds
            self.free[0] = over = now + seconds
            return over, over
        return self._through(now, seconds / self.settings.stages)

    def _live(self) -> list[SimulatedSequence]:
        """Returns the requests that may join another step: none twice, and as many for each stage."""
        busy = {id(work.job) for step in self.under_way for work in step.works}
        most = -(-len(self.running) // self.settings.stages)
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
            if not self.room.open(tokens, cast(Any, self._runtime)):
                return
            job.kv = self.store.open(job, tokens)
            if job.computed:
                self.counters.prefix_hits += job.computed
                self._found = True
            self.queues.move(cast(Any, job), self.queues.running)

    def _step(self, works: Sequence[Work], now: float) -> tuple[StepWork, int]:
        """Sum up what the works compute, and count the prompts that are done with it. A part of the depth counts as a
        part of the rows."""
        step, done = StepWork(), 0
        decodes = context = 0
        self.guesses = 0
        for work in works:
            job, rows = work.job, work.rows
            if job.prefilling:
                share = 1.0 if work.layers is None else (work.layers[1] - work.layers[0]) / self.settings.layers
                step.prefill_rows += rows * share  # type: ignore[assignment]
                step.pairs += (job.computed * rows + rows * (rows + 1) / 2) * share
                step.prefixes += int((job.computed + rows) * share)
                if job.stamps.begun is None:
                    job.stamps.begun = now
                last = work.layers is None or work.layers[1] == self.settings.layers
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
        return step, done

    def finish(self, now: float) -> list[SimulatedSequence]:
        """The oldest step is over. Returns the requests with news: their first token, or their last. Those whose prompt
        is done and that depart are in `departed`, with their KV. With `every_token`, those that got other tokens are in
        `written`."""
        out, written = list[SimulatedSequence](), list[SimulatedSequence]()
        self.advanced, self._found = self._found, False
        if self._running_on and self._run is not None:
            self._running_on = False
            gained = self._run.finish(now)
            self._count(gained, gained, written)
            return out
        works, kept = self.under_way.popleft()
        every, gained, rows = self.every_token, 0, 0
        plain = not self.settings.drafts.depth
        for i, work in enumerate(works):
            job: SimulatedSequence = work.job
            if job.kv is None or (kept is not None and job.kv is not kept[i]):
                continue  # preempted for another's rows, or cancelled
            rows += work.rows
            was, before = job.prefilling, job.computed
            if plain and not was and before >= job.high_water and before + 1 == job.known and work.layers is None:
                over = job.write(now)  # most tokens, by far
            elif self._advance(work, job, now):
                over = job.left is not None
            else:
                continue
            gained += job.gained
            if over:
                self.drop(job)
            elif was and (job.departs or self.departs) and not job.prefilling:
                self.queues.move(cast(Any, job), self.queues.departed)
            if was or over:
                out.append(job)
            elif every:
                written.append(job)
        self._calm = self.runs and not every and not out and gained == rows == len(self.running)
        self._count(rows, gained, written)
        return out

    def _count(self, rows: int, gained: int, written: list[SimulatedSequence]) -> None:
        """Note what the step that is over came to: rows computed, tokens, and whose tokens are told."""
        self.counters.rows += rows
        self.counters.emitted += gained
        self.gained, self.written = gained, written

    def _advance(self, work: Work, job: SimulatedSequence, now: float) -> bool:
        """A step has run this work. Returns whether it brought tokens."""
        counters = self.counters
        was, before = job.prefilling, job.computed
        guesses = 0 if was else max(0, before + work.rows - job.known)
        emits = job.advance(work.rows, work.layers, now)
        if before < job.high_water:
            counters.recomputed += min(job.computed, job.high_water) - before
        job.high_water = max(job.high_water, job.computed)
        if was:
            self.advanced = True
            if not job.prefilling:
                self.store.remember(job)
        if emits and guesses:
            counters.drafted += guesses
            counters.accepted += job.gained - 1
        return emits
