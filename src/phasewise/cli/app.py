"""The command line: all commands put together, and errors turned into one line and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Annotated

import typer

from phasewise import __version__
from phasewise.errors import UserError

# typer ships its own copy of click and exports no name for "the command line is wrong" but this one's parent.
_WrongUsage: type[Exception] = typer.BadParameter.__bases__[0]

COMMANDS = {
    "serve": "serve:serve",
    "route": "route:route",
    "run": "run:run",
    "pull": "pull:pull",
    "batch": "batch:batch",
    "methods": "methods:methods",
    "eval": "evaluate:evaluate",
    "profile": "profile:profile",
    "simulate": "simulate:simulate",
    "plan": "plan:plan",
    "reproduce": "reproduce:reproduce",
    "keys": "keys:app",
    "models": "models:app",
    "widen": "widen:widen",
    "convert": "convert:app",
    "datastore": "datastore:datastore",
    "bench": "bench:app",
    "tune": "tune:tune",
    "check": "check:check",
    "report": "report:report",
    "train": "train:app",
}
"""Each command's module here, and the function or the group of commands in it, in the order of `--help`."""


def _phasewise(
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """LLM inference and serving: a model, and one method for each of ten verbs, chosen by name."""


def program(words: Sequence[str] = ()) -> typer.Typer:
    """The program with the command that `words` begin with, or with all where they begin with none.

    A server holds no other command's code: it takes 2 MB and a tenth of a second.
    """
    app = typer.Typer(
        name="phasewise",
        add_completion=False,
        no_args_is_help=True,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog="Try: [cyan]phasewise run 'def fibonacci(n):'[/]   [cyan]phasewise serve --draft prompt_lookup[/]   "
        "[cyan]phasewise methods evict[/]",
    )
    app.callback()(_phasewise)
    for name in [words[0]] if words and words[0] in COMMANDS else COMMANDS:
        found = resolve_name(f"phasewise.cli.{COMMANDS[name]}")
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name)
        else:
            app.command(name)(found)
    return app


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0, or 2 after one line on stderr where the user made a mistake."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "--version" in words[:1]:
        print(f"phasewise {__version__}")
        sys.exit(0)
    try:
        sys.exit(program(words)(words, prog_name="phasewise", standalone_mode=False))
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
