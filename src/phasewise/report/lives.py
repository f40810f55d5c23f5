"""Turns a server's event stream (docs/events.md) into lives of requests and activities of workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

WAITING, PREFILL, HANDOFF, DECODE = "waiting", "prefill", "hand-off", "decode"
PHASES = (WAITING, PREFILL, HANDOFF, DECODE)
STAGES = ("waiting for prefill", "prefill", "waiting for the hand-off", "hand-off", "decode")


class LifeSpan(NamedTuple):
    """A phase of a request, and the worker whose doing it is: "" where it waits for one, or where it was not told."""

    phase: str
    start: float
    end: float
    worker: str = ""


@dataclass
class Life:
    """One request: its stages in order of time, seconds of the server's clock, and whose doing each was."""

    number: int
    prompt_tokens: int = 0
    recipe: str = ""
    output_tokens: int = 0
    how: str | None = None  # finished, cancelled, failed; None: still there when the recording ended
    stages: list[tuple[float, str, str]] = field(default_factory=list)

    def at(self, what: str) -> float | None:
        """When a stage last came."""
        return next((at for at, each, _ in reversed(self.stages) if each == what), None)

    def spans(self, end: float) -> list[LifeSpan]:
        """One after the other; what has not ended by then ends at `end`. KV on its way is its sender's doing."""
        found: list[LifeSpan] = []
        state, since, by = "", 0.0, ""
        for at, what, worker in sorted(self.stages, key=lambda each: each[0]):
            then = _after(state, what)
            worker = by if then == state == HANDOFF else "" if then == WAITING else worker
            if (then, worker) != (state, by):
                if state:
                    found.append(LifeSpan(state, since, at, by))
                state, since, by = then, at, worker
        if state:
            found.append(LifeSpan(state, since, end, by))
        return [span for span in found if span.end > span.start]

    def parts(self) -> dict[str, float] | None:
        """Seconds in each of the STAGES; None unless it was handed over once, without detours, and has left."""
        names = ("queued", "admitted", "first_token", "sent", "owned", "left")
        at = [self.at(name) for name in names]
        if any(each is None for each in at) or len(self.stages) != len(names):
            return None
        times = [float(each) for each in at if each is not None]
        lengths = [b - a for a, b in pairwise(times)]
        return dict(zip(STAGES, lengths)) if min(lengths) >= 0 else None


def _after(state: str, what: str) -> str:
    """The phase that a stage begins."""
    if what in ("queued", "preempted"):
        return WAITING
    if what == "admitted":
        return PREFILL
    if what == "sent":
        return HANDOFF
    if what == "left":
        return ""
    return state if state == HANDOFF and what == "first_token" else DECODE  # pieces may set out before a prompt is done


@dataclass(frozen=True)
class Moment:
    """The state of the engine after a step."""

    at: float
    waiting: int
    running: int
    kv_bytes: int
    prefix_bytes: int


@dataclass(frozen=True)
class WorkerActivity:
    """The activity of a worker between two looks, up to `at`."""

    at: float
    worker: str
    prefill: int  # rows
    decode: int
    drafted: int
    accepted: int


@dataclass
class Recording:
    """All that a stream told."""

    lives: list[Life]
    moments: list[Moment]
    work: list[WorkerActivity]
    kv_limit: int = 0
    dropped: int = 0

    @property
    def start(self) -> float:
        """When the first thing was told of."""
        return min(self._times)

    @property
    def end(self) -> float:
        return max(self._times)

    @property
    def _times(self) -> list[float]:
        return [*(at for life in self.lives for at, _, _ in life.stages), *(moment.at for moment in self.moments)]

    @property
    def workers(self) -> list[str]:
        """Those that computed rows, or that a request was with."""
        return sorted({each.worker for each in self.work} | {by for life in self.lives for *_, by in life.stages if by})


def recording(events: Iterable[Mapping[str, Any]]) -> Recording | None:
    """From lines `{"event": kind, ...}`; None where nothing was told."""
    lives: dict[int, Life] = {}
    found = Recording([], [], [])
    for each in events:
        kind = each["event"]
        if kind == "hello":
            found.kv_limit = each["kv_limit_bytes"]
        elif kind == "dropped":
            found.dropped += each["count"]
        elif kind == "request":
            _live(lives.setdefault(each["number"], Life(each["number"])), each)
        elif kind == "step":
            found.moments.append(
                Moment(each["at"], each["waiting"], each["running"], each["kv_bytes"], each["prefix_bytes"])
            )
            found.work += [_work(each["at"], lane) for lane in each["lanes"]]
    found.lives = [life for life in lives.values() if life.stages]
    return found if found.lives and found.moments else None


def _live(life: Life, event: Mapping[str, Any]) -> None:
    what = event["what"]
    life.stages.append((event["at"], what, event.get("worker", "")))
    if what == "queued":
        life.prompt_tokens, life.recipe = event["prompt_tokens"], event["recipe"]
    elif what == "left":
        life.how, life.output_tokens = event["how"], event["output_tokens"]


def _work(at: float, lane: Mapping[str, Any]) -> WorkerActivity:
    return WorkerActivity(at, lane["worker"], lane["prefill"], lane["decode"], lane["drafted"], lane["accepted"])


def shares(lives: Sequence[Life]) -> dict[str, list[float]]:
    """Seconds in each stage of the hand-off, over the requests that had one."""
    each = [parts for life in lives if (parts := life.parts()) is not None]
    return {stage: [parts[stage] for parts in each] for stage in STAGES} if each else {}
