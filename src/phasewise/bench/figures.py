"""Figures of the benchmarks: one question each, at most eight series, labelled where they lie.

Colours are those of Okabe and Ito, which people with any colour vision tell apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
GREY = "#999999"
MOST = len(COLOURS)  # series of a figure
ROWS = 16  # bars of a figure
WIDTH = 7.6  # inches


@dataclass(frozen=True)
class BarRow:
    """A row of a bar chart: its name, its length and the text at its end; `good` bars are coloured, others grey."""

    name: str
    value: float
    text: str
    good: bool = True


def beside(image: Path, *words: object) -> Path:
    """The path of one of several figures: `kv.png` and later@1k, live -> `kv-later-1k-live.png`."""
    return image.with_stem("-".join([image.stem, *(re.sub(r"\W+", "-", str(word)).strip("-") for word in words)]))


@contextmanager
def figure(image: Path, title: str, height: float) -> Iterator[Axes]:
    """One panel, saved as `image`; an SVG has nothing in it that depends on the day."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(figsize=(WIDTH, height), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    drawn.suptitle(title, x=0.01, ha="left", fontsize=10)
    try:
        yield axes
        image.parent.mkdir(parents=True, exist_ok=True)
        meta = {"Date": None} if image.suffix == ".svg" else None
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": image.name}):
            drawn.savefig(image, dpi=110, metadata=meta)
    finally:
        pyplot.close(drawn)


def bars(image: Path, rows: Sequence[BarRow], title: str) -> None:
    """Horizontal bars, the first row on top; of more than `ROWS`, the title says how many are left out."""
    shown = rows[:ROWS]
    left = f" ({len(rows) - len(shown)} more in the table)" if len(rows) > len(shown) else ""
    with figure(image, title + left, 0.7 + 0.26 * len(shown)) as axes:
        places = range(len(shown), 0, -1)
        colours = [COLOURS[0] if one.good else GREY for one in shown]
        drawn = axes.barh(places, [one.value for one in shown], color=colours, height=0.7)
        axes.bar_label(drawn, [one.text for one in shown], padding=4, fontsize=8)
        axes.set_yticks(places, [one.name for one in shown], fontsize=8)
        axes.set_xticks([])
        axes.spines[["bottom", "left"]].set_visible(False)
        axes.tick_params(length=0)
        axes.margins(x=0.25)
        axes.set_xlim(left=0)


def end_labels(axes: Axes, ends: Sequence[tuple[str, str, float, float]]) -> None:
    """Write each series' name in its colour right of its last point: (name, colour, x, y), pushed apart upwards."""
    low, high = axes.get_ylim()
    least, last = 0.055 * (high - low), float("-inf")
    for name, colour, x, y in sorted(ends, key=lambda end: end[3]):
        last = max(y, last + least)
        axes.annotate(
            name, (x, last), (8, 0), textcoords="offset points", va="center", fontsize=8, color=colour,
            annotation_clip=False,
        )  # fmt: skip
