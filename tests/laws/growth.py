"""What the laws would cost with more methods: dummies are registered, and the same cases are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from phasewise import catalog
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits
from tests.laws import axes, golden, test_compositions, test_methods, test_neutral
from tests.laws.dummies import register

# Of a hundred published systems, about so many are of each verb.
SHARES = {
    "attend": 16, "draft": 24, "evict": 14, "decode": 14, "skip": 10, "store": 8, "schedule": 7, "verify": 6,
    "sample": 5, "place": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Dummy(Method):
    """It is only counted."""

    paper: ClassVar[str] = ""
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}
    traits: ClassVar[Traits] = Traits("sample")  # of whatever verb: it conflicts with nothing


@dataclass(frozen=True)
class Exact(Dummy):
    guarantee: ClassVar[str] = "exact"


# Core-seconds of a case, as on a machine that does other things too; `scripts/law_growth.py --measure` times them.
SECONDS = {
    "golden float32": 0.2, "golden bfloat16": 0.06, "scenario": 0.3, "neutral": 0.06, "composition": 0.25,
}  # fmt: skip


def seconds(cases: Counter[str]) -> float:
    """Core-seconds of so many cases by kind."""
    return sum(SECONDS[kind] * n for kind, n in cases.items())


def grow(patch: pytest.MonkeyPatch, dummies: int, more: Sequence[str] = ()) -> set[str]:
    """Register so many, each time of the verb that lacks most of its share, half of them exact, and one `more` of each
    of these verbs. Returns the verbs that have any."""
    have = {verb: len(catalog.names(verb)) for verb in SHARES}
    made: dict[tuple[str, str], type[Any]] = {}
    for i in range(dummies):
        verb = min(SHARES, key=lambda verb: have[verb] / SHARES[verb])
        have[verb] += 1
        made[verb, f"made{i:03}"] = Exact if i % 2 or verb in ("place", "schedule") else Dummy
    register(patch, made | {(verb, "more"): Dummy for verb in more})
    return {verb for verb, _ in made}


def quick() -> Counter[str]:
    """Cases by kind, those of `SECONDS`, that a run of the quick tier has of the laws over the catalogue."""
    methods = axes.singles()
    found = Counter(f"golden {dtype}" for _, dtype, now in golden.traces(golden.cases(), 0, ()) if now)
    return found + Counter({"scenario": len(methods), "neutral": len(methods)})


def rest() -> Counter[str]:
    """The same of the thorough tier."""
    found = Counter(f"golden {dtype}" for _, dtype, now in golden.traces(golden.cases(), 0, ()) if not now)
    for kind, test in (
        ("scenario", test_methods.test_tokens_are_a_requests_own_under_other_schedulers),
        ("scenario", test_methods.test_tokens_are_a_requests_own_in_what_a_method_holds),
        ("neutral", test_neutral.test_neutral_methods_together_equal_dense),
        ("composition", test_compositions.test_methods_together_give_what_the_lossy_ones_give_alone),
    ):
        rows, _, most = test.cases  # type: ignore[attr-defined]
        found[kind] += len(axes.sampled(rows(False), most, 0))
    return found
