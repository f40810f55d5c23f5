"""Running one system: counters, savings, answers, attempts, time; then the verdict that follows from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from phasewise.bench.rounds import agreement
from phasewise.errors import Untrained, UserError
from phasewise.reproduce import clock
from phasewise.reproduce.grading import contenders, graded, quality_checks
from phasewise.reproduce.headroom import has_room
from phasewise.reproduce.lab import Lab, Scale
from phasewise.reproduce.report import Grade, Report, Speed
from phasewise.reproduce.system import (
    Attempt,
    AttemptOutcome,
    Case,
    Counter,
    KnobRatio,
    Saving,
    Setting,
    System,
    Value,
)
from phasewise.reproduce.verdict import Check, judge

Tell = Callable[[str], object]
RUNS = "everything runs"  # a check that is there if it does not


def stages(system: System, scale: Scale) -> int:
    """The number of stages that `reproduce` will report."""
    own = len([counter for counter in system.counters if counter.load is not None])
    own += sum(len(who) for _, who in _elsewhere(system).values())
    asked = sum(len(contenders(quality, system.everybody)) for quality in system.quality)
    attempts = sum(scale.time or attempt.part != "time" for attempt in system.attempts)
    timings = len(system.timings) if scale.time else 0
    return len(system.contenders) + own + asked + attempts + timings


@dataclass
class Findings:
    """The findings so far."""

    checks: list[Check] = field(default_factory=list)
    grades: list[Grade] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)
    arithmetic: list[str] = field(default_factory=list)

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
    times |= {attempt.name for attempt in system.attempts if attempt.part == "time"}
    found = Findings([check for check in report.checks if check.name not in times], list(report.grades))
    found.arithmetic = list(report.arithmetic)
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
        speeds=tuple(found.speeds), arithmetic=tuple(found.arithmetic),
        verdict=judge(found.checks, system.promises, missing, bool(system.arithmetic)),
    )  # fmt: skip


def _measure(system: System, lab: Lab, tell: Tell, found: Findings) -> None:
    case, checks = _case(lab, system, tell), found.checks
    checks += [_same_tokens(case)] if system.exact else []
    checks += [_counted(counter, _own(lab, system, counter, case, tell)) for counter in system.counters]
    found.arithmetic += [_divided(ratio, case) for ratio in system.arithmetic]
    cases = {key: _played(lab, system, saving, who, tell) for key, (saving, who) in _elsewhere(system).items()}
    checks += [_saved(saving, system, cases.get(_place(saving), case)) for saving in system.savings]
    for quality in system.quality:
        graded_here = graded(lab, quality, contenders(quality, system.everybody), tell)
        found.grades += [Grade(role, row, quality.model, quality.temperature) for role, row in graded_here.rows()]
        checks += quality_checks(quality, graded_here)
    for attempt in system.attempts:
        if attempt.part != "time":
            tell(attempt.name)
            checks.append(_tried(attempt, lab))


def _time(system: System, lab: Lab, tell: Tell, found: Findings) -> None:
    for timing in system.timings:
        taken = clock.timed(lab, system, timing, tell) if lab.scale.time else None
        if not timing.price:
            found.checks.append(clock.time_check(timing, taken))
        if taken is not None:
            settings = {role: str(setting) for role, setting in clock.who(system, timing).items()}
            model = lab.real(timing.model or system.model)
            found.speeds.append(
                Speed(timing.name, timing.against, taken.method, taken.other, taken.faster, settings, model)
            )
    for attempt in system.attempts:
        if attempt.part == "time" and lab.scale.time:
            tell(attempt.name)
            found.checks.append(_tried(attempt, lab))
        elif attempt.part == "time":
            found.checks.append(Check("time", attempt.name, "no time was taken", attempt.expected, None))


def _case(lab: Lab, system: System, tell: Tell) -> Case:
    runs = {}
    one: Case | None = None
    for role, setting in system.contenders.items():
        tell(f"counters: {role}")
        one = lab.case({role: setting}, system.load, system.model, system.dtype)
        runs[role] = one.runs[role]
    assert one is not None
    return Case({str(role): run for role, run in runs.items()}, one.config, one.row_bytes)


def _place(saving: Saving) -> str:
    """What tells apart the runs that a saving is measured on; empty for the system's own."""
    here = saving.load is None and not saving.model and not saving.settings
    return "" if here else repr((id(saving.load), saving.model, {role: str(s) for role, s in saving.settings.items()}))


def _against(saving: Saving, system: System) -> list[str]:
    return list(system.rivals) if saving.against == "rivals" else [saving.against]


def _elsewhere(system: System) -> dict[str, tuple[Saving, dict[str, Setting]]]:
    """Runs that savings with a load or a model of their own need: who takes part, by place."""
    found: dict[str, tuple[Saving, dict[str, Setting]]] = {}
    for saving in system.savings:
        if place := _place(saving):
            asked = {**system.contenders, **saving.settings}
            found.setdefault(place, (saving, {}))[1].update(
                {role: asked[role] for role in ("method", *_against(saving, system))}
            )
    return found


def _played(lab: Lab, system: System, saving: Saving, who: Mapping[str, Setting], tell: Tell) -> Case:
    """The runs of one place. Tokens are compared nowhere here, so that the checkpoint's own dtype will do."""
    name, runs = saving.model or system.model, {}
    one: Case | None = None
    for role, setting in who.items():
        tell(f"{saving.name}: {role}")
        one = lab.case({role: setting}, saving.load or system.load, name)
        runs[role] = one.runs[role]
    assert one is not None
    return Case(runs, one.config, one.row_bytes)


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


def _saved(saving: Saving, system: System, case: Case) -> Check:
    ours = saving.cost(case, case.method)
    costs = {role: saving.cost(case, case.runs[role]) for role in _against(saving, system)}
    other = min(costs, key=lambda role: costs[role])
    theirs = costs[other]
    name = saving.name + f", {saving.model}" * bool(saving.model)
    factor = f"{theirs / ours:.2f} times" if ours else "without bound" if theirs else "neither has any"
    measured = f"{text(ours)} against {_named(other)}'s {text(theirs)} ({factor})"
    passed = theirs > 0 and theirs >= saving.least * ours
    expected = f"at least {saving.least:g} times less" if saving.least > 1 else "no more"
    if saving.against == "control":
        return Check("control", name, measured, expected, passed, "cost", saving.model)
    short = f"{name} {theirs / ours:.2f} times less" if ours else f"{name}: none"
    short += f" than {other}" * (saving.against == "rivals")
    rival = saving.against == "rivals"
    return Check("cost", name, measured, expected, passed, model=saving.model, short=short, rival=rival)


def _named(role: str) -> str:
    return f"the {role}" if role in ("baseline", "control") else role


def _divided(ratio: KnobRatio, case: Case) -> str:
    """What follows from the knobs, in words."""
    ours, theirs = (ratio.cost(case, case.runs[role]) for role in ("method", "baseline"))
    return f"{ratio.name}: {text(ours)} instead of {text(theirs)}, {theirs / ours:.2f} times less"


def _tried(attempt: Attempt, lab: Lab) -> Check:
    try:
        tried = attempt.run(lab)
    except UserError as error:
        tried = AttemptOutcome(False, f"refused: {error}")
    passed: bool | None = tried.passed
    measured = tried.measured
    if tried.baseline is not None and not has_room(tried.baseline):
        passed, measured = None, f"no headroom: the baseline answers {tried.baseline:.0%}; {measured}"
    short = measured if attempt.part in ("cost", "time") else ""
    return Check(attempt.part, attempt.name, measured, attempt.expected, passed, attempt.of, attempt.model, short)


def text(value: Value) -> str:
    """A number for people: whole ones in full, others to four digits."""
    if isinstance(value, tuple):
        return "(" + ", ".join(map(text, value)) + ")"
    return f"{int(value):,}" if float(value).is_integer() else f"{value:,.4g}"
