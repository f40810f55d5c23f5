"""`phasewise methods`: the catalogue of methods, as a table, in detail, or as Markdown for the README."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding

from phasewise import catalog
from phasewise.errors import UserError, near


@dataclass(frozen=True)
class Entry:
    """One method as the tables show it."""

    verb: str
    name: str
    method: type[Any]
    default: bool  # what its verb uses when no option is given

    @property
    def knobs(self) -> str:
        """`knob=default` of each knob; a knob without default is shown as `knob=`."""
        known = catalog.knobs_of(self.method)
        fields = [f for f in dataclasses.fields(self.method) if f.name in known]
        return ", ".join(f"{f.name}={_default(f)}" for f in fields)

    @property
    def needs(self) -> str:
        return "" if self.method.needs == "nothing" else str(self.method.needs)

    @property
    def paper(self) -> str:
        return str(self.method.paper)

    @property
    def promise(self) -> str:
        """The first sentence of the module's docstring, or of the class's for methods that other packages bring."""
        module = inspect.getmodule(self.method)
        text = inspect.getdoc(module) or inspect.getdoc(self.method) or ""
        return re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(text.split("\n\n")[0].split()))[0]


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def entries(verb: str | None = None) -> list[Entry]:
    """Every discovered method, or those of one verb, in the verbs' order."""
    from phasewise.options import DEFAULTS

    return [
        Entry(v, name, method, DEFAULTS.get(v) == name)
        for v, name, method in catalog.every()
        if verb is None or v == verb
    ]


def markdown() -> str:
    """The catalogue as one Markdown table, for the README."""
    lines = ["| verb | method | promise | guarantee | needs | paper | knobs |", "|---|---|---|---|---|---|---|"]
    for entry in entries():
        cells = [
            f"**{entry.verb}**", f"`{entry.name}`" + (" (default)" if entry.default else ""), entry.promise,
            str(entry.method.guarantee), entry.needs, entry.paper, f"`{entry.knobs}`" if entry.knobs else "",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def methods(
    which: Annotated[str | None, typer.Argument(metavar="[VERB[.NAME]]", help="One verb, or one method.")] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="The README's table.")] = False,
) -> None:
    """The catalogue: which methods each verb has, what they promise, need, and can be told.

    [bold]Examples[/]

      phasewise methods
      phasewise methods evict
      phasewise methods schedule.sarathi
    """
    verb, _, name = (which or "").partition(".")
    if verb and verb not in catalog.VERBS:
        raise UserError(f"unknown verb {verb!r}. {near(verb, catalog.VERBS)}")
    if name and name not in catalog.names(verb):
        catalog.method(verb, name)  # raises, with the near matches
    if as_markdown:
        print(markdown())
    elif name:
        _detail(next(entry for entry in entries(verb) if entry.name == name))
    else:
        _table([verb] if verb else catalog.VERBS)


def _table(verbs: Sequence[str]) -> None:
    console = Console(highlight=False)
    for verb in verbs:
        console.print(f"\n[bold cyan]{verb}[/]  {catalog.QUESTIONS[verb]}")
        for entry in entries(verb):
            needs = f"needs {entry.needs}" if entry.needs else ""
            facts = f"{entry.method.guarantee:<13}{needs:<20}{entry.paper}".rstrip()
            console.print(f"  [bold]{entry.name + (' *' if entry.default else ''):<20}[/]{facts}")
            console.print(Padding(entry.promise, (0, 0, 0, 6)), markup=False)
            if entry.knobs:
                console.print(Padding(entry.knobs, (0, 0, 0, 6)), style="dim", markup=False)
    console.print("\n[dim]* default.  Details: phasewise methods VERB.NAME.  Use: --VERB NAME:KNOB=VALUE,...[/]")


def _detail(entry: Entry) -> None:
    console = Console(highlight=False)
    method = entry.method
    example = entry.name + (f":{entry.knobs.replace(', ', ',')}" if entry.knobs else "")
    console.print(f"[bold cyan]{entry.verb}.{entry.name}[/]{'  (default)' if entry.default else ''}")
    rows = [("use", f"--{entry.verb} {example}"), ("guarantee", method.guarantee), ("needs", method.needs)]
    rows += [("paper", entry.paper)] * bool(entry.paper)
    rows += [("knob", f"{name}: {_kind(kind)}") for name, kind in catalog.knobs_of(method).items()]
    for label, text in rows:
        console.print(f"{label:<11}{text}", markup=False, soft_wrap=True)
    module = inspect.getmodule(method)
    for text in (inspect.getdoc(module), inspect.getdoc(method)):
        for paragraph in (text or "").split("\n\n"):
            flowing = not any(line.startswith((" ", "-", "*")) for line in paragraph.splitlines())
            console.print("\n" + (" ".join(paragraph.split()) if flowing else paragraph), markup=False)


def _kind(kind: Any) -> str:
    """A knob's type as a user would say it."""
    if typing.get_origin(kind) is typing.Literal:
        return " | ".join(str(choice) for choice in typing.get_args(kind))
    return getattr(kind, "__name__", str(kind)) if isinstance(kind, type) else str(kind)
