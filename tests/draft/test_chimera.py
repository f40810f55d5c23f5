"""Chimera's table of trigrams. The laws of all drafters with heads (`test_trained_drafters.py`) hold of it as well."""

from __future__ import annotations

from tests import tiny
from tests.draft.fitted import PROMPTS, N
from tests.draft.trained import CHIMERA, TREE


def test_a_table_changes_no_guess() -> None:
    counted = []
    for table in (0, 8, 4096):
        placed = tiny.engine(CHIMERA.verbs(f"{TREE},table={table}"))
        tiny.run(placed, PROMPTS, tiny.greedy(N))
        counted.append((placed.counters.drafted, placed.counters.accepted, placed.counters.forwards))
    assert counted[0] == counted[1] == counted[2]
