"""Tests that draw their own cases draw others every day. A run prints its seed; `--draws SEED` repeats it."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Iterable, Sequence
from datetime import date
from typing import Any

import pytest

NAME = "PHASEWISE_DRAWS"


def today() -> str:
    """The seed of this run: what `--draws` or the environment says, else the date."""
    return os.environ.get(NAME) or date.today().isoformat()


def turn() -> int:
    """The seed of this run as a number. Those of two days are as far apart as the days."""
    try:
        return date.fromisoformat(today()).toordinal()
    except ValueError:
        return zlib.crc32(today().encode())


def draw(*names: object) -> random.Random:
    """Random numbers that hang on the seed of this run and on these names alone, in any process and any order."""
    return random.Random(" ".join(map(str, (today(), *names))))


def some(cases: Iterable[Any], count: int, *names: object) -> list[Any]:
    """So many of the cases, drawn by the seed of this run, in their order."""
    every = list(cases)
    return [every[i] for i in sorted(draw(*names).sample(range(len(every)), min(count, len(every))))]


def params(cases: Iterable[Any], quick: int, *names: object, always: Sequence[Any] = ()) -> list[Any]:
    """Cases for `pytest.mark.parametrize`. The quick tier runs those of `always` and `quick` more of them, drawn by the
    seed of this run; the thorough tier runs the others."""
    every = list(cases)
    rest = [case for case in every if case not in always]
    drawn = draw(*names).sample(range(len(rest)), min(quick, len(rest)))
    now = [*always, *(rest[i] for i in drawn)]
    return [_param(case, case not in now) for case in every]


def _param(case: Any, thorough: bool) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=[pytest.mark.thorough] if thorough else [])
