"""Paired time: everybody once a round, in rotating order, and only ratios within a round count."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from phasewise.bench.rounds import Ratio, order, ratio
from phasewise.errors import UserError
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.play import play
from phasewise.reproduce.system import Part, Setting, System, Timing
from phasewise.reproduce.verdict import Check
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.place import Placed

Tell = Callable[[str], object]
PIECE = 32  # tokens a resident request decodes in a round ...
MOST = 16  # ... and those that its last pass may bring on top


@dataclass(frozen=True)
class PairedTime:
    """Medians of both, seconds of whatever the timing counts, and the ratio of the other's to the method's."""

    method: float
    other: float
    faster: Ratio


def who(system: System, timing: Timing) -> dict[str, Setting]:
    """The two that are timed."""
    everybody = {**system.contenders, **timing.settings}
    return {role: everybody[role] for role in ("method", timing.against)}


def timed(lab: Lab, system: System, timing: Timing, tell: Tell) -> PairedTime:
    """Measure one timing. A first, short round warms up."""
    taking_part, name = who(system, timing), timing.model or system.model
    tell(f"time: {timing.name}")
    with ExitStack() as stack:
        engines = {role: stack.enter_context(lab.engine(setting, name)) for role, setting in taking_part.items()}
        if timing.tokens:
            found = _decoded(lab, engines, name, timing)
        else:
            found = _played(lab, engines, taking_part, name, system, timing)
    faster = ratio(found[timing.against], found["method"])
    assert faster is not None
    return PairedTime(
        statistics.median(found["method"].values()), statistics.median(found[timing.against].values()), faster
    )


Seconds = Mapping[str, dict[int, float]]
"""By role, then round."""


def _played(
    lab: Lab, engines: Mapping[str, Placed], settings: Mapping[str, Setting], name: str, system: System, timing: Timing
) -> Seconds:
    assert timing.seconds is not None
    found: dict[str, dict[int, float]] = {role: {} for role in engines}
    for number in range(-1, lab.scale.rounds):
        for role in order(list(engines), number + 1):
            load = settings[role].load or timing.load or system.load
            entries = load(lab.asked(name, number + 2))
            if number < 0:
                entries = [replace(entry, new=min(entry.new, 8), after=min(entry.after, 4)) for entry in entries]
            run = play(engines[role], entries, watch=False)
            engines[role].forget_prefixes()
            if number >= 0:
                found[role][number] = timing.seconds(run)
    return found


def _decoded(lab: Lab, engines: Mapping[str, Placed], name: str, timing: Timing) -> Seconds:
    asked = lab.asked(name)
    prompt, piece = asked.random(asked.size(timing.tokens)), asked.size(PIECE, 4)
    params = Params(max_tokens=(lab.scale.rounds + 2) * (piece + MOST), ignore_eos=True)
    requests = {role: Request(prompt, params) for role in engines}
    found: dict[str, dict[int, float]] = {role: {} for role in engines}
    with torch.inference_mode():
        for role, engine in engines.items():
            engine.add(requests[role])
            _decode(engine, requests[role], 1)
        for number in range(-1, lab.scale.rounds):
            for role in order(list(engines), number + 1):
                start, before = time.perf_counter(), requests[role].n_out
                _decode(engines[role], requests[role], piece)
                if number >= 0:
                    found[role][number] = (time.perf_counter() - start) / (requests[role].n_out - before)
    for role, engine in engines.items():
        engine.cancel(requests[role])
    return found


def _decode(engine: Placed, request: Request, tokens: int) -> None:
    target = request.n_out + tokens
    while request.n_out < target:
        engine.step()
        if request.left is not None:
            raise UserError(f"a request of {request.prompt_len} tokens left too early: {request.left.reason}")


def time_check(timing: Timing, found: PairedTime | None) -> Check:
    """Checks that every round was faster by more than asked for; it is not examined without a time."""
    name = timing.name if ", against " in timing.name else f"{timing.name}, against {timing.against}"
    expected = f"above {timing.least:g} in every round"
    part: Part = "control" if timing.against == "control" else "time"
    of: Part | None = "time" if part == "control" else None
    if found is None:
        return Check(part, name, "no time was taken", expected, None, of)
    words = f"{found.faster} times as fast in {found.faster.n} round{'s' * (found.faster.n > 1)}"
    short = f"{found.faster.median:.2f} times as fast" + f" as {timing.against}" * (timing.against != "baseline")
    return Check(part, name, words, expected, found.faster.low > timing.least, of, short=short)
