"""Workers of one machine read the same memory, and some the same cores: how much longer a step takes while others are
busy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from phasewise.plan.fit import Path

Beside = Mapping[Path, Mapping[Path, float]]  # by my step's kind and by my neighbour's: how many times as long mine is


def both(table: Beside, other: Beside) -> Beside:
    """All factors; those of the other one, where it has any."""
    return {mine: {**table.get(mine, {}), **other.get(mine, {})} for mine in {**table, **other}}


def over(table: Beside, served: Beside, alone: Beside) -> Beside:
    """All factors, times what a server's own work adds to them: its factor over that of engines `alone`."""

    def more(mine: Path, theirs: Path) -> float:
        return served.get(mine, {}).get(theirs, 1.0) / alone.get(mine, {}).get(theirs, 1.0)

    return {
        mine: {theirs: factor * max(1.0, more(mine, theirs)) for theirs, factor in row.items()}
        for mine, row in table.items()
    }


def slowed(table: Beside, mine: Path, others: Sequence[Path], unknown: float = 1.0) -> float:
    """Returns the factor by which others lengthen a step. Steps of both phases count as prompts."""
    row = table.get("prefill" if mine == "mixed" else mine, {})
    return prod(row.get("prefill" if other == "mixed" else other, unknown) for other in others)
