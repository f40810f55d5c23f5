"""Running one system: counters, savings, answers, attempts, time; then the verdict that follows from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from phasewise.bench.rounds import agreement
from phasewise.errors import Untrained, UserError
from phasewise.reproduce import answers, clock
from phasewise.reproduce.lab import Lab, Scale
from phasewise.reproduce.report import Grade, Report, Speed
from phasewise.reproduce.system import Attempt, AttemptOutcome, Case, Counter, Part, Saving, System, Value
from phasewise.reproduce.verdict import Check, judge

Tell = Callable[[str], object]
RUNS = "everything runs"  # a check that is there if it does not


def stages(system: System, scale: Scale) -> int:
    """The number of stages that `reproduce` will report."""
    own = sum(counter.load is not None for counter in system.counters)
    timings = len(system.timings) if scale.time else 0
    return 3 + own + 3 * (system.quality is not None) + len(system.attempts) + timings


@dataclass
class Findings:
    """The findings so far."""

    checks: list[Check] = field(default_factory=list)
    grades: list[Grade] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)

    def refuse(self, error: UserError) -> None:
        self.checks.append(Check("counter", RUNS, f"refused: {error}", "a run to the end", False))


def reproduce(
    name: str, system: System, lab: Lab, tell: Tell = lambda what: None, *, among: bool = False
) -> Report:  # fmt: skip
    """Everything that `system` declares, measured; `tell` hears of each stage before it starts.

    What cannot run here (an extra that is not installed, say) fails a check that says so. Raises Untrained where
    weights are missing, unless it is one `among` others.
    """
    found = Findings()
    try:
        _measure(system, lab, tell, found)
        _time(system, lab, tell, found)
    except UserError as error:
        if isinstance(error, Untrained) and not among:
            raise
        found.refuse(error)
    return _report(name, system, lab, found)


def timed(report: Report, system: System, lab: Lab, tell: Tell = lambda what: None) -> Report:
    """The same report with its times taken, anew if it has any; nothing else of it is measured again."""
    times = {clock.time_check(timing, None).name for timing in system.timings}
    found = Findings([check for check in report.checks if check.name not in times], list(report.grades))
    try:
        _time(system, lab, tell, found)
    except UserError as error:
        found.refuse(error)
    return _report(report.name, system, lab, found)


def settled(report: Report, scale: Scale) -> bool:
    """True if an earlier report stands for one of this scale, but for its times perhaps: all of it ran."""
    return replace(report.scale, rounds=scale.rounds, time=scale.time) == scale and not any(
        check.name == RUNS for check in report.checks
    )


def complete(report: Report, scale: Scale) -> bool:
    """True if nothing of one of this scale is missing: it is settled, and timed if times are wanted."""
    return settled(report, scale) and (not scale.time or report.scale == scale)


def _report(name: str, system: System, lab: Lab, found: Findings) -> Report:
    missing = system.missing + ("samples large enough to conclude from: a quick run",) * lab.scale.quick
    return Report.of(
        name, system, lab.real(system.model), lab.scale, checks=tuple(found.checks), grades=tuple(found.grades),
        speeds=tuple(found.speeds), verdict=judge(found.checks, missing),
    )  # fmt: skip


def _measure(system: System, lab: Lab, tell: Tell, found: Findings) -> None:
    case, checks = _case(lab, system, tell), found.checks
    checks += [_same_tokens(case)] if system.exact else []
    checks += [_counted(counter, _own(lab, system, counter, case, tell)) for counter in system.counters]
    checks += [_saved(saving, case) for saving in system.savings]
    if system.quality is not None:
        contenders = {str(role): setting for role, setting in system.roles.items()}
        contenders["baseline"] = system.quality.baseline or system.baseline
        graded = answers.graded(lab, system.quality, contenders, tell)
        found.grades += [Grade(role, row) for role, row in graded.rows()]
        checks += answers.quality_checks(system.quality, graded)
    for attempt in system.attempts:
        tell(attempt.name)
        checks.append(_tried(attempt, lab))


def _time(system: System, lab: Lab, tell: Tell, found: Findings) -> None:
    for timing in system.timings:
        taken = clock.timed(lab, system, timing, tell) if lab.scale.time else None
        if not timing.price:
            found.checks.append(clock.time_check(timing, taken))
        if taken is not None:
            found.speeds.append(Speed(timing.name, timing.against, taken.method, taken.other, taken.faster))


def _case(lab: Lab, system: System, tell: Tell) -> Case:
    runs = {}
    one: Case | None = None
    for role, setting in system.roles.items():
        tell(f"counters: {role}")
        one = lab.case({role: setting}, system.load, system.model, system.dtype)
        runs[role] = one.runs[role]
    assert one is not None
    return Case({str(role): run for role, run in runs.items()}, one.config, one.row_bytes)


def _own(lab: Lab, system: System, counter: Counter, case: Case, tell: Tell) -> Case:
    """The case a counter is about: the common one, or that of its own load."""
    if counter.load is None:
        return case
    tell(f"counters: {counter.name}")
    return lab.case({"method": counter.who or system.method}, counter.load, system.model, system.dtype)


def _same_tokens(case: Case) -> Check:
    share = agreement(case.runs["method"].outs, case.runs["baseline"].outs)
    n = sum(map(len, case.method.outs))
    return Check("exact", "tokens of the baseline, in float32", f"{share:.2%} of {n:,}", "100.00%", share == 1.0)


def _counted(counter: Counter, case: Case) -> Check:
    measured, predicted = counter.measured(case), counter.predicted(case)
    passed, words = _near(measured, predicted, counter.within), ""
    if counter.bound is not None:
        assert not isinstance(measured, tuple) and not isinstance(predicted, tuple)
        passed = measured <= predicted if counter.bound == "at most" else measured >= predicted
        words = f"{counter.bound} "
    off = f" within {counter.within:.0%}" if counter.within else ""
    return Check("counter", counter.name, text(measured), f"{words}{text(predicted)}{off} = {counter.form}", passed)


def _near(measured: Value, predicted: Value, within: float) -> bool:
    if isinstance(measured, tuple) or isinstance(predicted, tuple):
        return measured == predicted
    return abs(measured - predicted) <= within * abs(predicted)


def _saved(saving: Saving, case: Case) -> Check:
    ours, theirs = (saving.cost(case, case.runs[role]) for role in ("method", saving.against))
    factor = f"{theirs / ours:.2f} times" if ours else "without bound" if theirs else "neither has any"
    part: Part = "claim" if saving.against == "baseline" else "control"
    measured = f"{text(ours)} against the {saving.against}'s {text(theirs)} ({factor})"
    passed = theirs > 0 and theirs >= saving.least * ours
    return Check(part, saving.name, measured, f"at least {saving.least:g} times less", passed)


def _tried(attempt: Attempt, lab: Lab) -> Check:
    try:
        tried = attempt.run(lab)
    except UserError as error:
        tried = AttemptOutcome(False, f"refused: {error}")
    return Check(attempt.part, attempt.name, tried.measured, attempt.expected, tried.passed)


def text(value: Value) -> str:
    """A number for people: whole ones in full, others to four digits."""
    if isinstance(value, tuple):
        return "(" + ", ".join(map(text, value)) + ")"
    return f"{int(value):,}" if float(value).is_integer() else f"{value:,.4g}"
