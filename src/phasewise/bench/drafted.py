"""Reports drafters: tables of speed by task and of work per token, a plot, lines for a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

from phasewise.bench import figures, report
from phasewise.bench.drafting import PLAIN, Heat, loops
from phasewise.bench.report import unique

ALL = "all"
WORK = ["drafter", "tokens a pass", "accepted", "passes/token", "rows/token", "row layers/token",
        "draft passes/token", "same answers"]  # fmt: skip


@dataclass(frozen=True)
class DrafterResult:
    """A drafter on a task (or on all) at one batch size. `speed`: its tokens per second over plain decoding's."""

    setting: str
    task: str
    batch: int
    speed: float
    tokens: int
    answers: int
    per_pass: float  # of a request, after its first token
    accepted: float | None  # share of the guesses
    passes: float  # this and the next three: per token
    rows: float
    row_layers: float
    draft_passes: float
    same: int  # answers that are plain decoding's


def results(heats: Sequence[Heat]) -> list[DrafterResult]:
    """Results by batch and drafter, plain decoding first: every task in order, then ALL, whose speed is the tasks'
    geometric mean, so that no task counts for more because its answers are longer."""
    found: list[DrafterResult] = []
    for batch in unique(heat.batch for heat in heats):
        mine = [heat for heat in heats if heat.batch == batch]
        tasks = unique(heat.task for heat in mine)
        for setting in unique(heat.setting for heat in mine if heat.setting == PLAIN) + unique(
            heat.setting for heat in mine if heat.setting != PLAIN
        ):
            each = [_result(mine, setting, task) for task in tasks]
            found += each
            found.append(_result(mine, setting, None, geometric_mean([one.speed for one in each])))
    return found


def _result(heats: Sequence[Heat], setting: str, task: str | None, speed: float | None = None) -> DrafterResult:
    own = [heat for heat in heats if heat.setting == setting and task in (None, heat.task)]
    plain = [heat for heat in heats if heat.setting == PLAIN and task in (None, heat.task)]
    work = sum((heat.work for heat in own[1:]), own[0].work)
    tokens, answers = sum(heat.tokens for heat in own), sum(len(heat.answers) for heat in own)
    usual = {(heat.task, heat.number): heat.answers for heat in plain}
    return DrafterResult(
        setting, task or ALL, own[0].batch,
        _rate(own) / _rate(plain) if speed is None else speed,
        tokens, answers, (tokens - answers) / max(1, sum(heat.turns for heat in own)),
        work.accepted / work.drafted if work.drafted else None,
        work.forwards / tokens, work.rows / tokens, work.row_layers / tokens, work.draft_forwards / tokens,
        sum(a == b for heat in own for a, b in zip(heat.answers, usual[heat.task, heat.number], strict=True)),
    )  # fmt: skip


def _rate(heats: Sequence[Heat]) -> float:
    """Tokens a second over all questions; of each question the round of median time, lest one that was disturbed
    counts."""
    each: dict[tuple[str, int], list[Heat]] = {}
    for heat in heats:
        each.setdefault((heat.task, heat.question), []).append(heat)
    typical = [sorted(rounds, key=lambda heat: heat.seconds)[(len(rounds) - 1) // 2] for rounds in each.values()]
    return sum(heat.tokens for heat in typical) / sum(heat.seconds for heat in typical)


def speeds(found: Sequence[DrafterResult], batch: int) -> tuple[list[str], list[list[str]]]:
    """Header and a row per drafter, fastest first: times as fast as plain decoding, by task and over all."""
    mine = [one for one in found if one.batch == batch and one.setting != PLAIN]
    tasks = [task for task in unique(one.task for one in mine) if task != ALL]
    by = {(one.setting, one.task): one for one in mine}
    names = sorted(unique(one.setting for one in mine), key=lambda name: -by[name, ALL].speed)
    body = [
        [name, *(f"{by[name, task].speed:.2f}" for task in (ALL, *tasks)), f"{by[name, ALL].per_pass:.2f}"]
        for name in names
    ]
    return ["drafter", ALL, *tasks, "tokens a pass"], body


def work(found: Sequence[DrafterResult], batch: int) -> tuple[list[str], list[list[str]]]:
    """Header and a row per drafter, plain decoding first: work per token over all tasks."""
    mine = [one for one in found if one.batch == batch and one.task == ALL]
    return WORK, [
        [
            one.setting, f"{one.per_pass:.2f}", "-" if one.accepted is None else f"{one.accepted:.0%}",
            f"{one.passes:.3f}", f"{one.rows:.2f}", f"{one.row_layers:.1f}", f"{one.draft_passes:.2f}",
            f"{one.same} of {one.answers}",
        ]
        for one in mine
    ]  # fmt: skip


def lengths(heats: Sequence[Heat]) -> list[str]:
    """Per task: how many questions, how long plain decoding's answers are, and how many of them loop."""
    lines: list[str] = []
    first = heats[0].batch
    for task in unique(heat.task for heat in heats):
        answers = [
            a for heat in heats if (heat.setting, heat.task, heat.batch) == (PLAIN, task, first) for a in heat.answers
        ]
        mean, looped = sum(map(len, answers)) / len(answers), sum(map(loops, answers))
        lines.append(f"{task}: {len(answers)} answers of {mean:.0f} tokens on average, {looped} end in a loop")
    return lines


def draw(image: Path, found: Sequence[DrafterResult], title: str) -> None:
    """A figure per batch: a row per drafter with a bar for all tasks and a dot per task, at most seven of them."""
    batches = unique(one.batch for one in found)
    names = [row[0] for row in reversed(speeds(found, batches[0])[1])]
    for batch in batches:
        mine = [one for one in found if one.batch == batch and one.setting in names]
        whole = [one for one in mine if one.task == ALL]
        tasks = [task for task in unique(one.task for one in mine) if task != ALL][: figures.MOST - 1]
        name = f"{title}, {batch} at once: times as fast as plain decoding"
        with figures.figure(figures.beside(image, batch), name, 1.4 + 0.28 * len(names)) as axes:
            axes.barh([names.index(one.setting) for one in whole], [one.speed for one in whole], height=0.5,
                      color="#dddddd")  # fmt: skip
            for task, colour in zip(tasks, figures.COLOURS):
                dots = [one for one in mine if one.task == task]
                axes.plot([one.speed for one in dots], [names.index(one.setting) for one in dots], "o", markersize=4,
                          color=colour, label=task)  # fmt: skip
            axes.axvline(1.0, color=figures.GREY, linestyle=":", linewidth=1)
            axes.set_yticks(range(len(names)), names, fontsize=8)
            axes.legend(fontsize=8, frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.1))


def section(heats: Sequence[Heat], found: Sequence[DrafterResult], about: str, notes: Sequence[str]) -> str:
    """Markdown: per batch the speeds, then the work of one request alone (or of the first batch), then the answers."""
    parts = [about]
    for batch in unique(one.batch for one in found):
        parts.append(f"{batch} at once, times as fast as plain decoding:\n\n{report.markdown(*speeds(found, batch))}")
    first = found[0].batch
    parts.append(f"Work, {first} at once:\n\n{report.markdown(*work(found, first))}")
    parts.append("\n".join(f"- {line}" for line in [*lengths(heats), *notes]))
    return "\n\n".join(parts)
