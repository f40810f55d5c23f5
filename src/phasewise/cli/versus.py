"""`phasewise bench methods` and `phasewise bench compare`: paired rounds, medians and ratios."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phasewise.cli import show
from phasewise.cli.asked import ASKED, TESTS, Asked, Tests
from phasewise.cli.options import DEFAULTS, EngineOptions, parse_bytes, spread
from phasewise.cli.progress import counting, working

if TYPE_CHECKING:
    from phasewise.bench.workloads import Shot


@spread
def methods(
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[VERB=METHOD]...", help="Contenders; default: all that need nothing.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 5,
    fit_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Tell how many such requests a KV budget of this size holds.")
    ] = "256M",
    asked: Asked = ASKED,
    engine: EngineOptions = DEFAULTS,
) -> None:
    """Which technique pays on this model and machine: settings against the default on the same prompts, paired.

    One argument is one contender and may set several verbs. Verb options apply to all contenders, the default too.
    Prompts are library source unless --prompts says otherwise.

    [bold]Examples[/]

      phasewise bench methods draft=prompt_lookup:k=6 "draft=prompt_lookup evict=snapkv:keep=0.25"
      phasewise bench methods --model path/to/model --max-running 1 --prompts notes.txt
      phasewise bench methods skip=unified --evict streaming
    """
    engine.check()
    room = parse_bytes(fit_bytes)
    from phasewise.bench.drive import Bench
    from phasewise.bench.settings import Comparison, Setting, untrained

    contenders = [Setting.parse(text) for text in settings] if settings else untrained()
    with working(f"loading {engine.model}"):
        made = Bench.load(engine.model, engine.dtype)
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
    peer: Annotated[str, typer.Option(help="The other engine: transformers.")] = "transformers",
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Append JSON lines to this file.")] = None,
    tests: Tests = TESTS,
    engine: EngineOptions = DEFAULTS,
) -> None:
    """phasewise beside another engine: the same checkpoint, prompts and type, each in a fresh process every round.

    Needs a quiet machine: only ratios of one run mean anything. Prefix caches are off and no prompt comes twice.
    The table is Markdown when it is piped.

    [bold]Examples[/]

      phasewise bench compare --peer transformers --model path/to/model
      phasewise bench compare --model path/to/model --dtype float32 --rounds 9 --out results.jsonl
    """
    engine.check()
    from phasewise.bench.compare import Compare, peers_of
    from phasewise.bench.contender import CHECK, Job
    from phasewise.load import files_of

    model = str(files_of(engine.model).path)
    dtype = engine.dtype or "bfloat16"
    limits = engine.limits()
    job = Job(
        "", model, tests.names, dtype, new=tests.new, prompt=tests.prompt,
        verbs=engine.verbs, kv_bytes=limits.kv_bytes, max_running=limits.max_running,
    )  # fmt: skip
    run = Compare(job, peers_of(peer))
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
