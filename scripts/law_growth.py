"""How the laws grow with the methods: cases counted with generated dummies in the catalogue, and what they would take.

    python scripts/law_growth.py [--methods 100] [--seconds 0.25] [--cores 2]

`--seconds`: per case, as measured by `pytest tests/laws/test_compositions.py tests/laws/test_methods.py --durations=0`
on the machine in question; `--measure` times some cases here and now.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from phasewise import catalog
from tests import tiny
from tests.laws import growth


def measured(cases: int = 24) -> float:
    """Seconds per case, of some compositions."""
    from tests.laws import axes, test_compositions

    rows = axes.compositions(full=False)
    some = rows[:: max(1, len(rows) // cases)]
    tiny.model()
    began = time.perf_counter()
    for row in some:
        test_compositions.test_methods_together_give_what_the_lossy_ones_give_alone(row)
    return (time.perf_counter() - began) / len(some)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", type=int, default=100, help="of all verbs together")
    parser.add_argument("--seconds", type=float, default=0.25, help="per case")
    parser.add_argument("--measure", action="store_true", help="measure seconds per case first")
    parser.add_argument("--cores", type=int, default=2)
    options = parser.parse_args()
    seconds = measured() if options.measure else options.seconds
    here = sum(1 for _ in catalog.every())
    print(f"{seconds:.2f} s per case{' (measured)' if options.measure else ''}, {options.cores} cores\n")
    print(f"{'methods':>8} {'laws':>6} {'pairs':>6} {'cases':>6} {'per method':>11} {'minutes':>8}")
    for total in sorted({here, (here + options.methods) // 2, options.methods, 2 * options.methods}):
        with pytest.MonkeyPatch.context() as patch:
            growth.grow(patch, total - here)
            found = growth.count()
        cases = found.single + found.together
        minutes = cases * seconds / options.cores / 60
        print(f"{total:8} {found.single:6} {found.together:6} {cases:6} {cases / total:11.1f} {minutes:8.1f}")


if __name__ == "__main__":
    main()
