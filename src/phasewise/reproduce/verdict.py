"""From checks to a verdict, by rule: nobody types one in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from phasewise.reproduce.system import Kind, Part

Word = Literal["holds", "partly", "not here", "open"]
CONDITIONS: tuple[Kind, ...] = ("answers", "cost", "time")


@dataclass(frozen=True)
class Check:
    """One question with its answer. `passed` None: it was not examined (no time was taken, say).

    A control says `of` which part it is one. Answers belong to a `model`. `short` is the finding in a few words. One
    against a `rival` asks for more than the baseline's: who loses to it has not what the paper claims.
    """

    part: Part
    name: str
    measured: str
    expected: str
    passed: bool | None
    of: Part | None = None
    model: str = ""
    short: str = ""
    rival: bool = False

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
SAVING_ALONE = "the saving without the answers"
ANSWERS_ALONE = "the answers without the saving"
UNTRIED = "nothing that the paper promises was judged"
WITHOUT = {
    "answers": "the paper's claim is about answers, and none were judged",
    "cost": "the paper's claim is about cost, and none was judged",
    "time": "the paper says faster, and no clock was judged",
}


def judge(
    checks: Sequence[Check], promises: Sequence[Kind], missing: Sequence[str] = (), arithmetic: bool = False
) -> Verdict:  # fmt: skip
    """The verdict on a claim that `promises` something about answers, cost and time; with `arithmetic`, its saving in
    cost follows from the knobs.

    A condition *stands* if its check passes, a control of its part loses where any was tried, and no rival of its part
    is as good. Answers stand on a model if every check of them there passes: no easy task makes up for a hard one.

    - *holds*: every check passes, one of them against a control, everything promised is judged, nothing is missing.
    - *not here*: tokens of an exact system differ; answers were promised and stand on no model, whatever is saved;
      they stand and a promised saving does not; or no condition that was tried stands. Arithmetic is no condition
      that was tried: it counts as the saving that kept answers go with. Nor is a mechanism.
    - *open*: nothing that is promised was judged (no clock was started for a claim about time, say), and nothing else
      speaks against it.
    - *partly*: everything between.
    """
    reasons = [_reason(check) for check in checks if check.passed is False]
    reasons += [_reason(check) for check in checks if check.passed is None]
    if not any(check.part == "control" for check in checks):
        reasons.append("no control was tried")
    judged = {check.part for check in checks} | ({"cost"} if arithmetic else set())
    reasons += [f"not examined here: {WITHOUT[kind]}" for kind in CONDITIONS if kind in promises and kind not in judged]
    if not promises:
        reasons.append("not examined here: nothing says what the paper promises")
    reasons += [f"not examined here: {part}" for part in missing]
    lost = _lost(checks, promises, arithmetic)
    if lost is not None:
        return Verdict("not here", (*([lost] if lost else []), *reasons))
    if reasons and not _tried(checks):
        return Verdict("open", (UNTRIED, *reasons))
    return Verdict("partly" if reasons else "holds", tuple(reasons))


def _lost(checks: Sequence[Check], promises: Sequence[Kind], arithmetic: bool) -> str | None:
    """Why a claim is not here, empty where a failed check says it; None if it is not so."""
    if any(check.part == "exact" and check.passed is False for check in checks):
        return ""
    answers, saved = _answers(checks), _saved(checks)
    kept = any(answers)
    if "answers" in promises and answers and not kept:
        return SAVING_ALONE if arithmetic or any(saved) else ""
    if kept and {"cost", "time"} & {*promises} and not arithmetic and saved and not any(saved):
        return ANSWERS_ALONE
    tried = _tried(checks)
    if tried and not any(tried):
        return ""
    return "" if not tried and any(check.part == "counter" and check.passed is False for check in checks) else None


def _tried(checks: Sequence[Check]) -> list[bool]:
    """Whether each condition stands that was judged."""
    return [*_answers(checks), *_saved(checks)]


def _saved(checks: Sequence[Check]) -> list[bool]:
    """Whether cost and time stand, for each check of them that was judged."""
    return [_stands(check, checks) for check in checks if check.part in ("cost", "time") and check.passed is not None]


def _answers(checks: Sequence[Check]) -> list[bool]:
    """Whether answers stand, for each model on which any were judged."""
    by_model: dict[str, list[Check]] = {}
    for check in checks:
        if check.part == "answers" and check.passed is not None:
            by_model.setdefault(check.model, []).append(check)
    return [all(_stands(check, checks) for check in found) for found in by_model.values()]


def _stands(check: Check, checks: Sequence[Check]) -> bool:
    """True if a condition passes, and on its model neither every control of its part does as well nor any rival."""
    here = [other for other in checks if other.model == check.model and other.passed is not None]
    controls = [other.passed for other in here if other.part == "control" and other.of == check.part]
    rivals = [other.passed for other in here if other.part == check.part and other.rival]
    return check.passed is True and (not controls or any(controls)) and all(rivals)


def _reason(check: Check) -> str:
    return f"{CONTROL}: {check}" if check.part == "control" and check.passed is False else str(check)
