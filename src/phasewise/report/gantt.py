"""Both phases of every request, and what every worker had: the same bars, by request and by worker."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from phasewise.report.drawing import COLOURS, Drawing, axes, drawing, same_time
from phasewise.report.lives import DECODE, PHASES, PREFILL, Life, LifeSpan, Recording
from phasewise.report.runs import RecordedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LANES = {"prefill": COLOURS[PREFILL], "decode": COLOURS[DECODE]}
MOST = 200  # requests that are drawn: more would be thinner than a line
NAMED = 24  # requests at a time on a worker whose numbers can still be read
BINS = 240  # of the time that a lane shows
BAR = re.compile(r'<g id="[^"]*-bar-(\d+)-(\d+)">')


class GanttBar(NamedTuple):
    """A span of a request's life, and which."""

    number: int
    nth: int
    span: LifeSpan


def gantt(run: RecordedRun) -> Drawing | None:
    """Every request's phases; below, those of each worker's requests, and the rows it computed."""
    told = run.recording
    if told is None:
        return None
    lives = sorted(told.lives, key=lambda life: life.stages[0])[:MOST]
    bars = [_bars(life, told.end) for life in lives]
    places = {worker: packed(stays(bars, worker)) for worker in told.workers}
    heights = [0.6 + 0.055 * max(20, len(lives))]
    for rows in places.values():
        heights += [0.3 + 0.07 * max(4, len(rows)), 0.7]
    figure, (top, *below) = axes(1 + 2 * len(places), 1, 0, heights=heights)
    for row, each in enumerate(bars):
        _draw(top, told, row, each)
    top.invert_yaxis()
    top.set_ylabel("request")
    top.legend(handles=_keys(), fontsize=8, frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    for (worker, rows), panel, lane in zip(places.items(), below[::2], below[1::2]):
        _requests(panel, told, rows)
        _named(panel, f"{worker},\nrequests")
        _rows(lane, told, worker)
        _named(lane, "rows/s")
    same_time([top, *below], told)
    more = f" (the first {MOST} of {len(told.lives)})" if len(told.lives) > MOST else ""
    lost = f"; {told.dropped} events were lost" if told.dropped else ""
    words = (
        f"{len(lives)} requests{more} by the server's own clock; below, for each worker, the requests it had, by "
        f"number, and its rows per second{lost}. Point at a bar to read what it is."
    )
    made = drawing(f"Both phases, request by request: {run.name}", words, figure, run.commands("load"))
    return replace(made, svg=_titled(made.svg, {life.number: each for life, each in zip(lives, bars)}))


def _bars(life: Life, end: float) -> list[GanttBar]:
    return [GanttBar(life.number, nth, span) for nth, span in enumerate(life.spans(end))]


def stays(lives: Iterable[Sequence[GanttBar]], worker: str) -> list[list[GanttBar]]:
    """Requests at a worker, in order: what each was there without a break."""
    found: list[list[GanttBar]] = []
    for bars in lives:
        last = -2
        for bar in bars:
            if bar.span.worker != worker:
                continue
            if bar.nth == last + 1:
                found[-1].append(bar)
            else:
                found.append([bar])
            last = bar.nth
    return sorted(found, key=lambda stay: stay[0].span.start)


def packed(found: Iterable[list[GanttBar]]) -> list[list[list[GanttBar]]]:
    """Rows of stays that do not overlap: as many rows as there were requests at a time."""
    rows: list[list[list[GanttBar]]] = []
    for stay in found:
        free = (row for row in rows if row[-1][-1].span.end <= stay[0].span.start)
        row = next(free, None)
        if row is None:
            rows.append([stay])
        else:
            row.append(stay)
    return rows


def _draw(panel: Axes, told: Recording, row: int, bars: Sequence[GanttBar]) -> None:
    """Each under a name, by which it gets its title."""
    which = panel.figure.axes.index(panel)
    for number, nth, span in bars:
        at = span.start - told.start, span.end - span.start
        drawn = panel.broken_barh([at], (row, 0.85), facecolors=COLOURS[span.phase], linewidth=0)
        drawn.set_gid(f"{which}-bar-{number}-{nth}")


def _requests(panel: Axes, told: Recording, rows: Sequence[Sequence[list[GanttBar]]]) -> None:
    """A worker's requests, in as many rows as it had of them at a time."""
    for row, found in enumerate(rows):
        for stay in found:
            _draw(panel, told, row, stay)
            if len(rows) <= NAMED:
                start = stay[0].span.start - told.start
                panel.text(start, row + 0.45, f" {stay[0].number}", fontsize=4, va="center", clip_on=True)
    panel.set_ylim(max(4, len(rows)), 0)
    panel.set_yticks([])


def _rows(panel: Axes, told: Recording, worker: str) -> None:
    """Rows per second of prefill and decode."""
    width = max((told.end - told.start) / BINS, 1e-6)
    sums = {kind: [0.0] * (BINS + 1) for kind in LANES}
    for work in told.work:
        if work.worker == worker:
            at = min(int((work.at - told.start) / width), BINS)
            sums["prefill"][at] += work.prefill / width
            sums["decode"][at] += work.decode / width
    times = [i * width for i in range(BINS + 1)]
    panel.stackplot(times, sums["prefill"], sums["decode"], colors=list(LANES.values()), step="post", linewidth=0)


def _named(panel: Axes, words: str) -> None:
    panel.set_ylabel(words, rotation=0, ha="right", va="center", fontsize=8)


def _keys() -> list[Any]:
    from matplotlib.patches import Patch

    return [Patch(color=COLOURS[phase], label=phase) for phase in PHASES]


def _titled(svg: str, lives: dict[int, list[GanttBar]]) -> str:
    """Every bar says what it is."""

    def titled(found: re.Match[str]) -> str:
        number, nth = map(int, found.groups())
        span = lives[number][nth].span
        by = f", {span.worker}" if span.worker else ""
        words = f"request {number}: {span.phase}{by}, {1e3 * (span.end - span.start):.3g} ms"
        return f"{found[0]}<title>{escape(words)}</title>"

    return BAR.sub(titled, svg)
