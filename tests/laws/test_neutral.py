"""Law 2: every method has a setting at which it is dense decoding, alone and together with any other."""

from __future__ import annotations

from functools import cache

from tests import tiny
from tests.laws import axes
from tests.laws.axes import Row
from tests.laws.compare import Reference, build, reference

LENGTHS, N = (41, 7, 66), 12


@cache
def dense() -> Reference:
    return reference({}, tiny.prompts(*LENGTHS), tiny.greedy(N))


@axes.over(axes.neutrals, axes.label, most=48)
def test_neutral_methods_together_equal_dense(case: Row) -> None:
    placed = build(axes.verbs(case))
    dense().check(tiny.outs(tiny.run(placed, dense().prompts, tiny.greedy(N))))
