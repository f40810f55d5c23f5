"""Quality over bytes: what each setting costs beside dense, and who is on the front; table, CSV, plot, page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phasewise.bench import figures, report, stats
from phasewise.bench.kv import DENSE, number
from phasewise.bench.quality import PERCENT

HEADER = ["system", "quality", "less dense", "live KV", "of dense", "read/token", "of dense", "front"]
COSTS = ("live", "read")
MOST = 0.95  # of dense's bytes: more is no saving
SAID = {"live": "held", "read": "read per token"}
Line = Mapping[str, Any]


@dataclass(frozen=True)
class FrontPoint:
    """One setting on one task, beside dense. `fronts`: of which bytes nobody has less at this quality or better."""

    line: Line
    dense: Line
    fronts: tuple[str, ...] = ()

    @property
    def setting(self) -> str:
        return str(self.line["setting"])

    @property
    def family(self) -> str:
        """The methods without those of their knobs that are numbers."""
        return " ".join(map(_family, self.setting.split()))

    @property
    def percent(self) -> bool:
        return self.line["unit"] in PERCENT

    @property
    def better(self) -> float:
        """Quality as a number of which more is better."""
        return float(self.line["value"] if self.percent else -self.line["value"])

    @property
    def less(self) -> stats.Difference | None:
        """The difference over paired examples; None where they are not the same ones."""
        own, base = self.line["values"], self.dense["values"]
        if not own or len(own) != len(base):
            return None
        return (stats.shares if self.line["unit"] == "exact" else stats.means)(own, base)

    @property
    def loses(self) -> bool:
        """True if a loss is certain: the whole interval of the paired difference lies on the worse side."""
        less = self.less
        return less is not None and (less.high < 0 if self.percent else less.low > 0)

    def share(self, cost: str) -> float | None:
        """The share of dense's bytes."""
        own, base = self.line[cost], self.dense[cost]
        return own / base if own is not None and base else None


def _family(word: str) -> str:
    method, _, knobs = word.partition(":")
    rest = [knob for knob in knobs.split(",") if knob and not number(knob.rpartition("=")[2])]
    return ":".join([method, *([",".join(rest)] if rest else [])])


def points(lines: Sequence[Line]) -> dict[str, list[FrontPoint]]:
    """Points by task, measured beside dense, with their Pareto fronts. Tasks without dense are left out."""
    found: dict[str, list[FrontPoint]] = {}
    for task in report.unique(line["task"] for line in lines):
        own = [line for line in lines if line["task"] == task and "refused" not in line]
        dense = next((line for line in own if line["setting"] == DENSE), None)
        if dense is not None:
            some = [FrontPoint(line, dense) for line in own]
            on = {cost: front([(point.line[cost], point.better) for point in some]) for cost in COSTS}
            found[task] = [
                FrontPoint(point.line, dense, tuple(cost for cost in COSTS if on[cost][at]))
                for at, point in enumerate(some)
            ]
    return found


def front(some: Sequence[tuple[float | None, float]]) -> list[bool]:
    """Which of (bytes, quality) nobody beats: has no more bytes and no less quality, and one of them better. Bytes that
    are not known are on no front."""

    def beaten(cost: float, better: float) -> bool:
        return any(
            other is not None and other <= cost and its >= better and (other < cost or its > better)
            for other, its in some
        )

    return [cost is not None and not beaten(cost, better) for cost, better in some]


# ---- for people and programs
def cells(point: FrontPoint) -> list[str]:
    """A row below HEADER."""
    line, less = point.line, point.less
    shown = [f"{line[key]:.1%}" if point.percent else f"{line[key]:.3f}" for key in ("value", "low", "high")]
    beside = "-" if less is None or point.setting == DENSE else less.text(point.percent)
    held, read = point.share("live"), point.share("read")
    return [
        f"`{point.setting}`", f"{shown[0]} ({shown[1]} to {shown[2]})", beside,
        "-" if line["live"] is None else report.size(line["live"]), "-" if held is None else f"{held:.0%}",
        report.size(line["read"]), "-" if read is None else f"{read:.0%}", ", ".join(point.fronts) or "-",
    ]  # fmt: skip


def title(task: str, some: Sequence[FrontPoint]) -> str:
    line = some[0].line
    return f"{task}: {'right answers' if line['unit'] == 'exact' else line['unit']}, n = {line['n']}"


def notes(lines: Sequence[Line], reasons: bool = True) -> list[str]:
    """Notes on what could not be measured, once per setting and reason; and on bytes that no column has."""
    tasks: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        if "refused" in line:
            tasks.setdefault((line["setting"], line["refused"]), []).append(line["task"])
    found = [f"Not run: `{setting}`, {', '.join(names)}{f': {reason}' if reasons else ''}."
             for (setting, reason), names in tasks.items()]  # fmt: skip
    for task, some in points(lines).items():
        sent = [f"`{point.setting}` {report.size(point.line['sent'])}" for point in some if point.line["sent"]]
        if sent:
            found.append(f"{task}: KV sent to another engine for a token of the prompt: {', '.join(sent)}.")
        fewer = [(point.setting, point.share("prompt_layers")) for point in some]
        told = [f"`{setting}` {share:.0%}" for setting, share in fewer if share is not None and share < 0.995]
        if told:
            found.append(f"{task}: layers run for a row of the prompt, of dense's: {', '.join(told)}.")
    return found


def machines(lines: Sequence[Line]) -> str:
    """The machines that computed these lines, where they say so."""
    return " and ".join(report.unique(str(line["on"]) for line in lines if "on" in line))


def write_csv(path: Path, lines: Sequence[Line]) -> None:
    """A line per measurement, with what came out beside dense; the values of single examples are left out."""
    rows = []
    for some in points(lines).values():
        for point in some:
            less = point.less
            own = {key: value for key, value in point.line.items() if key not in ("values", "base", "name")}
            beside = {"less": less and less.mean, "less_low": less and less.low, "less_high": less and less.high}
            shares = {f"{cost}_of_dense": point.share(cost) for cost in COSTS}
            rows.append({**own, **beside, **shares, "front": " ".join(point.fronts)})
    report.write_csv(path, rows)


def draw(image: Path, lines: Sequence[Line], about: str) -> list[Path]:
    """A figure per task and kind of bytes: the fewest bytes at which each family of methods still answers as dense."""
    written = []
    for task, some in points(lines).items():
        for cost in COSTS:
            path = figures.beside(image, task, cost)
            figures.bars(path, fewest(some, cost), f"{about}, {task}: fewest bytes {SAID[cost]} without a certain loss")
            written.append(path)
    return written


def fewest(some: Sequence[FrontPoint], cost: str) -> list[figures.BarRow]:
    """A bar per family of methods: its fewest bytes without a certain loss, shortest first.

    After them, in grey, the best budget of each family that loses at every one. Families that save nothing are left
    out.
    """
    found: list[tuple[bool, float, figures.BarRow]] = []
    for family in report.unique(point.family for point in some if point.setting != DENSE):
        own = [(share, point) for point in some if point.family == family and (share := point.share(cost)) is not None]
        kept = [(share, point) for share, point in own if not point.loses]
        if not own:
            continue
        share, point = min(kept, key=lambda one: one[0]) if kept else max(own, key=lambda one: one[1].better)
        if share > MOST:
            continue
        text = f"{share:.0%}"
        if not kept and point.less is not None:
            text += f", loses {point.less.text(point.percent).partition(' (')[0].lstrip('+-')}"
        found.append((not kept, share, figures.BarRow(point.setting, share, text, bool(kept))))
    return [bar for _, _, bar in sorted(found, key=lambda one: one[:2])]


# ---- the page
INTRO = """# KV methods: which one when

Every setting answers the same examples as dense decoding. Written by `phasewise bench kv --write docs/results/kv.md`.
"""


def section(lines: Sequence[Line], about: str) -> str:
    """A table per task below what was measured where."""
    parts = [about]
    for task, some in points(lines).items():
        parts.append(f"{title(task, some)}\n\n{report.markdown(HEADER, map(cells, some))}")
    return "\n\n".join([*parts, *notes(lines, reasons=False)])  # reasons may name places
