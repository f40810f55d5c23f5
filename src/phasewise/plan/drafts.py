"""Guessing in numbers: how many of a step's guesses hold, and what the guessing itself takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from phasewise.errors import UserError


@dataclass(frozen=True)
class Drafts:
    """Every decode brings `depth` guesses in a row, each of which holds with probability `accept` if those before it
    do; the step gives the request those that hold, and one token more. `seconds`: of the drafter per guess, the
    requests of a step guessing side by side (0 for text that is copied). `seed`: of who is lucky."""

    depth: int = 0
    accept: float = 0.0
    seconds: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.depth < 0:
            raise UserError(f"depth={self.depth} guesses is out of range: write 0 for none, or more")
        if not 0.0 <= self.accept <= 1.0:
            raise UserError(f"accept={self.accept:g} must lie between 0 and 1: the share of guesses that hold, where "
                            "all before them do")  # fmt: skip
        if not 0.0 <= self.seconds < math.inf:
            raise UserError(f"draft-ms={1e3 * self.seconds:g} must be a number of milliseconds of at least 0")

    @property
    def tokens(self) -> float:
        """Mean of a step, of a request that has many to go: (1 - a^(k+1)) / (1 - a)."""
        if self.accept == 1.0:
            return self.depth + 1.0
        return float((1 - self.accept ** (self.depth + 1)) / (1 - self.accept))

    def luck(self, name: str) -> Random:
        """Returns a request's own random numbers: the same draws, whatever else goes on."""
        return Random(f"{self.seed}/{name}")

    def held(self, guesses: int, luck: Random) -> int:
        """Draw the number of guesses that hold, from the first on."""
        chance = 1.0 - luck.random()  # above 0
        if chance <= self.accept**guesses:
            return guesses
        return int(math.log(chance) / math.log(self.accept)) if self.accept else 0


NONE = Drafts()
