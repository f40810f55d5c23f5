"""Reports what verifiers accept beside the best possible: a table, a plot, lines for a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phasewise.bench import figures, report
from phasewise.bench.bound import GuessOdds
from phasewise.bench.report import unique
from phasewise.verbs.draft import Drawn

HEADER = ["guesses", "drawn", "verifier", "accepted", "best possible", "missing", "most missing"]


@dataclass(frozen=True)
class Total:
    """A rule over all places: means, and what is missing to the best possible at the place where that is most."""

    guesses: int
    drawn: Drawn
    verify: str
    accepted: float
    best: float
    most: float


def totals(found: Sequence[GuessOdds]) -> list[Total]:
    """Totals by number of guesses, then in the order of the rules."""
    made = []
    for key in unique((one.guesses, one.drawn, one.verify) for one in found):
        own = [one for one in found if (one.guesses, one.drawn, one.verify) == key]
        accepted, best = (sum(values) / len(own) for values in zip(*((one.accepted, one.best) for one in own)))
        made.append(Total(*key, accepted, best, max(one.best - one.accepted for one in own)))
    return sorted(made, key=lambda total: total.guesses)


def table(found: Sequence[Total]) -> tuple[list[str], list[list[str]]]:
    """Header and a row per rule and number of guesses; shares in per cent, what is missing in points. The value of
    distinct guesses at one place hangs on what was drawn there, so nothing is said of that."""
    return HEADER, [
        [
            str(one.guesses), one.drawn, one.verify, f"{one.accepted:.2%}", f"{one.best:.2%}",
            f"{100 * max(0.0, one.best - one.accepted):.2f}",
            "-" if one.drawn == "without_replacement" and one.guesses > 2 else f"{100 * max(0.0, one.most):.2f}",
        ]
        for one in found
    ]  # fmt: skip


def draw(image: Path, found: Sequence[Total], title: str) -> None:
    """Acceptance by number of guesses: a line per rule, and a dashed one for the best possible of its guesses."""
    ends = []
    with figures.figure(image, f"{title}: share of guesses accepted (dashed: the best possible)", 4.0) as axes:
        rules = unique((one.drawn, one.verify) for one in found)[: figures.MOST]
        for (drawn, verify), colour in zip(rules, figures.COLOURS):
            own = [one for one in found if (one.drawn, one.verify) == (drawn, verify)]
            x = [one.guesses for one in own]
            axes.plot(x, [one.accepted for one in own], marker="o", markersize=4, color=colour)
            axes.plot(x, [one.best for one in own], linestyle="--", linewidth=1, color=colour)
            ends.append((f"{drawn}, {verify}", colour, float(x[-1]), own[-1].accepted))
        axes.set_xticks(unique(one.guesses for one in found))
        axes.set_xlabel("guesses for a token")
        figures.end_labels(axes, ends)


def section(found: Sequence[Total], about: str) -> str:
    """Markdown."""
    return f"{about}\n\n{report.markdown(*table(found))}"
