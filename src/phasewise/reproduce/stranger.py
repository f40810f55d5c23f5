"""Held-out source on a model that nobody here has trained: what pocket has not learned to need shows there."""

from __future__ import annotations

from dataclasses import replace

from phasewise.bench.stats import means
from phasewise.reproduce.answers import code
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.system import AttemptOutcome, Quality, Setting
from phasewise.reproduce.workload import STRANGER

CODE = Quality(("code",), allowed=0.0, examples=12, window=1152, given=1024)
FEWEST = 2  # stretches of a quick run


def lead(lab: Lab, ours: Setting, theirs: Setting, quality: Quality = CODE) -> AttemptOutcome:
    """Checks that the same stretches are likelier with ours than with theirs, for certain, or less so by no more than
    is `allowed`."""
    n = FEWEST if lab.scale.quick else lab.scale.examples or quality.examples
    gain = means(*(code(lab, replace(each, model=STRANGER), quality, n) for each in (ours, theirs)))
    return AttemptOutcome(gain.low > -quality.allowed, f"log-likelihood {gain.text(False)}")
