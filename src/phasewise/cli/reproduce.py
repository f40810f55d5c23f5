"""`phasewise reproduce`: holds the claims of published systems against measurements."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phasewise.cli import show
from phasewise.cli.options import spread
from phasewise.cli.progress import Count, counting, counting_in_lines, say
from phasewise.errors import UserError

if TYPE_CHECKING:
    from phasewise.reproduce.lab import Lab, Scale
    from phasewise.reproduce.report import Report

DOCUMENT = Path("docs/results/reproduced.md")
MOST_JOBS = 4  # each holds models of its own


@dataclass(frozen=True)
class ReproduceOutput:
    """Where the results go."""

    out: Annotated[
        Path | None,
        typer.Option(
            help=f"Page to write: all that is known of any system by then. With --all: {DOCUMENT} unless said.",
            show_default=False,
        ),
    ] = None
    json: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Results as JSON; what it holds of other systems stays. With a page: beside it unless said.",
        ),
    ] = None
    anew: Annotated[
        bool,
        typer.Option("--anew", help="With --all: measure everything, whatever an earlier run has found."),
    ] = False

    def page(self, all_: bool) -> Path | None:
        """The page to write, if any."""
        return self.out or (DOCUMENT if all_ else None)

    def file(self, all_: bool) -> Path | None:
        """Where results are written, and read before."""
        page = self.page(all_)
        return self.json or (page and page.with_suffix(".json"))

    def kept(self, all_: bool) -> KeptFindings:
        """What was found before. Raises UserError for a file that is none of these."""
        path = self.file(all_)
        return _kept(path) if not self.anew and path is not None and path.exists() else KeptFindings({}, {})


@dataclass(frozen=True)
class KeptFindings:
    """What a file holds: reports by name, and the answers of the default methods: by what they were given under
    (`_conditions`), then by what was asked."""

    reports: dict[str, Report]
    baselines: dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class ReproduceEffort:
    """How much is tried."""

    examples: Annotated[
        int | None, typer.Option(min=1, help="Examples per task. Default: the system's own number.")
    ] = None
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of paired timing.")] = 5
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts and examples.")] = 0
    no_time: Annotated[bool, typer.Option("--no-time", help="Take no times, only counters and answers.")] = False
    quick: Annotated[
        bool, typer.Option("--quick", help="Small samples and one round, to see that everything runs.")
    ] = False
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Systems measured at the same time; their times are taken after that, one by one. "
            f"Default: 1, and with --all one a core, {MOST_JOBS} at most.",
            show_default=False,
        ),
    ] = None

    def scale(self) -> Scale:
        from phasewise.reproduce.lab import Scale

        rounds = 1 if self.quick else self.rounds
        return Scale(self.examples, rounds, self.seed, not self.no_time, self.quick)

    def turns(self, all_: bool) -> list[tuple[Scale, int]]:
        """What is measured in turn, and by how many processes: where several measure, times come last, since a busy
        machine takes none that can be trusted."""
        from phasewise.bench.machine import cores

        scale, jobs = self.scale(), self.jobs or (min(cores(), MOST_JOBS) if all_ else 1)
        if jobs == 1 or not scale.time:
            return [(scale, jobs)]
        return [(replace(scale, time=False), jobs), (scale, 1)]


OUTPUT, EFFORT = ReproduceOutput(), ReproduceEffort()


@spread
def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SYSTEM]...", help="Systems to try. Without one, the list is printed."),
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help=f"Every system, in turn; writes {DOCUMENT}.")] = False,
    output: ReproduceOutput = OUTPUT,
    effort: ReproduceEffort = EFFORT,
) -> None:
    """Try a published system's claim here, against a baseline and a control that must lose.

    Counters are checked against closed forms, answers, cost and time against the baseline and against rivals. The
    verdict (holds, partly, not here, or open where nothing promised was judged) follows by rule. A drafter takes a
    minute, a method that gives rows up or reads fewer up to a quarter of an hour, and --all one and a half to two and
    a half hours on two cores. It keeps what it has found, goes on there when it is started again, and says how long is
    left.

    [bold]Examples[/]

      phasewise reproduce
      phasewise reproduce snapkv --no-time
      phasewise reproduce quest tidal --out docs/results/reproduced.md
      phasewise reproduce --all
      phasewise reproduce --all --anew --json reproduced.json
    """
    from phasewise.reproduce import index
    from phasewise.reproduce.report import overview

    if not names and not all_:
        _list()
        return
    _check(names or [], all_, output, effort)
    before, file, page = output.kept(all_), output.file(all_), output.page(all_)
    wanted = names or index.names()
    found: dict[str, Report] = {}
    kept, conditions = before.reports, _conditions(effort.scale())
    answers = before.baselines.get(conditions, {})
    for scale, jobs in effort.turns(all_):
        standing = dict(kept | found if all_ else found)
        done: list[Report] = []
        for report, answered in _found(wanted, scale, standing, answers, jobs, all_):
            done.append(report)
            found[report.name], answers = report, answers | answered
            if file is not None:
                _save(file, KeptFindings(kept | found, before.baselines | {conditions: answers}))
            if page is not None:  # after each of them: it takes long
                _write(page, [*found.values()], kept, scale)
            if all_:
                _say_progress(done, wanted, standing, scale, jobs)
    reports = sorted(found.values(), key=lambda report: wanted.index(report.name))
    sections = [overview(reports)] if all_ else [*(report.markdown() for report in reports)]
    print("\n\n".join(sections))


def _list() -> None:
    """Print which systems there are."""
    from phasewise.reproduce import index

    systems = [(each, index.system(each)) for each in index.names()]
    show.table(["name", "system", "paper"], [[each, s.title, str(s.paper)] for each, s in systems])


def _say_progress(
    reports: list[Report], wanted: list[str], kept: dict[str, Report], scale: Scale, jobs: int
) -> None:  # fmt: skip
    """Say how long is left."""
    done = {report.name for report in reports}
    if left := [name for name in wanted if name not in done]:
        say(progress(reports, left, kept, scale, jobs))


def _check(names: list[str], all_: bool, output: ReproduceOutput, effort: ReproduceEffort) -> None:
    """Raise UserError for what can be seen before anything is done."""
    from phasewise.reproduce import index

    if names and all_:
        raise UserError(f"--all tries every system: leave {' '.join(names)!r} out, or leave --all out")
    for name in names:
        index.system(name)
    if output.anew and not all_:
        raise UserError("--anew measures every system again: it goes with --all")


Answers = dict[str, list[float]]
"""Grades of the default methods by what was asked."""
Counting = Callable[[str, int], AbstractContextManager[Count]]


def _found(
    wanted: Sequence[str], scale: Scale, kept: Mapping[str, Report], answers: Answers, jobs: int, among: bool
) -> Iterator[tuple[Report, Answers]]:  # fmt: skip
    """Each system's report, and the default methods' answers that are known by then: in turn, or as they end where
    `jobs` processes measure. `kept` are reports that may stand. One `among` others that lacks weights fails alone."""
    from phasewise.reproduce.lab import Lab

    if jobs == 1:
        with Lab.open(scale) as lab:
            lab.grades |= answers
            for name in wanted:
                yield _one(name, lab, among, kept.get(name)), lab.baselines()
        return
    # spawned, since torch's threads do not survive a fork
    with ProcessPoolExecutor(jobs, get_context("spawn"), _open_lab, (scale, answers, jobs)) as pool:
        try:
            for one in as_completed(
                [pool.submit(_one_of_several, name, among, kept.get(name)) for name in _longest_first(wanted, scale)]
            ):
                yield one.result()
        finally:
            pool.shutdown(cancel_futures=True)


_labs: list[tuple[AbstractContextManager[Lab], Lab]] = []  # the lab of a process that measures for another


def _longest_first(wanted: Sequence[str], scale: Scale) -> list[str]:
    """In the order of their stages, so that no process ends long after the others."""
    from phasewise.reproduce import index
    from phasewise.reproduce.runner import stages

    return sorted(wanted, key=lambda name: -stages(index.system(name), scale))


def _open_lab(scale: Scale, answers: Answers, jobs: int) -> None:
    import torch

    from phasewise.bench.machine import cores
    from phasewise.reproduce.lab import Lab

    torch.set_num_threads(max(1, min(torch.get_num_threads(), cores() // jobs)))  # each has its share of the cores
    opened = Lab.open(scale)
    _labs.append((opened, opened.__enter__()))  # its folder goes with the process
    _labs[0][1].grades |= answers


def _one_of_several(name: str, among: bool, kept: Report | None) -> tuple[Report, Answers]:
    lab = _labs[0][1]
    return _one(name, lab, among, kept, counting_in_lines), lab.baselines()


def _one(
    name: str, lab: Lab, among: bool, kept: Report | None, counted: Counting = counting
) -> Report:  # fmt: skip
    from phasewise.reproduce import index
    from phasewise.reproduce.runner import complete, reproduce, settled, stages, timed

    system, done, digest = index.system(name), count(), index.digest(name)
    if kept is not None and kept.digest != digest:
        kept = None
    if kept is not None and complete(kept, lab.scale):
        return kept
    began, worked = time.monotonic(), _worked()
    with counted(name, stages(system, lab.scale)) as bar:
        if kept is not None and settled(kept, lab.scale):
            found = timed(kept, system, lab, lambda what: bar(next(done)))
        else:
            found = reproduce(name, system, lab, lambda what: bar(next(done)), among=among)
    seconds, busy = time.monotonic() - began, _worked() - worked
    there, here = "" if kept is None else kept.machine, _machine()
    machine = here if there in ("", here) else f"{there} (counters and answers) and on {here} (times)"
    if kept is not None:
        seconds, busy = seconds + kept.seconds, busy + kept.busy
    return replace(found, digest=digest, seconds=seconds, busy=busy, machine=machine)


def _worked() -> float:
    """Seconds in which a core worked for this process and for those of its children that have ended."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def progress(
    found: Sequence[Report], left: Sequence[str], kept: Mapping[str, Report], scale: Scale, jobs: int = 1
) -> str:  # fmt: skip
    """The last verdict, and about how long those will take that are left: as long as they took before, or as the
    others on average, `jobs` at a time."""
    from phasewise.reproduce.runner import complete, settled

    spent = [report.seconds - (before.seconds if (before := _standing(report.name, kept)) else 0.0) for report in found]
    measured = [each for each in spent if each] or [report.seconds for report in kept.values()] or [0.0]
    mean, seconds = sum(measured) / len(measured), 0.0
    for name in left:
        before = _standing(name, kept)
        if before is not None and settled(before, scale):
            seconds += 0.0 if complete(before, scale) else mean  # its times lack
        else:
            seconds += kept[name].seconds if name in kept else mean
    last, done = found[-1], len(found)
    return (
        f"{last.name}: {last.verdict.word}. {done} of {done + len(left)}, about {seconds / jobs / 60:.0f} minutes left"
    )


def _standing(name: str, kept: Mapping[str, Report]) -> Report | None:
    """The report on a system that today's methods and rule would give again."""
    return None if name not in kept or _older(kept[name]) else kept[name]


def _save(path: Path, kept: KeptFindings) -> None:
    """Everything, so that a run that is broken off loses nothing: a report, or what answered a question, a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(kept.reports[name].plain(), ensure_ascii=False) for name in sorted(kept.reports)]
    answers = [
        f"{json.dumps(conditions)}: {{\n"
        + ",\n".join(f"{json.dumps(asked)}: {json.dumps(grades)}" for asked, grades in sorted(found.items()))
        + "\n}"
        for conditions, found in sorted(kept.baselines.items())
        if found
    ]
    text = '{"reports": [\n' + ",\n".join(lines) + '\n],\n"baselines": {\n' + ",\n".join(answers) + "\n}}\n"
    path.write_text(text, encoding="utf-8")


def _kept(path: Path) -> KeptFindings:
    from phasewise.reproduce.report import Report

    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        reports = [Report.from_plain(one) for one in found["reports"]]
        baselines = {key: dict(value) for key, value in found.get("baselines", {}).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"json={path} is nothing to go on with, as `reproduce --all` writes it ({error!r}): measure "
                        "all with --anew") from error  # fmt: skip
    return KeptFindings({report.name: report for report in reports}, baselines)


def _conditions(scale: Scale) -> str:
    """What the default methods' answers hang on beside what is asked: they are asked again where it is another."""
    from phasewise.reproduce import index

    return f"seed {scale.seed}, {_machine()}, rule {index.rule()}"


def _write(out: Path, reports: list[Report], kept: dict[str, Report], scale: Scale) -> None:
    """The page of what is found now, and of what was found before of systems whose turn has not come."""
    from phasewise.reproduce import index
    from phasewise.reproduce.page import document

    everything = kept | {report.name: report for report in reports}
    told = [everything[name] for name in index.names() if name in everything]
    older = [report.name for report in told if _older(report)]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(document(told, _command(scale), older, index.titles()), encoding="utf-8")


def _older(report: Report) -> bool:
    """True if a report does not follow from today's methods and rule."""
    from phasewise.reproduce import index

    return report.name not in index.names() or report.digest != index.digest(report.name)


def _command(scale: Scale) -> str:
    """What to type for this much of everything."""
    words = ["phasewise reproduce --all"]
    words += [f"--examples {scale.examples}"] * (scale.examples is not None)
    words += [f"--rounds {scale.rounds}"] * (scale.rounds != 5 and not scale.quick)
    words += [f"--seed {scale.seed}"] * bool(scale.seed) + ["--no-time"] * (not scale.time) + ["--quick"] * scale.quick
    return " ".join(words)


def _machine() -> str:
    from phasewise.bench.machine import describe, kernels

    about = describe()
    room = f"{about['cores']} cores, {about['threads']} threads"
    return f"{about['cpu']}, {kernels()}, {room}, torch {about['torch']}"
