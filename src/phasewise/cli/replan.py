"""`phasewise plan --replan URL`: whether a served plan still fits, and what would."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phasewise.errors import UserError

if TYPE_CHECKING:
    from phasewise.plan.search import Question, Space
    from phasewise.plan.watch import Assumed, TrafficWindow

FILE = Path("phasewise.toml")
MISFIT = 3  # the exit code


@dataclass(frozen=True)
class WatchedPlan:
    """The file of a plan, and the options of watching it."""

    config: Annotated[Path, typer.Option(help="File for the choice, for `serve --config`.")] = FILE
    replan: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Watch a running server and report when the plan in --config no longer fits its load."
        ),
    ] = None
    once: Annotated[
        bool, typer.Option("--once", help="Watch for one window only. Exit code 0: the plan fits; 3: it does not.")
    ] = False
    window: Annotated[float, typer.Option(min=0.1, help="Length of a window in seconds.")] = 60.0
    windows: Annotated[int, typer.Option(min=1, help="Number of windows in a row that must not fit.")] = 3
    drift: Annotated[float, typer.Option(min=0.0, help="Share by which the load may differ from the plan.")] = 0.25


WATCHED = WatchedPlan()


def beside(config: Path) -> Path:
    """The file of a plan's assumptions."""
    return config.with_suffix(".plan.json")


def watch(watched: WatchedPlan, question: Question, space: Space, wait: Callable[[float], object] = time.sleep) -> bool:
    """Look until the plan does not fit, and say what would. -> whether it fits, where one window is asked for"""
    from phasewise.plan.watch import FEWEST, Assumed, misfits, read, window
    from phasewise.request.params import SLO

    kept = beside(watched.config)
    assumed = Assumed.load(kept)
    if SLO(assumed.ttft, assumed.tpot, assumed.tbt) != question.slo:
        raise UserError(f"the targets are not those of the plan in {kept}: plan again, or give the same")
    assert watched.replan is not None
    bad, needed = 0, 1 if watched.once else watched.windows
    before, began = read(watched.replan), time.monotonic()
    while True:
        wait(watched.window)
        after, now = read(watched.replan), time.monotonic()
        seen = window(before, after, now - began, assumed)
        before, began = after, now
        reasons = [] if seen is None else misfits(assumed, seen, watched.drift)
        if seen is None and watched.once:
            raise UserError(f"fewer than {FEWEST} requests left within {watched.window:g} s: nothing can be said; take "
                            "a longer --window")  # fmt: skip
        told = f"{seen}: {'; '.join(reasons) or 'fits'}"
        print("too few requests to tell" if seen is None else told, flush=True)
        bad = bad + 1 if reasons else 0
        if seen is not None and bad == needed:
            _again(assumed, seen, question, space)
            return False
        if watched.once:
            return True


def _again(assumed: Assumed, seen: TrafficWindow, question: Question, space: Space) -> None:
    """The search, with what was seen."""
    from phasewise.bench.machine import cores
    from phasewise.plan.search import search
    from phasewise.plan.watch import Scaled

    lengths = Scaled(question.load.lengths, seen.prompt / assumed.prompt, seen.new / assumed.new)
    now = replace(question, load=replace(question.load, lengths=lengths))
    print("\nthe plan does not fit; searching with the lengths that were seen", flush=True)
    best = search(space, now, processes=cores())[0]
    rate = now.goodput(now.scenario(assumed.choice), best.rate).rate
    print(f"served: {assumed.choice}: {rate:.3g} requests/s of such requests in time, of which {seen.rate:.3g} come")
    if best.choice == assumed.choice:
        print("it is the best there is: as many more such servers as the rate needs, or looser targets")
        return
    devices = now.devices(assumed.choice)
    worth = now.worth(assumed.choice, rate, devices)
    gain = f"{best.worth / worth:.2f} times as much" if worth else "and the served one carries none"
    print(f"better: {best.choice}: {best.rate:.3g} requests/s in time with {best.devices} devices; per device, joule "
          f"or unit of money {gain}. Plan again with such a --workload")  # fmt: skip
