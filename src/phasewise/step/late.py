"""Rows of a request that a layer meets after later ones: what a skip method has run late (`verbs/skip.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Late(NamedTuple):
    """Tokens known before, increasing `positions`, and what enters a layer that they have not run, x [r, d]."""

    positions: Sequence[int]
    x: Tensor
