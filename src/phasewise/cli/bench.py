"""`phasewise bench`: throughput, latency under load, methods against each other, engines against each other."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phasewise.cli import drafting, goodput, kv, loading, savers, schemas, show, versus
from phasewise.cli.asked import ARRIVING, ASKED, TARGETS, Arriving, BenchRequests, Targets
from phasewise.cli.options import DEFAULTS, EngineOptions, spread
from phasewise.cli.progress import counting, working
from phasewise.errors import UserError

if TYPE_CHECKING:
    from phasewise.bench.load import LoadResult, RecordedLoad

app = typer.Typer(no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure throughput, latency under load, methods beside each other, and engines beside each other."""


@app.command("offline")
@spread
def offline(asked: BenchRequests = ASKED, targets: Targets = TARGETS, engine: EngineOptions = DEFAULTS) -> None:
    """Measure throughput in this process, with all requests at once.

    [bold]Examples[/]

      phasewise bench offline --requests 64
      phasewise bench offline --workload fixed:prompt=512,new=64 --prompts code --draft prompt_lookup
      phasewise bench offline --workload trace:path=azure.csv,scale=0.1 --out results.jsonl
    """
    engine.check()
    from phasewise.bench.drive import Bench, drive
    from phasewise.bench.latency import summary

    with working(f"loading {engine.model}"):
        made = Bench.load(engine.model, engine.dtype, engine.device, engine.weights)
    config = made.model.config
    shots = asked.shots(asked.source(engine.model, config.vocab), config.max_positions)
    placed = made.engine(engine.verbs, engine.limits())
    with counting("requests", len(shots)) as tell:
        run = drive(placed, shots, tell, targets.slo())
    numbers = summary(run.served, run.seconds, targets.slo())
    work = {**run.work.as_dict(), "peak_kv_bytes": run.peak_kv}
    show.title(f"{engine.model}, {asked.workload}, all at once")
    show.latencies(numbers)
    print("counters: " + ", ".join(f"{name} {value}" for name, value in work.items() if value))
    show.record(asked.out, "offline", engine, [{**numbers, **work}])


@app.command("load")
@spread
def load(
    url: Annotated[str | None, typer.Option(help="Address of a running server. Default: a server is started.")] = None,
    record: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Write a full record of the run, for `phasewise report`."),
    ] = None,
    arriving: Arriving = ARRIVING,
    asked: BenchRequests = ASKED,
    targets: Targets = TARGETS,
    engine: EngineOptions = DEFAULTS,
) -> None:
    """Measure latency over HTTP under open-loop load: arrivals do not wait for answers.

    --url takes any OpenAI-compatible server.

    [bold]Examples[/]

      phasewise bench load --rate 4 --requests 100 --ttft 500 --tpot 50
      phasewise bench load --rate 4 --schedule prefill_first
      phasewise bench load --rate 8 --place disaggregated --record run.jsonl && phasewise report run.jsonl
      phasewise bench load --url http://127.0.0.1:8000 --workload trace:path=azure.csv,scale=0.1
      phasewise bench load --url http://127.0.0.1:8080 --workload turns:users=16,turns=6 --requests 96
    """
    engine.check()
    if url is not None and (made := replace(engine, model=DEFAULTS.model).arguments()):
        raise UserError(f"the server at {url} is already made: leave {made[0]} out, or leave --url out")
    from phasewise.bench.latency import summary
    from phasewise.bench.server import serving

    rate = arriving.of(asked)
    measure, (vocab, context) = loading.client(), loading.vocabulary(engine, foreign=url is not None)
    shots = asked.shots(asked.source(engine.model, vocab), context, rate, cv=arriving.cv)
    with ExitStack() as stack:
        address = url
        if address is None:
            with working(f"starting a server with {engine.model}"):
                address = stack.enter_context(serving([*engine.served(), *targets.arguments()]))
        found = loading.prefix_hits(address.rstrip("/"))
        with counting("requests", len(shots)) as tell:
            recorded = None if record is None else loading.recorder()(address.rstrip("/"), shots, tell)
            result = measure(address.rstrip("/"), shots, tell) if recorded is None else recorded.result
        hits = found()
    numbers = summary(result.served, result.seconds, targets.slo())
    arrivals = "arrivals as recorded" if rate is None else f"{rate:g} requests/s"
    show.title(f"{result.model}, {asked.workload}, {arrivals}")
    show.latencies(numbers)
    if hits is not None:
        prompts = sum(len(shot.prompt) for shot in shots)
        print(f"prefix caches: {hits:,.0f} of {prompts:,} prompt tokens were found there")
    _tell_trouble(result)
    row = {**numbers, "rate": rate, "late_s": result.late, "url": url, "workload": asked.workload,
           "prefix_hits": hits}  # fmt: skip
    show.record(asked.out, "load", engine, [row])
    if record is not None and recorded is not None:
        _keep(record, engine, row, recorded)


def _tell_trouble(result: LoadResult) -> None:
    """Print the first request that failed, and how late the client was."""
    if failure := next((one.error for one in result.served if one.error), None):
        print(f"first failure: {failure}")
    if result.late > 0.1:
        print(f"note: the client was up to {result.late:.2f} s late; latencies count from when a request was due")


def _keep(path: Path, engine: EngineOptions, row: dict[str, Any], recorded: RecordedLoad) -> None:
    """Write the record of one run into a file."""
    from phasewise.bench.report import json_lines

    if recorded.why is not None:
        print(f"note: nothing was heard of the server's own events ({recorded.why})")
    path.unlink(missing_ok=True)
    show.record(path, "load", engine, [row | {"counters": recorded.counters}])
    json_lines(recorded.rows, path)


app.command("methods")(versus.methods)
app.command("compare")(versus.compare)
app.command("goodput")(goodput.goodput)
app.command("savers")(savers.savers)
app.command("kv")(kv.kv)
app.command("draft")(drafting.draft)
app.command("grammar")(schemas.grammar)
