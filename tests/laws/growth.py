"""How many cases the laws would have with more methods: dummies are registered, and the same rows are counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from phasewise import catalog
from tests.laws import axes, test_methods
from tests.laws.dummies import register
from tests.laws.settings import discovered

# Of a hundred published systems, about so many are of each verb.
SHARES = {
    "attend": 16, "draft": 24, "evict": 14, "decode": 14, "skip": 10, "store": 8, "schedule": 7, "verify": 6,
    "sample": 5, "place": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Dummy:
    """It is only counted."""

    paper: ClassVar[str] = ""
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}


@dataclass(frozen=True)
class Exact(Dummy):
    guarantee: ClassVar[str] = "exact"


@dataclass(frozen=True)
class Count:
    single: int  # a law and a method
    together: int  # rows of compositions and of neutral settings


def grow(patch: pytest.MonkeyPatch, dummies: int) -> set[str]:
    """Register so many, each time of the verb that lacks most of its share; half of them exact. -> their verbs"""
    have = {verb: len(catalog.names(verb)) for verb in SHARES}
    made: dict[tuple[str, str], type[Any]] = {}
    for i in range(dummies):
        verb = min(SHARES, key=lambda verb: have[verb] / SHARES[verb])
        have[verb] += 1
        made[verb, f"made{i:03}"] = Exact if i % 2 or verb in ("place", "schedule") else Dummy
    register(patch, made)
    return {verb for verb, _ in made}


def count(full: bool = False) -> Count:
    laws = test_methods.LAWS
    single = sum(len(axes.singles(i, len(laws), full, lambda verb, name: True)) for i in range(len(laws)))
    single += len(discovered())  # neutral alone
    return Count(single, len(axes.compositions(full)) + len(axes.neutrals(full)))
