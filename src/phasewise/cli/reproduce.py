"""`phasewise reproduce`: what published systems claim, against what is measured here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phasewise.cli import show
from phasewise.cli.options import spread
from phasewise.cli.progress import counting
from phasewise.errors import UserError

if TYPE_CHECKING:
    from phasewise.reproduce.lab import Lab, Scale
    from phasewise.reproduce.report import Report

DOCUMENT = Path("docs/reproduced.md")


@dataclass(frozen=True)
class Output:
    """Where the results go."""

    out: Annotated[Path, typer.Option(help="Where --all writes.")] = DOCUMENT
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write everything found as JSON.")] = None


@dataclass(frozen=True)
class Effort:
    """How much is tried."""

    examples: Annotated[int | None, typer.Option(min=1, help="Per task. Default: the system's own number.")] = None
    rounds: Annotated[int, typer.Option(min=1, help="Of paired time.")] = 5
    seed: Annotated[int, typer.Option(min=0, help="Of prompts and examples.")] = 0
    no_time: Annotated[bool, typer.Option("--no-time", help="Counters and answers only.")] = False
    quick: Annotated[bool, typer.Option("--quick", help="Small samples, one round: does it run?")] = False

    def scale(self) -> Scale:
        from phasewise.reproduce.lab import Scale

        rounds = 1 if self.quick else self.rounds
        return Scale(self.examples, rounds, self.seed, not self.no_time, self.quick)


OUTPUT, EFFORT = Output(), Effort()


@spread
def reproduce(
    name: Annotated[str | None, typer.Argument(metavar="[SYSTEM]", help="What to try; without it, the list.")] = None,
    all_: Annotated[bool, typer.Option("--all", help=f"Every system, in turn; writes {DOCUMENT}.")] = False,
    output: Output = OUTPUT,
    effort: Effort = EFFORT,
) -> None:
    """Try a published system: counters against closed forms, answers and time against a baseline and a control.

    The control must lose. The verdict (holds, partly, not here) follows from what was measured, by rule.

    [bold]Examples[/]

      phasewise reproduce
      phasewise reproduce snapkv --no-time
      phasewise reproduce --all --json reproduced.json
    """
    from phasewise.reproduce import index
    from phasewise.reproduce.lab import Lab
    from phasewise.reproduce.report import overview

    if name is None and not all_:
        systems = [(each, index.system(each)) for each in index.names()]
        show.table(["name", "system", "paper"], [[each, s.title, str(s.paper)] for each, s in systems])
        return
    if name is not None and all_:
        raise UserError(f"--all tries every system: leave {name!r} out, or leave --all out")
    if name is not None:
        index.system(name)  # unknown names are refused before anything is done
    scale = effort.scale()
    reports: list[Report] = []
    with Lab.open(scale) as lab:
        for each in [name] if name is not None else index.names():
            reports.append(_one(each, lab, all_))
            if output.json is not None:
                _save(output.json, reports)
            if all_:  # after each of them: it takes long
                _write(output.out, reports, scale)
    print(overview(reports) if all_ else f"{reports[0].markdown()}\n\n{_machine()}")


def _one(name: str, lab: Lab, among: bool) -> Report:
    from phasewise.reproduce import index
    from phasewise.reproduce.runner import reproduce, stages

    system, done = index.system(name), count()
    with counting(name, stages(system, lab.scale)) as bar:
        return reproduce(name, system, lab, lambda what: bar(next(done)), among=among)


def _save(path: Path, reports: list[Report]) -> None:
    from phasewise.bench.machine import describe

    path.parent.mkdir(parents=True, exist_ok=True)
    found = {"machine": describe(), "reports": [report.plain() for report in reports]}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _write(out: Path, reports: list[Report], scale: Scale) -> None:
    from phasewise.reproduce.report import document

    words = ["phasewise reproduce --all"]
    words += [f"--examples {scale.examples}"] * (scale.examples is not None)
    words += [f"--rounds {scale.rounds}"] * (scale.rounds != 5 and not scale.quick)
    words += [f"--seed {scale.seed}"] * bool(scale.seed) + ["--no-time"] * (not scale.time) + ["--quick"] * scale.quick
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(document(reports, " ".join(words), _machine()), encoding="utf-8")


def _machine() -> str:
    from phasewise.bench.machine import describe

    about = describe()
    return f"On {about['cpu']}, {about['cores']} cores, {about['threads']} threads, torch {about['torch']}."
