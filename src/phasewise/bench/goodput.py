"""Goodput: the highest rate of requests at which a share of them still meets its TTFT, TPOT and P99 TBT targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phasewise.bench import figures
from phasewise.bench.latency import TAIL, ServedRequest, percentile
from phasewise.errors import UserError
from phasewise.request.params import SLO

SHARE = 0.9  # of the requests; what fails counts as missed
FAR = 64  # times as high, or as low, as the rates one begins with
HOPELESS = 0.2  # no higher rate is tried once fewer requests than this meet even the loosest targets


@dataclass(frozen=True)
class Target:
    """Targets with a name."""

    name: str
    slo: SLO

    @classmethod
    def parse(cls, text: str) -> Target:
        """From NAME=TTFT/TPOT or NAME=TTFT/TPOT/TBT in milliseconds, such as tight=500/60; TBT is the 99th percentile
        of a stream. An empty part is no target. Raises UserError."""
        name, _, rest = text.partition("=")
        parts = rest.split("/")
        try:
            values = [float(part) / 1e3 if part.strip() else None for part in parts]
        except ValueError:
            values = []
        given = [value for value in values if value is not None]
        if not (name and 2 <= len(parts) <= 3 and given and all(0 < value < math.inf for value in given)):
            raise UserError(f"{text!r} is not a target: write NAME=TTFT/TPOT or NAME=TTFT/TPOT/TBT in milliseconds, "
                            "such as tight=500/60 or smooth=500//120")  # fmt: skip
        return cls(name, SLO(*values))

    def __str__(self) -> str:
        named = (("TTFT", self.slo.ttft), ("TPOT", self.slo.tpot), ("P99 TBT", self.slo.tbt))
        said = ", ".join(f"{what} {value * 1e3:g} ms" for what, value in named if value is not None)
        return f"{self.name} ({said})"


@dataclass(frozen=True)
class GoodputPoint:
    """One contender at one rate."""

    contender: str
    rate: float  # requests/s, as planned
    served: Sequence[ServedRequest]

    def share(self, slo: SLO) -> float:
        """The share of requests that came in full and within the targets."""
        return sum(one.meets(slo) for one in self.served) / len(self.served)

    def row(self, targets: Sequence[Target]) -> dict[str, Any]:
        good = [one for one in self.served if one.error is None]
        row: dict[str, Any] = {
            "contender": self.contender, "rate": self.rate, "requests": len(self.served),
            "failed": len(self.served) - len(good),
        }  # fmt: skip
        series = {
            "ttft": [one.trace.ttft for one in good],
            "tpot": [one.trace.tpot for one in good],
            "tbt": [percentile(one.trace.tbt, TAIL) for one in good],
        }
        for name, values in series.items():
            known = [value for value in values if value is not None]
            row |= {f"{name}_p{q * 100:.0f}_s": percentile(known, q) for q in (0.5, 0.9)}
        return row | {f"share_{target.name}": self.share(target.slo) for target in targets}


def goodput(points: Sequence[tuple[float, float]], share: float = SHARE) -> tuple[float, bool]:
    """From (rate, share within the targets) by rising rate: the rate up to which the share holds, and whether that is
    only a lower bound because it held at the highest rate tried.

    Between the last rate that held and the first that did not, the share is taken to fall in a straight line. A rate
    at which it holds again later does not count.
    """
    best = 0.0
    for rate, reached in points:
        if reached < share:
            before = next((s for r, s in reversed(points) if r == best), 1.0)
            return best + (rate - best) * (before - share) / (before - reached), False
        best = rate
    return best, bool(points)


def sweep(
    contender: str,
    rates: Sequence[float],
    targets: Sequence[Target],
    measure: Callable[[float], Sequence[ServedRequest]],
) -> Iterator[GoodputPoint]:
    """One point per rate, rising, until it is hopeless."""
    for rate in sorted(rates):
        point = GoodputPoint(contender, rate, measure(rate))
        yield point
        if max(point.share(target.slo) for target in targets) < HOPELESS:
            return


def bisect(
    contender: str,
    between: tuple[float, float],
    targets: Sequence[Target],
    measure: Callable[[float], Sequence[ServedRequest]],
    precision: float,
) -> Iterator[GoodputPoint]:
    """Points that pin down, for each target, the highest rate that still holds: to within a share of `precision`.

    Begins with the two rates `between`, and goes on to twice or half of them, up to FAR times, where a target holds at
    both or at neither. A rate that has been measured is not measured again.
    """
    shares: dict[float, dict[str, float]] = {}

    def holds(rate: float, target: Target) -> Iterator[GoodputPoint]:
        if rate not in shares:
            point = GoodputPoint(contender, rate, measure(rate))
            shares[rate] = {each.name: point.share(each.slo) for each in targets}
            yield point

    for target in targets:
        low, high = between
        yield from holds(low, target)
        while shares[low][target.name] < SHARE and low * FAR > between[0]:
            high, low = low, low / 2
            yield from holds(low, target)
        if shares[low][target.name] < SHARE:
            continue
        yield from holds(high, target)
        while shares[high][target.name] >= SHARE and high < FAR * between[1]:
            low, high = high, high * 2
            yield from holds(high, target)
        while shares[high][target.name] < SHARE and high > (1 + precision) * low:
            middle = math.sqrt(low * high)
            yield from holds(middle, target)
            low, high = (middle, high) if shares[middle][target.name] >= SHARE else (low, middle)


def table(points: Sequence[GoodputPoint], targets: Sequence[Target]) -> tuple[list[str], list[list[str]]]:
    """Goodput per contender and target, requests/s."""
    rows = []
    for contender in dict.fromkeys(point.contender for point in points):
        row = [contender]
        for target in targets:
            mine = sorted((p.rate, p.share(target.slo)) for p in points if p.contender == contender)
            value, more = goodput(mine)
            row.append(f"{'at least ' if more else ''}{value:.2f}")
        rows.append(row)
    return ["", *(f"{target.name}, requests/s" for target in targets)], rows


def draw(image: Path, rows: Sequence[dict[str, Any]]) -> None:
    """A figure per workload and target: the share within the targets over the rate, a line per contender, 90 % dotted.

    `rows` are those of the JSON lines that `phasewise bench goodput --out` writes.
    """
    contenders = list(dict.fromkeys(row["contender"] for row in rows))[: figures.MOST]
    for workload in dict.fromkeys(row["workload"] for row in rows):
        for target in dict.fromkeys(name for row in rows for name in row["targets"]):
            about = next(row["targets"][target] for row in rows if target in row["targets"])
            kind, ends = workload.partition(":")[0], []
            title = f"{kind}, {target}: share of requests within {about}"
            with figures.figure(figures.beside(image, kind, target), title, 3.6) as axes:
                for contender, colour in zip(contenders, figures.COLOURS):
                    mine = [r for r in rows if (r["workload"], r["contender"]) == (workload, contender)]
                    mine.sort(key=lambda row: float(row["rate"]))
                    if not mine:
                        continue
                    shares = [row[f"share_{target}"] for row in mine]
                    axes.plot([row["rate"] for row in mine], shares, marker="o", markersize=4, color=colour)
                    ends.append((contender, colour, mine[-1]["rate"], shares[-1]))
                axes.axhline(SHARE, color=figures.GREY, linestyle=":", linewidth=1)
                axes.set_xlabel("requests/s")
                axes.set_ylim(-0.03, 1.03)
                figures.end_labels(axes, ends)
