"""From checks to a verdict, by rule: nobody types one in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from phasewise.reproduce.system import Part

Word = Literal["holds", "partly", "not here"]


@dataclass(frozen=True)
class Check:
    """One question with its answer. `passed` None: it was not asked (no time was taken, say)."""

    part: Part
    name: str
    measured: str
    expected: str
    passed: bool | None

    def __str__(self) -> str:
        if self.passed is None:
            return f"{self.name}: not examined ({self.measured})"
        return f"{self.name}: {self.measured}, {'as' if self.passed else 'not'} {self.expected}"


@dataclass(frozen=True)
class Verdict:
    """The word, and the reasons why it is no better one."""

    word: Word
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return self.word + (": " + "; ".join(self.reasons) if self.reasons else "")


CONTROL = "the control does not lose"


def judge(checks: Sequence[Check], missing: Sequence[str] = ()) -> Verdict:
    """*not here*: tokens of an exact system differ, nothing of the claim passes (where no control loses quality, kept
    quality is no more than that), or quality is lost and a control does no worse. *holds*: every check passes, one of
    them against a control, and no part of the claim is left out. *partly*: everything between."""
    failed = [check for check in checks if check.passed is False]
    unseen = [check for check in checks if check.passed is None]
    claims = [check for check in checks if check.part in ("claim", "quality")]
    controls = [check for check in checks if check.part == "control"]
    reasons = [_reason(check) for check in (*failed, *unseen)]
    if not controls:
        reasons.append("no control was tried")
    if not claims:
        reasons.append("nothing of the claim was tried")
    reasons += [f"not examined here: {part}" for part in missing]
    tried = [check for check in claims if check.passed is not None]
    if any(check.part == "claim" for check in tried) and not any(check.passed for check in controls):
        tried = [check for check in tried if check.part == "claim"]
    parts = {check.part for check in failed}
    lost = "exact" in parts or {"quality", "control"} <= parts or (bool(tried) and not any(c.passed for c in tried))
    if lost or (not tried and "counter" in parts):
        return Verdict("not here", tuple(reasons))
    return Verdict("partly" if reasons else "holds", tuple(reasons))


def _reason(check: Check) -> str:
    return f"{CONTROL}: {check}" if check.part == "control" and check.passed is False else str(check)
