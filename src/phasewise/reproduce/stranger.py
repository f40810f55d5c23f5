"""Held-out source on a model that nobody here has trained: what pocket has not learned to need shows there."""

from __future__ import annotations

from dataclasses import replace

from phasewise.bench.stats import means
from phasewise.reproduce.answers import losses
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.system import Quality, Setting, Tried
from phasewise.reproduce.workload import STRANGER

CODE = Quality(("code",), allowed=0.0, examples=12, window=1152, given=1024)
FEWEST = 2  # stretches of a quick run


def lead(lab: Lab, ours: Setting, theirs: Setting) -> Tried:
    """Whether the same stretches are likelier with ours than with theirs, for certain."""
    n = FEWEST if lab.scale.quick else lab.scale.examples or CODE.examples
    gain = means(*(losses(lab, replace(each, model=STRANGER), CODE, n) for each in (ours, theirs)))
    return Tried(gain.low > 0, f"log-likelihood {gain.text(False)}")
