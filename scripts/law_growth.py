"""How the laws grow with the methods: cases counted with generated dummies in the catalogue, and what they would take.

    python scripts/law_growth.py [--methods 120] [--measure]

Seconds per case are those of `tests/laws/growth.py`; `--measure` times some cases of each kind here and now.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from phasewise import catalog
from tests import tiny
from tests.laws import axes, golden, growth, scenario, test_compositions, test_methods
from tests.laws.settings import options


def per_case(call: Callable[..., Any], cases: Iterable[tuple[Any, ...]]) -> float:
    """Processor seconds a case takes, the first one left out: it loads what all of them need."""
    first, *others = cases
    call(*first)
    began = time.process_time()
    for case in others:
        call(*case)
    return (time.process_time() - began) / len(others)


def measured() -> dict[str, float]:
    """Seconds per case of each kind, over a dozen of them."""
    traces = list(golden.cases().values())[::12]
    methods = axes.singles()[::6]
    neutral = [(verb, name) for verb, name, _ in methods]
    rows = axes.compositions(full=False)
    tiny.model()
    return {
        "golden float32": per_case(golden.trace, [(verbs, "float32") for verbs in traces]),
        "golden bfloat16": per_case(golden.trace, [(verbs, "bfloat16") for verbs in traces]),
        "scenario": per_case(scenario.check, [(options(verb, name), schedule) for verb, name, schedule in methods]),
        "neutral": per_case(test_methods.test_neutral_equals_dense, neutral),
        "composition": per_case(
            test_compositions.test_methods_together_give_what_the_lossy_ones_give_alone,
            [(row,) for row in rows[:: len(rows) // 12]],
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", type=int, default=120, help="of all verbs together")
    parser.add_argument("--measure", action="store_true", help="measure seconds per case first")
    wanted = parser.parse_args()
    if wanted.measure:
        growth.SECONDS |= measured()
    print("core-seconds per case: " + ", ".join(f"{kind} {seconds:.2f}" for kind, seconds in growth.SECONDS.items()))
    here = sum(1 for _ in catalog.every())
    print(f"\n{'methods':>20} {'quick: cases':>13} {'seconds':>8} {'rest: cases':>12} {'seconds':>8}")

    def line(label: str, dummies: int, *more: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            growth.grow(patch, dummies, more)
            quick, rest = growth.quick(), growth.rest()
        tiers = f"{quick.total():13} {growth.seconds(quick):8.1f} {rest.total():12} {growth.seconds(rest):8.1f}"
        print(f"{label:>20} {tiers}")

    line(str(here), 0)
    line(str(wanted.methods), wanted.methods - here)
    for verb in growth.SHARES:
        line(f"and one more {verb}", wanted.methods - here, verb)


if __name__ == "__main__":
    main()
