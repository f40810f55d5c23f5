"""`phasewise tune`: the recipe to serve, found on the model itself."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phasewise import catalog
from phasewise.cli import show
from phasewise.cli.asked import ASKED, BenchRequests
from phasewise.cli.options import DEFAULTS, DRAFTER, EngineOptions, spread
from phasewise.cli.progress import say, telling
from phasewise.errors import UserError

if TYPE_CHECKING:
    from phasewise.bench.settings import BenchSetting, Comparison
    from phasewise.bench.workloads import Shot
    from phasewise.llm import LLM
    from phasewise.plan.effort import Pace, TuneEffort
    from phasewise.plan.loss import Scales
    from phasewise.plan.tune import Candidate, Tuner

FILE = Path("phasewise.toml")
SHORT = ("draft=none", "draft=prompt_lookup", "draft=token_recycling", "store=int8", "evict=snapkv:keep=0.5",
         "attend=quest")  # fmt: skip
MINUTES = 3.0  # allowed by default where no answers are judged
PACING = 1 << 20  # the number of the round that is timed beforehand: no other round has its prompts
ASKED_HERE = replace(ASKED, requests=8)


@dataclass(frozen=True)
class Aim:
    """How much a recipe may lose, and how that is judged."""

    max_loss: Annotated[
        str,
        typer.Option(
            metavar="SHARE",
            help="How much lossy recipes may lose on each row of --quality, at the end of a 95 % interval: 1%. "
            "0: only recipes that keep the model's answers are tried.",
        ),
    ] = "0"
    quality: Annotated[
        str | None,
        typer.Option(
            metavar="ROW,...",
            help="Rows of `phasewise eval` that lossy recipes are judged by. Default: code@2k and docs@2k, or code.",
        ),
    ] = None
    examples: Annotated[int, typer.Option(min=2, help="Examples per row in the final measurement.")] = 50
    rounds: Annotated[int, typer.Option(min=3, help="Interleaved rounds in the final measurement.")] = 5
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0.5,
            help="Cut examples, rounds and requests so that the run ends after about so many minutes. Default: "
            f"{MINUTES:g} with --max-loss 0, else no limit. The estimate is printed first.",
        ),
    ] = None

    def rows(self, llm: LLM) -> list[str]:
        """The rows to judge by. Raises UserError for one that is unknown, or longer than the model's context."""
        from phasewise.bench.rows import index

        context = llm.model.config.max_positions
        general = [name for name in ("code@2k", "docs@2k") if index.tokens(name) <= context]
        rows = self.quality.split(",") if self.quality else general or ["code"]
        index.known(rows, None)
        for name in rows:
            if index.tokens(name) > context:
                raise UserError(
                    f"quality={name!r} needs a context of {index.tokens(name):,}: the model's is {context:,}"
                )
        return rows

    def effort(self, settings: Sequence[BenchSetting], pace: Pace, limit: float) -> TuneEffort:
        """The work to do, printed with its estimated time."""
        from phasewise.plan.effort import fitted
        from phasewise.plan.tune import RungBudget

        minutes = self.minutes or (inf if limit else MINUTES)
        found = fitted(settings, pace, RungBudget(final=(self.rounds, self.examples)), 60 * minutes)
        what = f"{found.requests} requests a run, {found.budget.final[0]} rounds in the final"
        if limit:
            what += f", {found.budget.final[1]} examples"
        several = "candidate" if len(settings) == 1 else "candidates"
        say(f"tune: {len(settings)} {several}, {found.said()} ({what}); --minutes cuts it to a time of yours")
        return found


AIM = Aim()


@spread
def tune(
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[VERB=METHOD]...", help=f"Candidates. Default: {', '.join(SHORT)}."),
    ] = None,
    all_: Annotated[
        bool, typer.Option("--all", help="Try every method that needs no training, calibration or second model.")
    ] = False,
    config: Annotated[Path, typer.Option(help="The file that the choice is written to, for `serve --config`.")] = FILE,
    aim: Aim = AIM,
    asked: BenchRequests = ASKED_HERE,
    engine: EngineOptions = DEFAULTS,
) -> None:
    """Find the fastest recipe for your workload that loses no more than you allow, by trying it on the model itself.

    The default is what `phasewise serve` does without options: it drafts as far
    as that pays (--draft paced). Candidates are timed against it on the same
    prompts, interleaved. Each round of elimination keeps the faster half, adds
    pairs of what is left, and measures twice as long (successive halving).
    Recipes that may change answers are tried only with --max-loss above 0, and
    must keep the 95 % interval of every row's loss within it, at last on
    examples that no choice was made by. A recipe that is not certainly faster
    than the default is not chosen. Verb options apply to every contender.

    [bold]Examples[/]

      phasewise tune --model smollm2 --dtype bfloat16 && phasewise serve --config phasewise.toml
      phasewise tune --model smollm2 --workload fixed:prompt=512,new=128 --requests 8
      phasewise tune --model smollm2 --max-loss 1% --minutes 20
      phasewise tune draft=prompt_lookup evict=snapkv:keep=0.5 --prompts notes.txt --max-loss 1% --quality docs@2k
    """
    engine.check()
    from phasewise.bench.settings import BenchSetting
    from phasewise.plan.candidates import singles
    from phasewise.plan.loss import limit_of

    limit = limit_of(aim.max_loss)
    if settings and all_:
        raise UserError(f"--all tries every method: leave {' '.join(settings)!r} out, or leave --all out")
    named = singles() if all_ else [BenchSetting.parse(text) for text in settings or SHORT]
    default = engine if engine.speaks_of_drafts else replace(engine, draft=DRAFTER)
    candidates = [one for one in named if _tried(one, default.verbs, limit)]
    tuner, found, requests = _tuned(candidates, limit, aim, asked, engine, default)
    what = f"{engine.model}, {requests} x {asked.workload}, default: {_spelled(default.verbs)}"
    _say(tuner.candidates.values(), found, limit, what)
    show.record(asked.out, "tune", engine, [_row(one, found, limit) for one in [*found, *tuner.candidates.values()]])
    _write(config, default, found[0], aim)
    print(f"\nserve it: phasewise serve --config {config}")


def _tuned(
    candidates: list[BenchSetting],
    limit: float,
    aim: Aim,
    asked: BenchRequests,
    engine: EngineOptions,
    default: EngineOptions,
) -> tuple[Tuner, list[Candidate], int]:
    """The candidates against the default: the tuner, its finalists, and the requests of a run."""
    from phasewise.bench.drive import Bench
    from phasewise.bench.settings import Comparison
    from phasewise.plan.loss import Scales
    from phasewise.plan.tune import Tuner

    none: dict[str, Any] = dict.fromkeys(catalog.VERBS)
    llm = replace(engine, **none).llm()
    scales = Scales(llm, aim.rows(llm), engine.verbs)
    made, context = Bench(llm.model), llm.model.config
    source = asked.source(engine.model, context.vocab, "code")

    def race(some: Sequence[BenchSetting]) -> Comparison:
        return Comparison(made, some, engine.limits(), default.verbs)

    def shots(number: int, of: BenchRequests = asked) -> list[Shot]:
        return of.shots(source, context.max_positions, number=number)

    effort = aim.effort(candidates, _pace(race, shots, scales if limit else None, asked.requests), limit)
    fewer = replace(asked, requests=effort.requests)
    with telling("") as tell:
        tuner = Tuner(race, lambda number: shots(number, fewer), scales.losses, limit, tell)
        return tuner, tuner.run(candidates, effort.budget), effort.requests


def _tried(setting: BenchSetting, base: Mapping[str, str], limit: float) -> bool:
    """Whether a candidate is to be timed; says why one that cannot be built here is not."""
    from phasewise.plan.candidates import changes_answers

    if all(base.get(verb) == text for verb, text in setting.verbs.items()):
        return False  # it is the default
    try:
        return limit > 0 or not changes_answers(setting)
    except UserError as error:
        say(f"not tried: {setting.name}: {error}")
        return False


def _pace(
    race: Callable[[Sequence[BenchSetting]], Comparison], shots: Callable[[int], list[Shot]],
    scales: Scales | None, requests: int,
) -> Pace:  # fmt: skip
    """One timed run of the default and, where answers are judged, a few examples."""
    from phasewise.plan.effort import LEAST_EXAMPLES, Pace
    from phasewise.plan.tune import SEEDS

    alone = race([])
    for _ in alone.run(1, lambda number: shots(PACING + number)):
        pass
    seconds, example = alone.trials[0].run.seconds, 0.0
    if scales is not None:
        start = time.perf_counter()
        scales.losses({}, LEAST_EXAMPLES, SEEDS[0])  # measures the default twice
        example = (time.perf_counter() - start) / (2 * LEAST_EXAMPLES)
    return Pace(requests, seconds, example)


def _spelled(verbs: Mapping[str, str]) -> str:
    """Verbs as in a recipe; `draft=none` where no verb is named."""
    return " ".join(f"{verb}={text}" for verb, text in verbs.items()) or "draft=none"


def _say(every: Any, found: list[Candidate], limit: float, what: str) -> None:
    from phasewise.bench import report
    from phasewise.plan.tune import front

    best = front(found)
    body = []
    for one in found:
        speed = f"{one.speed:.2f}" + (f" [{one.within[0]:.2f}, {one.within[1]:.2f}]" if one.within else "")
        losses = "; ".join(f"{loss.task} {loss}" for loss in one.losses) or ("-" if one.lossy else "exact")
        kv = "-" if one.kv_bytes is None else report.size(one.kv_bytes)
        body.append(
            [one.name, speed, kv, losses, "yes" if one.name in best else "", "" if one.allowed(limit) else "no"]
        )
    show.title(f"{what}: the finalists, on prompts and examples that no choice was made by")
    show.table(["recipe", "times the default [95 %]", "KV/request", "loses [95 %]", "front", "allowed"], body)
    gone = [one for one in every if one.out is not None]
    if gone:
        print("\nnot in the final:")
    for one in gone:
        print(f"  {one.name}: {one.out}")
    first = found[0]
    why = (
        "nothing else is certainly faster"
        if not first.setting.verbs
        else f"{first.speed:.2f} times the default's speed"
    )
    print(f"\nchosen: {first.name} ({why})")


def _row(one: Candidate, found: list[Candidate], limit: float) -> dict[str, Any]:
    losses = {loss.task: [loss.mean, loss.low, loss.high, loss.n] for loss in one.losses}
    return {
        "recipe": one.name, "final": one in found, "chosen": one is found[0], "lossy": one.lossy, "speed": one.speed,
        "speed_interval": one.within, "kv_bytes": one.kv_bytes, "losses": losses, "allowed": one.allowed(limit),
        "out": one.out,
    }  # fmt: skip


def _write(path: Path, engine: EngineOptions, chosen: Candidate, aim: Aim) -> None:
    """Options of `serve` as TOML. Raises UserError."""
    verbs = {**engine.verbs, **chosen.setting.verbs}
    own = {"model": engine.model, "dtype": engine.dtype, "weights": engine.weights, "kv-bytes": engine.kv_bytes}
    if not {"draft", "decode"} & verbs.keys():
        own["draft"] = "none"
    lines = [f"# phasewise tune: {chosen.name}, {chosen.speed:.2f} times the default's speed; max-loss {aim.max_loss}"]
    lines += [f"# {loss.task}: loses {loss} of n={loss.n}" for loss in chosen.losses]
    lines += [f"{key} = {json.dumps(value)}" for key, value in {**own, **verbs}.items() if value is not None]
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error
