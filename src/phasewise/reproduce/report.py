"""Findings about a system as Markdown for people and as plain data for programs, and back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from phasewise.bench.quality import Row
from phasewise.bench.report import markdown, milliseconds
from phasewise.bench.rounds import Ratio
from phasewise.reproduce.lab import Scale
from phasewise.reproduce.system import System
from phasewise.reproduce.verdict import Check, Verdict

MARK = {True: "yes", False: "**no**", None: "not examined"}


@dataclass(frozen=True)
class Grade:
    """The grade of one contender in one row of tasks, on a model, at a temperature."""

    role: str
    row: Row
    model: str = "pocket"
    temperature: float = 0.0


@dataclass(frozen=True)
class Speed:
    """Median seconds of the method and of another, and the paired ratio; the settings that were timed, by role."""

    name: str
    against: str
    method: float
    other: float
    faster: Ratio
    settings: dict[str, str]
    model: str


@dataclass(frozen=True)
class Report:
    """One system as it was found. `settings` are the contenders by role, as words; `digest` is that of the files and
    the version that it follows from, `machine` where it was measured, `seconds` what it took by the clock, and `busy`
    those in which a core worked for it."""

    name: str
    title: str
    paper: str
    claim: str
    conditions: tuple[str, ...]
    settings: dict[str, str]
    control_is: str
    model: str
    note: str
    scale: Scale
    checks: tuple[Check, ...]
    grades: tuple[Grade, ...]
    speeds: tuple[Speed, ...]
    verdict: Verdict
    line: str = ""
    arithmetic: tuple[str, ...] = ()
    digest: str = ""
    machine: str = ""
    seconds: float = 0.0
    busy: float = 0.0

    @classmethod
    def of(cls, name: str, system: System, model: str, scale: Scale, **found: Any) -> Report:
        """Builds a report from a system's own description and from what was found."""
        settings = {role: str(setting) for role, setting in system.contenders.items()}
        return cls(
            name, system.title, str(system.paper), system.claim, system.conditions, settings, system.control_is, model,
            system.note, scale, line=system.line, **found,
        )  # fmt: skip

    def plain(self) -> dict[str, Any]:
        """Returns the report as data that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Report:
        """Rebuilds a report from what `plain` gave, also after a way through JSON."""
        speeds = tuple(Speed(**{**one, "faster": Ratio(**one["faster"])}) for one in data["speeds"])
        return cls(**{
            **data,
            "conditions": tuple(data["conditions"]),
            "scale": Scale(**data["scale"]),
            "checks": tuple(Check(**check) for check in data["checks"]),
            "grades": tuple(Grade(**{**one, "row": Row(**one["row"])}) for one in data["grades"]),
            "arithmetic": tuple(data["arithmetic"]),
            "speeds": speeds,
            "verdict": Verdict(data["verdict"]["word"], tuple(data["verdict"]["reasons"])),
        })  # fmt: skip

    def markdown(self, level: int = 2) -> str:
        """A section about the system."""
        blocks = [
            f"{'#' * level} {self.title}",
            f"**{self.verdict.word}**. {self.paper}. **Claim**: {self.claim}",
            "**Measured there under**: " + "; ".join(self.conditions) + f". **Here**: {self._here()}",
            _bullets(self.settings, self.control_is),
            _checks(self.checks),
        ]
        if self.arithmetic:
            blocks.append("**Arithmetic of the knobs** (no check: it cannot fail):\n\n" + _list(self.arithmetic))
        if self.grades:
            blocks.append(_grades(self.grades))
        if self.speeds:
            blocks.append(_speeds(self.speeds))
        if self.verdict.reasons:
            blocks.append(f"**Verdict: {self.verdict.word}**, because:\n\n" + _list(self.verdict.reasons))
        else:
            blocks.append(f"**Verdict: {self.verdict.word}.** Every condition of the claim passes, and controls lose.")
        if self.note:
            blocks.append(f"*Note.* {self.note}")
        if self.machine:
            took = f" in {self.seconds:,.0f} s" * bool(self.seconds)
            took += f", {self.busy:,.0f} s of processor time" * bool(self.busy)
            blocks.append(f"Measured on {self.machine}{took}.")
        return "\n\n".join(blocks)

    def _here(self) -> str:
        words = [f"the model `{self.model}`", f"seed {self.scale.seed}"]
        words += [f"{self.scale.rounds} rounds"] * bool(self.speeds)
        words += ["a quick run: samples too small for conclusions"] * self.scale.quick
        return ", ".join(words) + "."


def _bullets(settings: Mapping[str, str], control_is: str) -> str:
    said = {role: f"{role}: `{setting}`" for role, setting in settings.items()}
    said["control"] += f", {control_is}"
    return _list(said.values())


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _checks(checks: Sequence[Check]) -> str:
    body = [[c.name, f"control of {c.of}" if c.of else c.part, c.measured, c.expected, MARK[c.passed]] for c in checks]
    return _table(["check", "part", "measured", "expected", "passes"], body)


def _grades(grades: Sequence[Grade]) -> str:
    body = []
    for grade in grades:
        row, exact = grade.row, grade.row.unit == "exact"
        value = f"{row.value:.1%} right" if exact else f"{row.value:.3f} {row.unit}"
        span = f"{row.low:.1%} to {row.high:.1%}" if exact else f"{row.low:.3f} to {row.high:.3f}"
        way = "forced" if not exact else f"T={grade.temperature:g}" if grade.temperature else "greedy"
        body.append([row.name, grade.model, way, grade.role, value, span, str(row.n)])
    return markdown(["task", "model", "written", "who", "value", "95 % interval", "n"], body)


def _speeds(speeds: Sequence[Speed]) -> str:
    body = [
        [
            s.name, s.model, f"`{s.settings['method']}`: {milliseconds(s.method)}",
            f"{s.against} `{s.settings[s.against]}`: {milliseconds(s.other)}", str(s.faster), str(s.faster.n),
        ]
        for s in speeds
    ]  # fmt: skip
    return _table(["time", "model", "method", "other", "times as fast (range)", "rounds"], body)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


OVERVIEW = ("system", "claim", "here", "verdict", "why no more")
SAMPLED = re.compile(r", T=(?P<temperature>[\d.]+)\), ")  # in the name of a check on answers
CELL = 200  # characters of a cell of the overview at most; the system's section has the rest


def overview(reports: Sequence[Report]) -> str:
    """A row per system: its claim in one line, what it comes to here, the verdict and the first reason."""
    return _table(OVERVIEW, [summary(report) for report in reports])


def summary(report: Report) -> list[str]:
    """The row of one system; its name leads to its section."""
    reasons = report.verdict.reasons
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    return [
        f"[{report.title}](#{anchor(report.title)})", report.line, _cut(_ours(report)), f"**{report.verdict.word}**",
        _cut(reasons[0]) + more if reasons else "",
    ]  # fmt: skip


def _cut(text: str) -> str:
    """The first words of a text that is too long for a cell."""
    return text if len(text) <= CELL else text[:CELL].rpartition(" ")[0].rstrip(",;:") + " ..."


def anchor(title: str) -> str:
    """The anchor that Markdown pages give a heading of these words."""
    kept = "".join(c for c in title.lower() if c.isalnum() or c in " -_")
    return kept.replace(" ", "-")


def _written(check: Check) -> str:
    """What a check on answers found, in a few words; of drawn answers with their temperature."""
    sampled = SAMPLED.search(check.name)
    return f"at T={sampled['temperature']} {check.short}" if sampled and check.short else check.short


def _ours(report: Report) -> str:
    """What answers, cost and time come to here, in one line."""
    said = []
    models = list(dict.fromkeys(check.model for check in report.checks if check.part == "answers" and check.short))
    for model in models:
        shorts = [_written(check) for check in report.checks if check.part == "answers" and check.model == model]
        said.append(f"answers{f' ({model})' if model else ''} {', '.join(filter(None, shorts))}")
    said += [check.short for check in report.checks if check.part == "cost" and check.short]
    said += [f"{each} (arithmetic)" for each in report.arithmetic]
    said += [check.short for check in report.checks if check.part == "time" and check.short]
    return "; ".join(said)
