"""Shared parts of a report's drawings: SVG that stands in the page."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phasewise.report.lives import DECODE, HANDOFF, PREFILL, WAITING, Recording

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {WAITING: "#b8b8b8", PREFILL: "#0072b2", HANDOFF: "#e69f00", DECODE: "#009e73"}  # told apart by everybody


@dataclass(frozen=True)
class Drawing:
    """`words` say what is to be seen; `commands` made it."""

    title: str
    words: str
    svg: str
    commands: Sequence[str]


def axes(rows: int, columns: int, height: float, heights: Sequence[float] = ()) -> tuple[Figure, list[Axes]]:
    """Panels below and beside one another, of one height or of `heights`, in inches."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (9.6, sum(heights) + 0.5 if heights else height)
    ratios = {"height_ratios": list(heights)} if heights else None
    figure, found = pyplot.subplots(
        rows, columns, figsize=size, squeeze=False, gridspec_kw=ratios, layout="constrained"
    )
    panels = list(found.flat)
    for panel in panels:
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels


def same_time(panels: Sequence[Axes], told: Recording) -> None:
    """All show all of the time."""
    for panel in panels:
        panel.set_xlim(0, told.end - told.start)
    for panel in panels[:-1]:
        panel.set_xticklabels([])
    panels[-1].set_xlabel("seconds")


def drawing(title: str, words: str, figure: Figure, commands: Sequence[str]) -> Drawing:
    """A figure that is done, as SVG without anything that depends on the day."""
    import matplotlib
    from matplotlib import pyplot

    written = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(written, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    text = written.getvalue()
    return Drawing(title, words, text[text.index("<svg") :], commands)
