"""Knobs that say a share up to 1, and above it a number of something."""

from __future__ import annotations

import math

from phasewise.errors import UserError


def check_amount(method: str, knob: str, value: float, of: str = "rows") -> None:
    """Raise UserError for a value above 1 that is no whole number."""
    if value > 1 and not float(value).is_integer():
        whole = [f"{n:.0f}" for n in (math.floor(value), math.ceil(value)) if n > 1] if math.isfinite(value) else []
        fix = " or ".join(whole) or "a whole one"
        raise UserError(
            f"{method}: {knob}={value}: above 1 it is a number of {of}, which {value} is not: say {fix}, or a share up "
            "to 1"
        )
