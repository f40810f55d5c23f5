"""What the laws are taken over: factors whose values are methods at work, and the rows of them that become cases.

Covering arrays as a rule: every method meets every method of other verbs, every scheduler and every law.
With `--all-pairs` (`make test-all`) every scheduler, placement and way to decode with every pair of shaping methods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, combinations, product
from typing import Any, TypeVar

from phasewise import catalog
from phasewise.engine.binding import chosen, named
from phasewise.options import DEFAULTS, built, defaults
from phasewise.verbs.conflict import conflict
from phasewise.verbs.traits import Traits
from tests.laws.covering import covering
from tests.laws.settings import discovered, guarantee, options, slow, spell, tight

SHAPING = ("attend", "evict", "skip", "store", "sample")  # verbs whose methods change what a token is computed from
DRIVING = ("schedule", "place")  # verbs whose methods change only when and where

Verbs = tuple[tuple[str, str], ...]  # {verb: text} in a form that can be cached
Test = TypeVar("Test", bound=Callable[..., Any])
T, U = TypeVar("T"), TypeVar("U")


@dataclass(frozen=True)
class Choice:
    """One value of a factor: options that put a method to work, or none (the verb's default)."""

    verbs: Verbs = ()
    alone: Verbs = ()  # what gives the same tokens by itself: a lossy method, another one's own reference, or nothing
    script: str = ""  # decode with a drafter that knows the answer: "chain" or "tree"

    @classmethod
    def of(cls, verb: str, name: str) -> Choice:
        """At its tight knobs."""
        alone = options(verb, name) if guarantee(verb, name) == "lossy" else slow(verb, name)
        return cls(tuple(options(verb, name).items()), tuple(alone.items()))

    @classmethod
    def neutral(cls, verb: str, name: str) -> Choice:
        return cls(tuple(options(verb, name, catalog.method(verb, name).neutral).items()))

    @property
    def name(self) -> str:
        return self.script or " ".join(f"{verb}.{text.partition(':')[0]}" for verb, text in self.verbs)


Row = tuple[Choice, ...]
PLAIN = Choice()


def verbs(row: Row) -> dict[str, str]:
    return dict(chain.from_iterable(choice.verbs for choice in row))


def label(row: Row) -> str:
    return " ".join(filter(None, (choice.name for choice in row))) or "dense"


@cache
def traits(choice: Choice) -> tuple[Traits, ...]:
    """Those of the methods that a choice puts to work, defaults left out."""
    if choice.script:
        return (Traits("decode", "speculative"),)
    return tuple(named(method) for method in chosen(built(dict(choice.verbs)), defaults()))


def refusal(row: Row) -> str | None:
    """Why the methods of this row cannot work together, if they cannot: `verbs/conflict.py`. All else must work: a case
    that is refused and has no conflict fails, and so does one that has one and is not refused."""
    pairs = ((one, other) for a, b in combinations(row, 2) for one in traits(a) for other in traits(b))
    return next((why for one, other in pairs if (why := conflict(one, other)) is not None), None)


def allowed(a: Choice, b: Choice) -> bool:
    return refusal((a, b)) is None


# ---- factors
def methods(verb: str, neutral: bool = False) -> list[Choice]:
    """The default of a verb, then all others at their tight (or neutral) knobs."""
    others = [name for name in catalog.names(verb) if name != DEFAULTS.get(verb)]
    return [PLAIN, *((Choice.neutral if neutral else Choice.of)(verb, name) for name in others)]


def decoding(neutral: bool = False) -> list[Choice]:
    """Decode methods that need no drafter."""
    names = [name for name in catalog.names("decode") if not catalog.slots_of(catalog.method("decode", name))]
    make = Choice.neutral if neutral else Choice.of
    return [PLAIN, *(make("decode", name) for name in names if name != DEFAULTS["decode"])]


def decoders() -> list[Choice]:
    """Ways to decode: without a drafter, with every drafter, every verifier, and drafters that know the answer."""
    drafted = [Choice((("draft", spell("draft", name, tight("draft", name))),)) for name in catalog.names("draft")]
    exact = [name for name in catalog.names("verify") if guarantee("verify", name) != "lossy"]
    judged = [Choice(tuple(options("verify", name).items())) for name in exact if name != DEFAULTS["verify"]]
    return [*decoding(), *drafted, *judged, Choice(script="chain"), Choice(script="tree")]


def schedulers() -> list[str]:
    return [spell("schedule", name, tight("schedule", name)) for name in catalog.names("schedule")]


# ---- rows
def compositions(full: bool) -> list[Row]:
    """Methods at work: scheduler, placement, way to decode, one method of each shaping verb."""
    driving = [methods(verb) for verb in DRIVING] + [decoders()]
    shaping = [methods(verb) for verb in SHAPING]
    if not full:
        return sorted(covering([*driving, *shaping], allowed), key=lambda row: label(row[len(driving) :]))
    sets = [row for row in product(*shaping) if sum(choice is not PLAIN for choice in row) <= 2]
    rows = [(*drive, *shape) for shape in sets for drive in product(*driving)]
    return [row for row in rows if refusal(row) is None]


def neutrals(full: bool) -> list[Row]:
    """The same at neutral knobs; in full, any two by themselves. (Drafters have nothing to be neutral to.)"""
    factors = [decoding(neutral=True)] + [methods(verb, neutral=True) for verb in (*DRIVING, *SHAPING)]
    if not full:
        return covering(factors, allowed)
    every = [pair for f, g in combinations(factors, 2) for pair in product(f, g) if allowed(*pair)]
    return list({label(pair): pair for pair in every}.values())


Single = tuple[str, str, str]  # verb, name, schedule


def singles(others: bool = False) -> list[Single]:
    """Every method under one scheduler, in turn; or under all `others`. A scheduler runs under itself."""
    every = schedulers()
    found: list[Single] = []
    for i, (verb, name) in enumerate(discovered()):
        if verb != "schedule":
            mine = every[i % len(every)]
            found += [(verb, name, schedule) for schedule in every if (schedule != mine) == others]
        elif not others:
            found.append((verb, name, spell(verb, name, tight(verb, name))))
    return found


def turns(ones: Sequence[T], others: Sequence[U], full: bool, each: int = 1) -> list[tuple[T, U]]:
    """Each of the first with so many of the second, others in turn; in full, with all of them."""
    n = len(others) if full else each
    return [(one, others[(i * n + j) % len(others)]) for i, one in enumerate(ones) for j in range(n)]


# ---- cases of a test
def over(rows: Callable[[bool], Sequence[Any]], name: Callable[[Any], str], most: int = 0) -> Callable[[Test], Test]:
    """The test's argument `case` takes each of these rows: `rows(full)`, `full` as told on the command line. Unless it
    is, at most so many of them: others every day."""

    def mark(test: Test) -> Test:
        test.cases = rows, name, most  # type: ignore[attr-defined]
        return test

    return mark


def sampled(rows: Sequence[T], most: int, seed: int) -> Sequence[T]:
    """At most so many of the rows, from all over them. Seeds one after the other take all rows in turn."""
    stride = -(-len(rows) // most)
    return rows[seed % stride :: stride] if stride else rows


def meetings(rows: Sequence[Row]) -> set[frozenset[str]]:
    """The names of any two choices that meet in a row."""
    return {frozenset((a.name, b.name)) for row in rows for a, b in combinations(row, 2)}
