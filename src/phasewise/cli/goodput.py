"""`phasewise bench goodput`: the highest load at which each setting still meets its targets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phasewise.cli import show
from phasewise.cli.asked import ASKED, RATES, BenchRequests, Rates
from phasewise.cli.loading import client
from phasewise.cli.options import DEFAULTS, EngineOptions, spread
from phasewise.cli.progress import counting
from phasewise.errors import UserError

if TYPE_CHECKING:
    from phasewise.bench.latency import ServedRequest
    from phasewise.bench.prompts import Prompts

    Timings = Sequence[ServedRequest]

NAMED = typer.Option(
    metavar="NAME=TTFT/TPOT[/TBT]",
    help="Targets in milliseconds; TBT is the 99th percentile of a stream; may be repeated.",
)
WARM = 4  # requests before the first that count


@spread
def goodput(
    settings: Annotated[
        list[str], typer.Argument(metavar="VERB=METHOD...", help="Settings. One may set several verbs, after spaces.")
    ],
    slo: Annotated[list[str] | None, NAMED] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw all of --out: a figure per workload and target.")] = None,
    load: Rates = RATES,
    asked: BenchRequests = ASKED,
    engine: EngineOptions = DEFAULTS,
) -> None:
    """Find the goodput of each setting: the rate at which 90 % of the requests meet their latency targets.

    Every setting gets a server of its own and the same requests over HTTP, which do not wait for answers. Lengths are
    the same at each rate, prompts are new. Use a quiet machine.

    With --precision rates are bisected, also beyond --rates. Then ask for 100
    --requests or more: the answer is only as sure as 90 % of them.

    [bold]Examples[/]

      phasewise bench goodput schedule=sarathi schedule=prefill_first --rates 1,2,3 --slo tight=300/50
      phasewise bench goodput schedule=sarathi place=disaggregated --slo a=500/60 --slo b=2000/200
      phasewise bench goodput schedule=sarathi schedule=prefill_first --slo smooth=1000//120
      phasewise bench goodput schedule=sarathi --rates 1,4 --precision 0.1 --requests 100
      phasewise bench goodput schedule=sarathi schedule=layered --out g.jsonl --plot g.png
    """
    engine.check()
    if plot is not None and asked.out is None:
        raise UserError("--plot draws what --out holds: give both")
    from phasewise.bench.goodput import GoodputPoint, Target, draw, table
    from phasewise.bench.server import Handoffs, serving
    from phasewise.bench.settings import BenchSetting
    from phasewise.load import config_of

    contenders = [BenchSetting.parse(text) for text in settings]
    targets = [Target.parse(text) for text in slo or ["tight=500/100", "relaxed=2000/300"]]
    steps, measure = load.steps, client()
    config = config_of(engine.model)
    points: list[GoodputPoint] = []
    with counting("requests", len(contenders) * len(steps) * asked.requests) as tell:
        for contender in contenders:
            verbs: dict[str, Any] = dict(contender.verbs)
            with serving(replace(engine, **verbs).served()) as url:
                fresh = asked.source(engine.model, config.vocab)  # one for all rates: no prompt comes twice

                def ask(rate: float, most: int | None = None, at: str = url, of: Prompts = fresh) -> Timings:
                    shots = asked.shots(of, config.max_positions, rate)[:most]
                    return measure(at, shots, lambda done: tell(len(points) * asked.requests + done)).served

                ask(steps[-1], most=WARM)
                moves = Handoffs(url)
                for point in load.points(contender.name, targets, ask):
                    points.append(point)
                    about = {"workload": asked.workload, "targets": {t.name: str(t).partition(" ")[2] for t in targets}}
                    show.record(asked.out, "goodput", engine, [point.row(targets) | moves.row() | about])
    show.title(f"{engine.model}, {asked.requests} x {asked.workload}: goodput at {', '.join(map(str, targets))}")
    show.table(*table(points, targets))
    if plot is not None and asked.out is not None:
        draw(plot, [json.loads(line) for line in asked.out.read_text().splitlines() if '"goodput"' in line])
