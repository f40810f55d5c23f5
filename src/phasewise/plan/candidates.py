"""Which recipes are worth a try, and what becomes of them when two of the good ones go together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from phasewise import catalog
from phasewise.bench.settings import BenchSetting, untrained
from phasewise.options import lossy, parse

LEFT_OUT = ("place", "schedule", "sample", "decode")  # whose work shows under load, or that say something else


def singles() -> list[BenchSetting]:
    """Every method that needs nothing trained, at its default knobs, one at a time."""
    return [one for one in untrained() if not set(one.verbs) & set(LEFT_OUT)]


def changes_answers(setting: BenchSetting) -> bool:
    return bool(lossy(parse(dict(setting.verbs))))


def pairs(good: Sequence[BenchSetting], known: Sequence[BenchSetting]) -> list[BenchSetting]:
    """Drafters with savers, and savers of different verbs: both parents' choices in one, none that is `known`."""
    have = {frozenset(one.verbs.items()) for one in known}
    found = []
    for one, other in product(good, good):
        verbs = {**one.verbs, **other.verbs}
        if set(one.verbs) & set(other.verbs) or frozenset(verbs.items()) in have:
            continue
        have.add(frozenset(verbs.items()))
        words = " ".join(f"{verb}={verbs[verb]}" for verb in catalog.VERBS if verb in verbs)
        found.append(BenchSetting.parse(words))
    return found
