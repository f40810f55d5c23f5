"""Grades of every contender on the same examples, and what follows from them: quality kept, better, or not counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from phasewise.bench import stats
from phasewise.bench.quality import CODE_LOSS, Row, mean, proportion
from phasewise.bench.stats import Difference
from phasewise.reproduce.answers import code, right
from phasewise.reproduce.headroom import HIGHEST, LOWEST, has_room
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.system import Part, Quality, Setting
from phasewise.reproduce.verdict import Check

Tell = Callable[[str], object]
FEWEST = 6  # examples of a quick run
Grades = Mapping[str, Mapping[str, Sequence[float]]]
"""By role, then task: for every example 1 or 0, or for the loss on code minus nats per token."""


@dataclass(frozen=True)
class Graded:
    """The grades of every contender, and the tasks that count: those on which the baseline leaves room."""

    grades: Grades

    @property
    def counted(self) -> list[str]:
        return [
            task for task, each in self.grades["baseline"].items()
            if task == CODE_LOSS or has_room(sum(each) / len(each))
        ]  # fmt: skip

    def rows(self) -> list[tuple[str, Row]]:
        """A row per role and task, with its interval."""
        return [(role, _row(task, list(each))) for role, tasks in self.grades.items() for task, each in tasks.items()]

    def between(self, role: str, other: str) -> Difference:
        """All tasks together that count."""
        a, b = ([grade for task in self.counted for grade in self.grades[who][task]] for who in (role, other))
        return stats.means(a, b) if CODE_LOSS in self.counted else stats.shares(a, b)

    @property
    def percent(self) -> bool:
        return not any(CODE_LOSS in tasks for tasks in self.grades.values())


def _row(task: str, grades: list[float]) -> Row:
    if task == CODE_LOSS:
        return mean(task, "nats/token", [-grade for grade in grades])
    return proportion(task, round(sum(grades)), len(grades))


def contenders(quality: Quality, roles: Mapping[str, Setting]) -> dict[str, Setting]:
    """Who is asked, on the model that is asked: the system's contenders, but for those that are others here."""
    asked = {**roles, **quality.rivals, **quality.settings}
    asked["baseline"] = quality.settings.get("baseline") or quality.baseline or roles["baseline"]
    if quality.alone:
        del asked["control"]
    if quality.model == "pocket":
        return asked
    return {role: replace(setting, model=setting.model or quality.model) for role, setting in asked.items()}


def graded(lab: Lab, quality: Quality, settings: Mapping[str, Setting], tell: Tell) -> Graded:
    """Ask everybody everything; who has been asked the same in this laboratory before is not asked again."""
    scale = lab.scale
    n = scale.examples or (min(FEWEST, quality.examples) if scale.quick else quality.examples)
    grades: dict[str, dict[str, list[float]]] = {}
    for role, setting in settings.items():
        tell(f"answers: {role}")
        grades[role] = {task: _asked(lab, quality, setting, task, n) for task in quality.tasks}
    return Graded(grades)


def _asked(lab: Lab, quality: Quality, setting: Setting, task: str, n: int) -> list[float]:
    if task == CODE_LOSS:
        key = repr((setting, task, n, quality.window, quality.given, quality.edited))
    else:
        key = repr((setting, task, n, quality.temperature))
    if key not in lab.grades:
        if task == CODE_LOSS:
            lab.grades[key] = code(lab, setting, quality, n)
        else:
            lab.grades[key] = right(lab, setting, task, n, quality.temperature)
    return lab.grades[key]


def quality_checks(quality: Quality, found: Graded) -> list[Check]:
    """Checks that the method keeps the baseline's quality or exceeds it, that it exceeds its rivals', and that the
    control does not keep the method's. None of them is answered where the baseline leaves no room on any task."""
    what = _what(quality, found)
    others: list[tuple[Part, str, str, float]] = []
    if quality.gains:
        others += [("answers", "baseline", "all of it above 0", 0.0)]
    elif quality.allowed is not None:
        others += [("answers", "baseline", f"all of it above -{_limit(quality, found)}", -quality.allowed)]
    others += [("answers", rival, "all of it above 0", 0.0) for rival in quality.rivals]
    if not quality.alone:
        others += [("control", "control", "all of it above 0", 0.0)]
    checks = []
    for part, other, expected, border in others:
        name = f"{what}, method less {other}"
        of: Part | None = "answers" if part == "control" else None
        if not found.counted:
            checks.append(Check(part, name, _full(quality, found), expected, None, of, quality.model))
            continue
        lead = found.between("method", other)
        passed, short = lead.low > border, _short(lead, found.percent, other)
        rival = other in quality.rivals
        checks.append(Check(part, name, lead.text(found.percent), expected, passed, of, quality.model, short, rival))
    return checks


def _what(quality: Quality, found: Graded) -> str:
    sampled = f", T={quality.temperature:g}" if quality.temperature else ""
    counted = found.counted or quality.tasks
    if not found.percent:
        return f"log-likelihood of code, {quality.model}"
    return f"right answers ({', '.join(counted)}{sampled}), {quality.model}"


def _limit(quality: Quality, found: Graded) -> str:
    allowed = quality.allowed or 0.0
    return f"{allowed * 100:g} points" if found.percent else f"{allowed:g} nats"


def _full(quality: Quality, found: Graded) -> str:
    shares = [f"{task} {sum(each) / len(each):.0%}" for task, each in found.grades["baseline"].items()]
    return f"no task with a baseline of {LOWEST:.0%} to {HIGHEST:.0%}: {', '.join(shares)}"


def _short(lead: Difference, percent: bool, other: str) -> str:
    size = f"{lead.mean * 100:+.0f} points" if percent else f"{lead.mean:+.3f} nats"
    words = "" if other == "baseline" else f" against {other}"
    return f"{size}{words}"
