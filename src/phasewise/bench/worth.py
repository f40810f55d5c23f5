"""Reports KV methods' gains on the clock beside those that the saved bytes promise: a table, CSV, plot, page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from phasewise.bench import figures, report
from phasewise.bench.rounds import Ratio, ratio
from phasewise.bench.savers import DENSE, SettingTurn
from phasewise.model.model import Model

LEAST = 0.01  # a promised gain below 1 % is none that a share could be told of
HEADER = ["setting", "TPOT", "gain", "KV read/token", "gain the bytes promise", "reached"]


@dataclass(frozen=True)
class Worth:
    """One setting at one batch size. `gain`: dense's time of a token over its own, paired by round, above 1 = faster.

    `promised`: the same if every byte it saves, of KV and of the weights of skipped layers, took as long as the machine
    needed to read one in that round, and nothing else changed: the median; None where the bytes are more than dense had
    time to read.
    """

    setting: str
    batch: int
    seconds: float  # of a token, the median
    gain: Ratio
    read: float  # KV bytes per token of a request
    promised: float | None

    @property
    def reached(self) -> float | None:
        """Which share of the promised gain there is; None where none is promised."""
        if self.promised is None or self.promised < 1 + LEAST:
            return None
        return (self.gain.median - 1) / (self.promised - 1)


def promised(dense: float, saved: float, rate: float) -> float | None:
    """The speed-up of a step of `dense` seconds that does not read `saved` bytes, at `rate` bytes/s."""
    left = dense - saved / rate
    return dense / left if left > 0 else None


def layer_bytes(model: Model) -> float:
    """The mean bytes of a layer's weights; all experts of a mixture count."""
    embeddings = model.unembed.nbytes + (0 if model.config.tied or model.table is None else model.table.nbytes)
    return (model.weight_bytes - embeddings) / model.config.layers


def worths(turns: Sequence[SettingTurn], per_layer: float) -> list[Worth]:
    """Gains by batch, dense first. `per_layer`: bytes of a layer's weights."""
    runs: dict[tuple[int, int, str], list[SettingTurn]] = {}
    for turn in turns:
        runs.setdefault((turn.batch, turn.group, turn.setting), []).append(turn)
    found: dict[tuple[int, str], Worth] = {}
    for (batch, group, setting), mine in runs.items():
        dense = runs[batch, group, DENSE]
        read, layers = _middle(mine, "read"), _middle(mine, "layers")
        saved = _middle(dense, "read") - read + (_middle(dense, "layers") - layers) * per_layer
        gain = ratio(_by_round(dense), _by_round(mine))
        assert gain is not None, "a turn took no time"
        says = statistics.median(promised(turn.seconds, saved, turn.rate) or math.inf for turn in dense)
        worth = Worth(setting, batch, _middle(mine, "seconds"), gain, read / batch, says if says < math.inf else None)
        found.setdefault((batch, setting), worth)  # dense is in every group
    return sorted(found.values(), key=lambda worth: (worth.batch, worth.setting != DENSE))


def _by_round(turns: Sequence[SettingTurn]) -> dict[int, float]:
    return {turn.number: turn.seconds for turn in turns}


def _middle(turns: Sequence[SettingTurn], name: str) -> float:
    return float(statistics.median(getattr(turn, name) for turn in turns))


# ---- for people and programs
def cells(worth: Worth) -> list[str]:
    """A row below HEADER."""
    reached = worth.reached
    return [
        worth.setting, report.milliseconds(worth.seconds), str(worth.gain), report.size(worth.read),
        "unbounded" if worth.promised is None else f"{worth.promised:.2f}",
        "-" if reached is None else f"{reached:.0%}",
    ]  # fmt: skip


def write_csv(path: Path, turns: Sequence[SettingTurn], found: Sequence[Worth], about: Mapping[str, object]) -> None:
    """A line per turn, with what came out for its setting and batch, and columns for `about`."""
    by = {(worth.batch, worth.setting): worth for worth in found}
    lines = []
    for turn in turns:
        worth = by[turn.batch, turn.setting]
        about_it = {"gain": worth.gain.median, "promised": worth.promised, "reached": worth.reached}
        lines.append({**about, **asdict(turn), **about_it})
    report.write_csv(path, lines)


def draw(image: Path, found: Sequence[Worth], title: str) -> None:
    """A figure per batch: every setting's gain and its range, and a stroke where the bytes it saves would have it."""
    for batch in dict.fromkeys(worth.batch for worth in found):
        mine = [worth for worth in found if worth.batch == batch and worth.setting != DENSE]
        mine.sort(key=lambda worth: worth.gain.median)
        with figures.figure(figures.beside(image, batch), f"{title}, {batch} at once", 1.2 + 0.24 * len(mine)) as axes:
            for at, worth in enumerate(mine):
                gain, colour = worth.gain, figures.COLOURS[0]
                axes.plot([gain.low, gain.high], [at, at], color=colour, linewidth=1)
                axes.plot([gain.median], [at], "o", markersize=5, color=colour)
                if worth.promised is not None:
                    axes.plot([worth.promised], [at], "|", markersize=11, color=figures.COLOURS[1])
            axes.axvline(1.0, color=figures.GREY, linestyle=":", linewidth=1)
            axes.set_yticks(range(len(mine)), [worth.setting for worth in mine], fontsize=8)
            axes.set_xlabel("times as fast as dense: measured (blue), promised by bytes (orange)")
            axes.grid(alpha=0.25, axis="x")


# ---- the page
INTRO = """# What savers are worth

Methods that give rows up, read fewer, keep them in fewer bytes or skip layers: what each is worth per generated token
beside dense decoding, once at its neutral setting, where it must cost nothing, and once at work. Written by
`phasewise bench savers --write docs/results/savers.md`; every table says where and how it was measured.

*Gain*: dense's time of a token over the setting's, the median of paired rounds (range). *Gain the bytes promise*: what
it would be if each byte saved, of KV and of the weights of skipped layers, took as long as this machine needed to read
one when the round began, and nothing else changed; the median of the rounds. *Reached*: the share of that gain which is
there, (gain - 1) / (promised - 1); `-` where less than 1 % is promised. A round after which memory was read a tenth
faster or slower than before it is measured anew, as many times in all as there are rounds.
"""


def section(found: Sequence[Worth], about: str, notes: Sequence[str]) -> str:
    """A table per batch below what was measured where."""
    lines = [about]
    for batch in dict.fromkeys(worth.batch for worth in found):
        rows = [cells(worth) for worth in found if worth.batch == batch]
        lines.append(f"{batch} at once:\n\n{report.markdown(HEADER, rows)}")
    return "\n\n".join([*lines, *notes])
