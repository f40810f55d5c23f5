"""`phasewise bench methods` and `phasewise bench compare`: paired rounds, medians and ratios."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phasewise.cli import show
from phasewise.cli.asked import ASKED, TESTS, BenchRequests, Tests
from phasewise.cli.loading import client, vocabulary
from phasewise.cli.options import DEFAULTS, EngineOptions, parse_bytes, spread
from phasewise.cli.progress import counting, working

if TYPE_CHECKING:
    from phasewise.bench.workloads import Shot


@spread
def methods(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[VERB=METHOD]...",
            help="Settings to compare. Default: every method that needs no training, calibration or second model.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of interleaved rounds.")] = 5,
    fit_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="KV budget for the column that says how many such requests it holds.")
    ] = "256M",
    asked: BenchRequests = ASKED,
    engine: EngineOptions = DEFAULTS,
) -> None:
    """Compare settings with the default on this model and machine, paired on the same prompts.

    One argument is one setting and may set several verbs. The default has each verb's own default and does not draft.
    Verb options apply to all settings, the default too. Prompts are library source unless --prompts names others.

    [bold]Examples[/]

      phasewise bench methods draft=prompt_lookup:k=6 "draft=prompt_lookup evict=snapkv:keep=0.25"
      phasewise bench methods --model path/to/model --max-running 1 --prompts notes.txt
      phasewise bench methods skip=unified --evict streaming
    """
    engine.check()
    room = parse_bytes(fit_bytes)
    from phasewise.bench.drive import Bench
    from phasewise.bench.settings import BenchSetting, Comparison, untrained

    contenders = [BenchSetting.parse(text) for text in settings] if settings else untrained()
    with working(f"loading {engine.model}"):
        made = Bench.load(engine.model, engine.dtype, engine.device, engine.weights)
    config = made.model.config
    prompts = asked.source(engine.model, config.vocab, "code")
    run = Comparison(made, contenders, engine.limits(), engine.verbs, room)

    def shots(number: int) -> list[Shot]:
        return asked.shots(prompts, config.max_positions, number=number)

    with counting("runs", rounds * (1 + len(contenders))) as tell:
        for done in run.run(rounds, shots):
            tell(done)
    show.title(
        f"{engine.model}, {asked.requests} x {asked.workload}, {rounds} interleaved rounds: medians; "
        "speed as the median of paired ratios (range)"
    )
    show.table(*run.table())
    for name, reason in run.refused.items():
        print(f"not run: {name}: {reason}")
    show.record(asked.out, "methods", engine, run.rows())


@spread
def compare(
    contenders: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[default|VERB=METHOD...|[NAME=]http://HOST:PORT]...",
            help="Two contenders or more: recipes, or addresses of running servers.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of interleaved rounds.")] = 5,
    rate: Annotated[
        float | None,
        typer.Option(metavar="PER_S", help="Mean rate of arrivals at the contenders. Default: all at once."),
    ] = None,
    asked: BenchRequests = ASKED,
    tests: Tests = TESTS,
    engine: EngineOptions = DEFAULTS,
) -> None:
    """Compare recipes and servers over HTTP; without contenders, compare phasewise with another engine.

    A contender is a recipe, for which a server is started, or the address of a
    running OpenAI-compatible server. The contender `default` has every verb's
    own default and does not draft; `draft=paced` is what `serve` does unasked.
    Every round asks all contenders the same, in rotating order. The table holds
    the others against the first: medians of paired ratios, with 95 % bootstrap
    intervals over the rounds. Answers are not compared.

    Without contenders, both engines get the same checkpoint, prompts and type
    (--peer, --tests), each in a fresh process every round.

    Use a quiet machine: only ratios within one run mean anything. No prompt
    comes twice. The table is Markdown when it is piped.

    [bold]Examples[/]

      phasewise bench compare default draft=prompt_lookup --model smollm2 --prompts code
      phasewise bench compare ours=http://127.0.0.1:8000 theirs=http://127.0.0.1:9000 --rate 2 --rounds 7
      phasewise bench compare --peer transformers --model path/to/model
      phasewise bench compare --model path/to/model --dtype float32 --rounds 9 --out results.jsonl
    """
    engine.check()
    if contenders:
        _contest(contenders, rounds, rate, asked, engine)
    else:
        _beside(rounds, asked.out, tests, engine)


def _contest(texts: list[str], rounds: int, rate: float | None, asked: BenchRequests, engine: EngineOptions) -> None:
    measure = client()
    from phasewise.bench.load import served_model
    from phasewise.bench.rivals import Contest, rivals
    from phasewise.bench.server import serving

    found = rivals(texts)
    vocab, context = vocabulary(engine, foreign=engine.model == DEFAULTS.model and all(one.url for one in found))
    prompts = asked.source(engine.model, vocab)
    for url in filter(None, (one.url for one in found)):
        served_model(url)  # before any of ours is started
    urls = {}
    with ExitStack() as stack:
        for one in found:
            with working(f"starting a server with {one.name}"):
                verbs: dict[str, Any] = dict(one.verbs)
                urls[one.name] = one.url or stack.enter_context(serving(replace(engine, **verbs).served()))
        run, saved = Contest(urls, lambda url, shots: measure(url, shots, lambda done: None)), 0
        with counting("turns", rounds * len(found)) as tell:
            for done in run.run(rounds, lambda number: asked.shots(prompts, context, rate, number)):
                show.record(asked.out, "contest", engine, run.rows[saved:])
                saved = len(run.rows)
                tell(done)
    arrivals = "all at once" if rate is None else f"{rate:g} requests/s"
    show.title(f"{asked.requests} x {asked.workload}, {arrivals}, {rounds} interleaved rounds over HTTP: medians; "
               f"ratios to {found[0].name}, paired by round [95 %]")  # fmt: skip
    show.table(*run.table())


def _beside(rounds: int, out: Path | None, tests: Tests, engine: EngineOptions) -> None:
    from phasewise.bench.compare import Compare, peers_of
    from phasewise.bench.contender import CHECK, RoundWork
    from phasewise.load import files_of

    model = str(files_of(engine.model).path)
    dtype = engine.dtype or "bfloat16"
    limits = engine.limits()
    job = RoundWork(
        "", model, tests.names, dtype, new=tests.new, prompt=tests.prompt,
        verbs=engine.verbs, kv_bytes=limits.kv_bytes, max_running=limits.max_running, weights=engine.weights,
    )  # fmt: skip
    run = Compare(job, peers_of(tests.peer))
    saved = 0
    with counting("turns", rounds * (1 + len(run.peers))) as tell:
        for done in run.run(rounds):
            show.record(out, "compare", engine, run.results[saved:])  # a run that is cut short keeps what it has
            saved = len(run.results)
            tell(done)
    show.title(f"{engine.model}, {dtype}, {rounds} interleaved rounds: medians in tokens/s, and paired ratios (range)")
    show.table(*run.table())
    for name in run.peers:
        if (share := run.same_tokens(name)) is not None:
            print(f"{name}: the first {share:.0%} of {CHECK[1]} tokens of a check output are ours")
        if name in run.failures:
            print(f"{name} failed: {run.failures[name]}")
