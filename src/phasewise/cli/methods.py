"""`phasewise methods`: prints the catalogue, one method in detail, or the Markdown of docs/catalogue.md."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding

from phasewise import catalog


@dataclass(frozen=True)
class Entry:
    """One method as the tables show it."""

    kind: str  # a verb, or a folder of parts
    name: str
    method: type[Any]
    default: bool  # what its verb uses when no option is given

    @property
    def knobs(self) -> str:
        """`knob=default` of each knob, those of a part behind it; a knob without default is shown as `knob=`."""
        return ", ".join(_defaults(self.method))

    @property
    def guarantee(self) -> str:
        """The guarantee; "" for a part, which has none of its own."""
        return str(getattr(self.method, "guarantee", ""))

    @property
    def needs(self) -> str:
        """What a user must bring: nothing (""), a kind of model, methods of other verbs that have no default."""
        from phasewise.options import DEFAULTS

        needs = getattr(self.method, "needs", "nothing")
        own = [] if needs == "nothing" else [str(needs)]
        return ", ".join(own + [f"a {verb} method" for verb in catalog.slots_of(self.method) if verb not in DEFAULTS])

    @property
    def paper(self) -> str:
        return str(getattr(self.method, "paper", ""))

    @property
    def promise(self) -> str:
        """The first sentence of the module's docstring, or of the class's for methods that other packages bring."""
        module = inspect.getmodule(self.method)
        text = inspect.getdoc(module) or inspect.getdoc(self.method) or ""
        return re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(text.split("\n\n")[0].split()))[0]


def _defaults(cls: type[Any]) -> Iterator[str]:
    known, parts = catalog.knobs_of(cls), catalog.parts_of(cls)
    for field in dataclasses.fields(cls):
        if field.name not in known:
            continue
        if field.default is not dataclasses.MISSING:
            yield from _valued(field.name, field.default, None)
        elif field.default_factory is not dataclasses.MISSING:
            yield from _valued(field.name, field.default_factory(), parts.get(field.name))
        else:
            yield f"{field.name}="


def _valued(knob: str, value: Any, part: catalog.PartField | None) -> Iterator[str]:
    """`knob=value`, and for what a part holds `knob.its=value` as well."""
    if part is None:
        yield f"{knob}={value:g}" if isinstance(value, float) else f"{knob}={value}"
        return
    yield f"{knob}={catalog.name_of(part.kind, value)}"
    inner = catalog.parts_of(type(value))
    for field in dataclasses.fields(value):
        yield from _valued(f"{knob}.{field.name}", getattr(value, field.name), inner.get(field.name))


def entries(kind: str | None = None) -> list[Entry]:
    """Every discovered method in the verbs' order, or those of one verb or folder of parts."""
    from phasewise.options import DEFAULTS

    kinds = catalog.VERBS if kind is None else [kind]
    return [
        Entry(k, name, catalog.method(k, name), name in DEFAULTS.get(k, "").split("+"))
        for k in kinds
        for name in catalog.names(k)
    ]


def markdown() -> str:
    """The catalogue as one Markdown table, for docs/catalogue.md."""
    lines = ["| verb | method | promise | guarantee | needs | paper | knobs |", "|---|---|---|---|---|---|---|"]
    for entry in entries():
        cells = [
            f"**{entry.kind}**", f"`{entry.name}`" + (" (default)" if entry.default else ""), entry.promise,
            entry.guarantee, entry.needs, entry.paper, f"`{entry.knobs}`" if entry.knobs else "",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def methods(
    which: Annotated[
        str | None,
        typer.Argument(metavar="[VERB[.NAME]]", help="A verb, a method (VERB.NAME), or the parts of a method."),
    ] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of docs/catalogue.md.")] = False,
) -> None:
    """Show the catalogue of methods: what each promises and needs, and its knobs.

    [bold]Examples[/]

      phasewise methods
      phasewise methods evict
      phasewise methods schedule.sarathi
      phasewise methods decode.selector
    """
    if as_markdown:
        print(markdown())
    elif not which:
        _table(catalog.VERBS)
    elif which in catalog.VERBS or which in catalog.folders(which.partition(".")[0]):
        _table([which])
    else:
        kind, _, name = which.rpartition(".")
        if kind not in catalog.VERBS and kind not in catalog.folders(kind.partition(".")[0]):
            kind, _, name = which.partition(".")
        cls = catalog.method(kind, name)  # raises, with the near matches
        _detail(next(entry for entry in entries(kind) if entry.method is cls and entry.name == name))


def _table(kinds: Sequence[str]) -> None:
    console = Console(highlight=False)
    for kind in kinds:
        console.print(f"\n[bold cyan]{kind}[/]  {_question(kind)}")
        for entry in entries(kind):
            needs = f"needs {entry.needs}" if entry.needs else ""
            facts = f"{entry.guarantee:<13}{needs:<20}{entry.paper}".rstrip()
            console.print(f"  [bold]{entry.name + (' *' if entry.default else ''):<20}[/]{facts}")
            console.print(Padding(entry.promise, (0, 0, 0, 6)), markup=False)
            if entry.knobs:
                console.print(Padding(entry.knobs, (0, 0, 0, 6)), style="dim", markup=False)
    console.print("\n[dim]* default.  Details: phasewise methods VERB.NAME.  Use: --VERB NAME:KNOB=VALUE,...[/]")


def _question(kind: str) -> str:
    """The question of a verb; for a folder of parts, the methods that hold them."""
    if kind in catalog.QUESTIONS:
        return catalog.QUESTIONS[kind]
    hosts = ", ".join(f"{host.name}:{field}=..." for host, field in _hosts(kind))
    return f"parts of {hosts}" if hosts else "parts of no method"


def _hosts(kind: str) -> Iterator[tuple[Entry, str]]:
    """The methods that hold parts of this kind, with the field that does."""
    for entry in entries():
        for field, its in catalog.parts_of(entry.method).items():
            if its.kind == kind:
                yield entry, field


def _use(entry: Entry) -> str:
    """The method with all its knobs, as an option; a part as the option of a method that holds it."""
    if entry.kind in catalog.VERBS:
        return f"--{entry.kind} {entry.name}" + (f":{entry.knobs.replace(', ', ',')}" if entry.knobs else "")
    for host, field in _hosts(entry.kind):
        inner = "".join(f",{field}.{knob}" for knob in _defaults(entry.method))
        return f"--{host.kind} {host.name}:{field}={entry.name}{inner}"
    return ""


def _detail(entry: Entry) -> None:
    console = Console(highlight=False)
    method = entry.method
    console.print(f"[bold cyan]{entry.kind}.{entry.name}[/]{'  (default)' if entry.default else ''}")
    rows: list[tuple[str, str | None]] = [
        ("use", _use(entry)),
        ("guarantee", entry.guarantee),
        ("needs", entry.needs or "nothing"),
    ]
    rows += [("paper", entry.paper)]
    parts = catalog.parts_of(method)
    for name, kind in catalog.knobs_of(method).items():
        rows += _choices(name, parts[name].kind) if name in parts else [("knob", f"{name}: {_kind(kind)}")]
    for label, text in rows:
        if text:
            console.print(f"{label:<11}{text}", markup=False, soft_wrap=True)
    module = inspect.getmodule(method)
    for text in (inspect.getdoc(module), inspect.getdoc(method)):
        for paragraph in (text or "").split("\n\n"):
            flowing = not any(line.startswith((" ", "-", "*")) for line in paragraph.splitlines())
            console.print("\n" + (" ".join(paragraph.split()) if flowing else paragraph), markup=False)


def _choices(field: str, kind: str) -> Iterator[tuple[str, str]]:
    """What a part may be: a line for each file of its folder with its knobs, or the verb whose methods all fit."""
    if kind in catalog.VERBS:
        yield "knob", f"{field}: a {kind} method, {field}=(NAME:KNOB=VALUE,...)"
        return
    yield "knob", f"{field}: {' | '.join(catalog.names(kind))}"
    for entry in entries(kind):
        knobs = "".join(f",{field}.{knob}" for knob in _defaults(entry.method))
        yield "  part", f"{field}={entry.name}{knobs}"
        yield "", f"    {entry.promise}"


def _kind(kind: Any) -> str:
    """A knob's type as a user would say it."""
    if typing.get_origin(kind) is typing.Literal:
        return " | ".join(str(choice) for choice in typing.get_args(kind))
    return getattr(kind, "__name__", str(kind)) if isinstance(kind, type) else str(kind)
