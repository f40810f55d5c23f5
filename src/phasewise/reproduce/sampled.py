"""Drafts for sampled requests, watched: how many first guesses are accepted, and what is expected of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import Tensor

from phasewise import catalog
from phasewise.methods.decode.speculative import Speculative
from phasewise.reproduce import loads
from phasewise.reproduce.controls import Control
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.play import LoadEntry, PlayedRun
from phasewise.reproduce.system import AttemptOutcome, Case, Load, Setting, Timing
from phasewise.reproduce.workload import PromptSource
from phasewise.verbs.draft import Draft
from phasewise.verbs.sample import Dist
from phasewise.verbs.traits import Traits
from phasewise.verbs.verify import Random, Verifier

MOST = 16  # requests that share a step: what is counted does not hang on it
ERRORS = 3  # standard errors that a share may be off
BETTER = 1.02  # times fewer passes than the best rival: a sample of some thousand tokens is about 1 % off
Forms = Callable[[Tensor, Tensor], tuple[float, ...]]
"""Of p and q, float64 [V]: first the chance that a first guess is accepted, then whatever is compared with it."""


@dataclass(frozen=True)
class GuessOutcome:
    """One verdict: whether a first guess was accepted, whether the token that came is the target's likeliest, and the
    chance of that; the forms of its p and q."""

    accepted: bool
    best: bool
    chance: float
    forms: tuple[float, ...]


@dataclass(frozen=True)
class WatchedVerifier(Control):
    """verify: as `judge` does. Drafts must say what the second model thinks (`Draft.thoughts`); others are not seen."""

    judge: Verifier
    forms: Forms
    seen: list[GuessOutcome] = field(default_factory=list, compare=False)
    traits: ClassVar[Traits] = Traits("verify", matches="point")

    def __call__(self, draft: Draft, p: Dist, rng: Random) -> tuple[list[int], int]:
        path, token = self.judge(draft, p, rng)
        thought = (draft.thoughts or {}).get(())
        if thought is not None and not p.greedy(0):
            row, q, first = p.row(0).double(), thought.double(), draft.tokens[path[0]] if path else token
            best, forms = int(row.argmax()), self.forms(row / row.sum(), q / q.sum())
            self.seen.append(GuessOutcome(bool(path), first == best, float(row[best]), forms))
        return path, token


def writing(temperature: float) -> Load:
    """Code that nobody was trained on, to go on with by chance."""

    def load(asked: PromptSource) -> list[LoadEntry]:
        size = asked.size(64, 24)
        return [LoadEntry(asked.code(64), size, temperature=temperature) for _ in range(asked.size(48, 8))]

    return load


def few(temperature: float) -> Load:
    """As many tokens of it as a clock needs."""

    def load(asked: PromptSource) -> list[LoadEntry]:
        return [LoadEntry(asked.code(64), asked.size(48, 16), temperature=temperature) for _ in range(4)]

    return load


def timing(temperature: float, method: Setting, other: Setting, name: str) -> Timing:
    """Sampled text, one request at a time, every model padded: the method must be faster in every round."""
    settings = {"method": replace(method, most=1), "baseline": replace(other, most=1)}
    what = f"time per token at T={temperature:g}, all models padded to sixteen times the weights, against {name}"
    return Timing(what, 1.0, loads.pace, load=few(temperature), model="pocket-wide", settings=settings)


def rounds(case: Case, run: PlayedRun) -> float:
    """Verdicts per token: the passes that a request would take alone."""
    return (run.work.emitted - run.work.accepted) / run.work.emitted


def watch(lab: Lab, draft: str, verify: str, forms: Forms, load: Load) -> list[GuessOutcome]:
    """Everything that is seen of a drafter and a verifier under a load of the pocket model."""
    watched = WatchedVerifier(catalog.build("verify", verify), forms)
    setting = Setting(objects={"decode": Speculative(catalog.build("draft", draft), watched)}, most=MOST)
    lab.play(setting, load(lab.asked("pocket")), "pocket")
    return watched.seen


def mean(seen: Sequence[GuessOutcome], form: int) -> float:
    return sum(each.forms[form] for each in seen) / len(seen)


def as_expected(seen: Sequence[GuessOutcome]) -> AttemptOutcome:
    """Checks that first guesses are accepted as often as their closed form says, and the target's likeliest tokens come
    as often as it says itself: within three standard errors."""
    pairs: list[tuple[str, list[tuple[bool, float]]]] = [
        ("accepted", [(each.accepted, each.forms[0]) for each in seen]),
        ("the likeliest", [(each.best, each.chance) for each in seen]),
    ]
    words, passed = [], bool(seen)
    for name, each in pairs:
        share, wanted = (sum(float(pair[i]) for pair in each) / len(each) for i in (0, 1))
        error = ERRORS * math.sqrt(sum(chance * max(0.0, 1 - chance) for _, chance in each)) / len(each)
        passed = passed and abs(share - wanted) <= error
        words.append(f"{name} {share:.2%}, expected {wanted:.2%} +- {error:.2%}")
    return AttemptOutcome(passed, "; ".join(words) + f" (of {len(seen):,})")


def expected(draft: str, verify: str, forms: Forms, load: Load) -> Callable[[Lab], AttemptOutcome]:
    """An attempt: `as_expected` of that drafter and verifier."""

    def run(lab: Lab) -> AttemptOutcome:
        return as_expected(watch(lab, draft, verify, forms, load))

    return run


EXPECTED = "within 3 standard errors of the closed form, and of the target's own chances"


def draft(name: str, **knobs: Any) -> str:
    return name + ":" + ",".join(f"{knob}={value}" for knob, value in knobs.items())
