"""Latency models: least squares on relative errors, one for each kind of step (DistServe, arXiv 2401.09670)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy
from numpy.typing import NDArray

from phasewise.errors import UserError
from phasewise.plan.cost import Price, StepWork

Path = Literal["prefill", "decode", "mixed"]
PATHS: tuple[Path, ...] = ("prefill", "decode", "mixed")
TERMS: dict[Path, tuple[str, ...]] = {  # what the seconds of a step are a sum of
    "prefill": ("base", "prefill_rows", "pairs", "ended"),
    "decode": ("base", "decode_rows", "context"),
    "mixed": ("base", "prefill_rows", "pairs", "ended", "decode_rows", "context"),
}
KNOTS = (2, 4, 8, 16, 32, 64, 128, 256)  # rows at which the price of a further row may change


class Timed(NamedTuple):
    """A step and how long it took."""

    step: StepWork
    seconds: float


def path_of(step: StepWork) -> Path:
    if not step.decode_rows:
        return "prefill"
    return "mixed" if step.prefill_rows else "decode"


@dataclass(frozen=True)
class FittedLine:
    """Seconds = the sum of `weights` times terms. A term `rows>K` counts the step's rows beyond K: kernels for few rows
    and for many differ. Never below `least`."""

    weights: Mapping[str, float]
    least: float

    def __call__(self, step: StepWork) -> float:
        return max(self.least, sum(weight * term(name, step) for name, weight in self.weights.items()))


def term(name: str, step: StepWork) -> float:
    """Returns a term's count in a step. Raises UserError for an unknown term."""
    if name == "base":
        return 1.0
    if name.startswith("rows>"):
        return float(max(0, step.rows - int(name[5:])))
    if name in ("prefill_rows", "pairs", "ended", "decode_rows", "context"):
        return float(getattr(step, name))
    raise UserError(f"unknown term {name!r} of a latency model: measure again with `phasewise profile`")


def fit(timed: Sequence[Timed], path: Path) -> FittedLine:
    """The line of a path through steps of that path. Raises UserError where they are too few to tell.

    No term of the paper's form may make a step faster: what would is left out. Knots are taken in one after the other,
    as long as each lowers the squared error by a tenth.
    """
    names = [name for name in TERMS[path] if name != "ended" or any(one.step.ended for one in timed)]
    if len(timed) < len(names):
        raise UserError(
            f"{len(timed)} {path} steps were measured, and a latency model needs {len(names)}: measure more"
        )
    weights = _with_knots(timed, names)
    kinks = any(">" in name for name in weights)  # without, no weight is below zero
    return FittedLine(weights, 0.5 * min(one.seconds for one in timed) if kinks else 0.0)


def _with_knots(timed: Sequence[Timed], terms: Sequence[str]) -> dict[str, float]:
    """Weights of these terms, and of as many knots as each lower the squared error by a tenth."""
    names = list(terms)
    weights, error = _solve(timed, names)
    rows = {one.step.rows for one in timed}
    free = [f"rows>{knot}" for knot in KNOTS if sum(n <= knot for n in rows) > 1 and sum(n > knot for n in rows) > 1]
    while free and len(weights) + 2 < len(timed) and error > 1e-12:
        tried = [(*_solve(timed, [*names, knot]), knot) for knot in free]
        better, lower, knot = min(tried, key=lambda one: one[1])
        if lower > 0.9 * error:
            break
        weights, error = better, lower
        names.append(knot)
        free.remove(knot)
    return weights


def _solve(timed: Sequence[Timed], names: Sequence[str]) -> tuple[dict[str, float], float]:
    """Weights with the least squared relative error, and that error."""
    seconds = numpy.array([one.seconds for one in timed])
    left = list(names)
    while True:
        matrix = numpy.array([[term(name, one.step) for name in left] for one in timed]) / seconds[:, None]
        scale = numpy.abs(matrix).max(axis=0)
        scale[scale == 0] = 1.0
        found: NDArray[numpy.float64] = (
            numpy.linalg.lstsq(matrix / scale, numpy.ones(len(timed)), rcond=None)[0] / scale
        )
        worst = min((i for i, name in enumerate(left) if ">" not in name), key=lambda i: found[i] * scale[i])
        if found[worst] >= 0 or len(left) == 1:
            break
        del left[worst]
    error = float(((matrix @ found - 1) ** 2).sum())
    return {name: float(weight) for name, weight in zip(left, found)}, error


def errors(line: FittedLine, timed: Sequence[Timed]) -> list[float]:
    """Relative errors, absolute values."""
    return [abs(line(one.step) / one.seconds - 1) for one in timed]


@dataclass(frozen=True)
class Fitted:
    """A cost that was measured: a line per path. A path that was not measured has the mixed one's."""

    lines: Mapping[Path, FittedLine]

    def __post_init__(self) -> None:
        if "mixed" not in self.lines and set(self.lines) != {"prefill", "decode"}:
            raise UserError("a latency model needs steps of all kinds: measure again with `phasewise profile`")

    def seconds(self, step: StepWork) -> float:
        path = path_of(step)
        if path in self.lines:
            found = self.lines[path](step)
        elif "mixed" in self.lines:
            found = self.lines["mixed"](step)
        else:  # both phases, one after the other
            found = self.lines["prefill"](step) + self.lines["decode"](step)
        return found * step.share

    def price(self, step: StepWork) -> Price:
        return Price(self.seconds(step))
