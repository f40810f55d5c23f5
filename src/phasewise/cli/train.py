"""`phasewise train`: the models that ship with phasewise, rebuilt from a Python installation, and what methods need."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from phasewise.cli.options import spread
from phasewise.errors import UserError

app = typer.Typer(no_args_is_help=True, help="Train what ships with phasewise.")


@dataclass(frozen=True)
class Steps:
    """What a step takes, and how often a run is looked at."""

    batch_tokens: Annotated[
        int, typer.Option(min=256, help="Tokens of the largest steps, the others in proportion; rates stay.")
    ] = 8192
    validate_minutes: Annotated[
        float, typer.Option(min=0.0, help="How often examples that are not trained on are looked at.")
    ] = 15.0


STEPS = Steps()


@app.callback()
def train() -> None:
    """Train what ships with phasewise."""


@app.command("pocket")
@spread
def pocket(
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, the loss curve and the model.")],
    size: Annotated[str, typer.Option(help="target, or draft: the small one, trained by itself.")] = "target",
    tokens: Annotated[int | None, typer.Option(min=1, help="Length of the run; default: 60M, the draft 3M.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of weights and data.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint in --out.")] = False,
    steps: Steps = STEPS,
) -> None:
    """Train a pocket model from the standard library's source and generated tasks.

    On CUDA where there is some, else on the CPU. --out gets the model, losses.csv, validation.csv and curve.png.

    [bold]Examples[/]

      phasewise train pocket --out runs/pocket
      phasewise train pocket --out runs/pocket --resume
      phasewise train draft --for runs/pocket/model --out runs/draft
    """
    sizes: dict[str, Literal["target", "draft"]] = {"target": "target", "draft": "draft"}
    if size not in sizes:
        raise UserError(f"size={size!r}: choose one of {', '.join(sizes)}")
    _check_resume(out, resume)
    from phasewise.train.pocket import Job
    from phasewise.train.pocket import train as train_pocket

    print(train_pocket(Job(out, sizes[size], tokens, seed, resume, steps.batch_tokens, steps.validate_minutes)))


@app.command("artefact")
def artefact(
    method: Annotated[
        str, typer.Argument(metavar="VERB.NAME[:KNOB=VALUE,...]", help="What to train for; without it, the list.")
    ] = "",
    model: Annotated[str, typer.Option(help="The base model: a directory, a hub id, or pocket.")] = "pocket",
    out: Annotated[Path | None, typer.Option(help="Folder for checkpoints, the loss curve and the artefact.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Length of the run; default: the recipe's own.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of weights and data.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint in --out.")] = False,
) -> None:
    """Train what a method needs for a model, from the standard library's source and generated tasks.

    [bold]Examples[/]

      phasewise train artefact
      phasewise train artefact skip.unified:speedup=2 --model pocket --out runs/unified
      phasewise run "def add(" --skip unified:weights=runs/unified/skip.unified-speedup2.safetensors
    """
    from phasewise import catalog
    from phasewise.train import artefacts

    if not method:
        print("\n".join(artefacts.names()))
        return
    kind = method.partition(":")[0].strip()
    train = artefacts.trainer(kind)
    verb, _, name = kind.partition(".")
    if out is None:
        raise UserError(f"say where it goes: --out runs/{kind}")
    _check_resume(out, resume)
    made = catalog.build(verb, method.partition(".")[2])
    path = train(made, artefacts.Job(model, out, tokens, seed, resume))
    print(f"{path}\nUse it with --{verb} {name}:weights={path}, or put it into MODEL/phasewise/ to be found there.")


def _check_resume(out: Path, resume: bool) -> None:
    if resume and not (out / "checkpoint.pt").is_file():
        raise UserError(f"there is nothing to resume: {out / 'checkpoint.pt'} does not exist; leave --resume out")
