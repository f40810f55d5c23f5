"""Tests that draw their own cases draw others every day. A run prints its seed; `--draws SEED` repeats it."""

from __future__ import annotations

import os
import random
from datetime import date

NAME = "PHASEWISE_DRAWS"


def today() -> str:
    """The seed of this run: what `--draws` or the environment says, else the date."""
    return os.environ.get(NAME) or date.today().isoformat()


def draw(*names: object) -> random.Random:
    """Random numbers that hang on the seed of this run and on these names alone, in any process and any order."""
    return random.Random(" ".join(map(str, (today(), *names))))
