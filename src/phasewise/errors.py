"""Every error phasewise raises on purpose: it names what was wrong and what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PhasewiseError(Exception):
    """The root of all errors raised on purpose; catching it catches nothing else."""


class UserError(PhasewiseError):
    """The caller asked for something impossible; the message names the wrong value and the fix."""


class BudgetError(UserError):
    """A request needs more KV than the whole budget has."""


class NotFinite(PhasewiseError):
    """A step ended in NaN or infinity; the message names the layer, the dtype and the fix."""


class Unanswerable(UserError):
    """A request's constraints leave no token to go on with, which was found while it ran."""


class Untrained(UserError):
    """A method needs weights that nobody has trained for this model; the message names the command that does."""


class UnsupportedModel(UserError):
    """The checkpoint needs something the decoder does not have; the message says what is supported."""


class WeightsError(UserError):
    """The weight files do not fit the configuration; the message names the file and the tensors."""


def near(name: str, choices: Iterable[str]) -> str:
    """One sentence that ends an error about an unknown `name`: the nearest of `choices`, then the valid list."""
    valid = sorted(choices)
    if not valid:
        return "No choices exist."
    by_folded = {choice.lower(): choice for choice in valid}
    close = [by_folded[match] for match in difflib.get_close_matches(name.lower(), by_folded, n=3, cutoff=0.5)]
    hint = f"Did you mean {' or '.join(close)}? " if close else ""
    return f"{hint}Valid: {', '.join(valid)}."
