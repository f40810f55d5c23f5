"""The command line: all commands put together, and errors turned into one line and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from phasewise import __version__
from phasewise.cli import (
    batch,
    bench,
    check,
    convert,
    datastore,
    evaluate,
    keys,
    methods,
    models,
    plan,
    profile,
    pull,
    report,
    reproduce,
    route,
    run,
    serve,
    simulate,
    train,
    tune,
    widen,
)
from phasewise.errors import UserError

# typer ships its own copy of click and exports no name for "the command line is wrong" but this one's parent.
_WrongUsage: type[Exception] = typer.BadParameter.__bases__[0]

app = typer.Typer(
    name="phasewise",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Try: [cyan]phasewise run 'def fibonacci(n):'[/]   [cyan]phasewise serve --draft prompt_lookup[/]   "
    "[cyan]phasewise methods evict[/]",
)


@app.callback()
def phasewise(
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """LLM inference and serving: a model, and one method for each of ten verbs, chosen by name."""


app.command("serve")(serve.serve)
app.command("route")(route.route)
app.command("run")(run.run)
app.command("pull")(pull.pull)
app.command("batch")(batch.batch)
app.command("methods")(methods.methods)
app.command("eval")(evaluate.evaluate)
app.command("profile")(profile.profile)
app.command("simulate")(simulate.simulate)
app.command("plan")(plan.plan)
app.command("reproduce")(reproduce.reproduce)
app.add_typer(keys.app, name="keys")
app.add_typer(models.app, name="models")
app.command("widen")(widen.widen)
app.add_typer(convert.app, name="convert")
app.command("datastore")(datastore.datastore)
app.add_typer(bench.app, name="bench")
app.command("tune")(tune.tune)
app.command("check")(check.check)
app.command("report")(report.report)
app.add_typer(train.app, name="train")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0, or 2 after one line on stderr where the user made a mistake."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "--version" in words[:1]:
        print(f"phasewise {__version__}")
        sys.exit(0)
    try:
        sys.exit(app(words, prog_name="phasewise", standalone_mode=False))
    except UserError as error:
        _fail(str(error))
    except _WrongUsage as error:
        if not type(error).__name__.startswith("NoArgs"):  # the help has been printed
            _fail(_sentence(error))
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(message: str) -> None:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(2)


def _sentence(error: Exception) -> str:
    """The message of click's error, with the command whose --help says more."""
    text = str(error.format_message() if hasattr(error, "format_message") else error)
    context = getattr(error, "ctx", None)
    return text if context is None else f"{text.rstrip('.')}. See: {context.command_path} --help"
