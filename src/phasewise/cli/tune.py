"""`phasewise tune`: the recipe to serve, found on the model itself."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phasewise import catalog
from phasewise.cli import show
from phasewise.cli.asked import ASKED, Asked
from phasewise.cli.options import DEFAULTS, EngineOptions, spread
from phasewise.cli.progress import console
from phasewise.errors import UserError

if TYPE_CHECKING:
    from phasewise.llm import LLM
    from phasewise.plan.tune import Candidate

FILE = Path("phasewise.toml")


@dataclass(frozen=True)
class Aim:
    """What a recipe may lose, and by which rows that is judged."""

    max_loss: Annotated[
        str, typer.Option(metavar="SHARE", help="What lossy recipes may lose on each row, for certain: 1%. 0: none.")
    ] = "1%"
    quality: Annotated[
        str | None,
        typer.Option(metavar="ROW,...", help="Rows of `phasewise eval`. Default: code@2k and docs@2k, or code."),
    ] = None
    examples: Annotated[int, typer.Option(min=2, help="Per row, of the final measurement.")] = 50
    rounds: Annotated[int, typer.Option(min=3, help="Of the final measurement, interleaved.")] = 5

    def rows(self, llm: LLM) -> list[str]:
        """Raises UserError for one that is unknown, or longer than the model's context."""
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


AIM = Aim()


@spread
def tune(
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[VERB=METHOD]...", help="Candidates; default: all that need nothing.")
    ] = None,
    config: Annotated[Path, typer.Option(help="Where the choice is written, for `serve --config`.")] = FILE,
    aim: Aim = AIM,
    asked: Asked = ASKED,
    engine: EngineOptions = DEFAULTS,
) -> None:
    """The fastest recipe for your workload that loses no more than you allow, found on the model itself.

    Candidates are timed against the default on the same prompts, interleaved;
    each rung gives twice the rounds and examples to the better half, and pairs
    what is left (successive halving). Exact recipes compete on the clock;
    lossy ones must also keep every row's 95 % interval of what they lose inside
    --max-loss, at last on examples that nothing was chosen by. What is not
    certainly faster than the default is not chosen. Verb options apply to all.

    [bold]Examples[/]

      phasewise tune --model smollm2 --dtype bfloat16 --max-loss 1% && phasewise serve --config phasewise.toml
      phasewise tune --model smollm2 --max-loss 0 --workload fixed:prompt=512,new=128 --requests 8
      phasewise tune draft=prompt_lookup evict=snapkv:keep=0.5 --prompts notes.txt --quality code@2k,docs@2k
    """
    engine.check()
    from phasewise.bench.drive import Bench
    from phasewise.bench.settings import Comparison, Setting
    from phasewise.plan.candidates import changes_answers, singles
    from phasewise.plan.loss import Scales, limit_of
    from phasewise.plan.tune import Budget, Tuner

    limit = limit_of(aim.max_loss)
    named = [Setting.parse(text) for text in settings] if settings else singles()
    none: dict[str, Any] = dict.fromkeys(catalog.VERBS)
    llm = replace(engine, **none).llm()
    rows = aim.rows(llm)
    made, context = Bench(llm.model), llm.model.config
    source, scales = asked.source(engine.model, context.vocab, "code"), Scales(llm, rows, engine.verbs)
    with console().status("") as status:
        tuner = Tuner(
            lambda some: Comparison(made, some, engine.limits(), engine.verbs),
            lambda number: asked.shots(source, context.max_positions, number=number),
            scales.losses, limit, lambda what: status.update(what),
        )  # fmt: skip
        candidates = [one for one in named if limit > 0 or not changes_answers(one)]
        found = tuner.run(candidates, Budget(final=(aim.rounds, aim.examples)))
    _say(tuner.candidates.values(), found, limit, f"{engine.model}, {asked.requests} x {asked.workload}")
    show.record(asked.out, "tune", engine, [_row(one, found, limit) for one in [*found, *tuner.candidates.values()]])
    _write(config, engine, found[0], aim)
    print(f"\n{config}: phasewise serve --config {config}")


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
    show.title(f"{what}: finalists, on prompts and examples that nothing was chosen by")
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
    own = {"model": engine.model, "dtype": engine.dtype, "kv-bytes": engine.kv_bytes}
    if not {"draft", "decode"} & verbs.keys():
        own["draft"] = "none"
    lines = [f"# phasewise tune: {chosen.name}, {chosen.speed:.2f} times the default's speed; max-loss {aim.max_loss}"]
    lines += [f"# {loss.task}: loses {loss} of n={loss.n}" for loss in chosen.losses]
    lines += [f"{key} = {json.dumps(value)}" for key, value in {**own, **verbs}.items() if value is not None]
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error
