"""What a method may say of itself besides its guarantee: the laws believe it, and catch one that lies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from torch import Tensor

from phasewise.methods.sample.standard import Standard
from phasewise.verbs.method import Method
from phasewise.verbs.sample import Context, Dist, Sample
from phasewise.verbs.traits import Traits
from tests import tiny
from tests.laws import axes, scenario, test_methods
from tests.laws.compare import build, reference
from tests.laws.dummies import register
from tests.laws.settings import options

STANDARD, SCHEDULE = Standard(), "sarathi:budget=9"


@dataclass(frozen=True)
class Contrary(Method, Sample):
    """The least likely token, in two ways of computing it."""

    fast: bool = True

    paper: ClassVar[str] = ""
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}
    reference: ClassVar[dict[str, object]] = {"fast": False}
    traits: ClassVar[Traits] = Traits("sample")

    def __call__(self, logits: Tensor, contexts: Sequence[Context]) -> Dist:
        return STANDARD(-2 * logits / 2 if self.fast else -logits, contexts)


@dataclass(frozen=True)
class Careless(Contrary):
    """The fast way is another: exact in its own words only."""

    def __call__(self, logits: Tensor, contexts: Sequence[Context]) -> Dist:
        return STANDARD(logits if self.fast else -logits, contexts)


@dataclass(frozen=True)
class Private(Method, Sample):
    """Says something else where rows were not computed for the request itself; so it shares none."""

    paper: ClassVar[str] = ""
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}
    traits: ClassVar[Traits] = Traits("sample", shares_prefix=False)

    def __call__(self, logits: Tensor, contexts: Sequence[Context]) -> Dist:
        for row, context in enumerate(contexts):
            kv, forked = context.request.kv, context.request.id.endswith(".1")
            if kv is not None and kv.reused and not forked:
                logits[row] *= -1
        return STANDARD(logits, contexts)


@dataclass(frozen=True)
class Open(Private):
    """The same, and does not say so."""

    traits: ClassVar[Traits] = Traits("sample")


@dataclass(frozen=True)
class Crowded(Open):
    """Says something else in company."""

    def __call__(self, logits: Tensor, contexts: Sequence[Context]) -> Dist:
        return STANDARD(-logits if len(contexts) > 1 else logits, contexts)


@dataclass(frozen=True)
class Filial(Open):
    """Says something else in a fork."""

    def __call__(self, logits: Tensor, contexts: Sequence[Context]) -> Dist:
        for row, context in enumerate(contexts):
            if context.request.id.endswith(".1"):
                logits[row] *= -1
        return STANDARD(logits, contexts)


@dataclass(frozen=True)
class Forgetful(Open):
    """Counts its own draws, and the count is lost with the KV."""

    def __call__(self, logits: Tensor, contexts: Sequence[Context]) -> Dist:
        for row, context in enumerate(contexts):
            count = context.request.state["made"] = context.request.state.get("made", 0) + 1
            if count > 4:
                logits[row] *= -1
        return STANDARD(logits, contexts)


def made(monkeypatch: pytest.MonkeyPatch, cls: type[Any]) -> tuple[str, str]:
    scenario.forget()  # what other methods of this name gave alone
    register(monkeypatch, {("sample", "made"): cls})
    return "sample", "made"


def test_exact_means_its_own_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    method = made(monkeypatch, Contrary)
    test_methods.equals_its_reference(*method)
    test_methods.test_declares_itself(*method)
    monkeypatch.delattr(Contrary, "reference")
    with pytest.raises(AssertionError, match="instead of"):  # and is not greedy
        test_methods.equals_its_reference(*method)


def test_a_reference_that_is_another_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="instead of"):
        test_methods.equals_its_reference(*made(monkeypatch, Careless))


@pytest.mark.parametrize(("cls", "fits"), [(Contrary, True), (Careless, False)])
def test_compositions_are_compared_with_the_reference(monkeypatch: pytest.MonkeyPatch, cls: Any, fits: bool) -> None:
    made(monkeypatch, cls)
    (choice,) = (choice for choice in axes.methods("sample") if choice.name == "sample.made")
    assert dict(choice.alone) == {"sample": "made:fast=False"}
    want = reference(dict(choice.alone), tiny.prompts(41, 7), tiny.greedy(8))
    got = tiny.outs(tiny.run(build(dict(choice.verbs) | {"schedule": "layered"}), want.prompts, tiny.greedy(8)))
    assert (got == want.tokens) == fits


def test_what_shares_no_prefix_is_never_given_one(monkeypatch: pytest.MonkeyPatch) -> None:
    method = made(monkeypatch, Private)
    test_methods.holds((*method, SCHEDULE))
    assert tiny.engine(options(*method)).store.tree is None


@pytest.mark.parametrize(
    ("cls", "law"),
    [(Open, "prefix"), (Crowded, "mates; fork; cancellation"), (Filial, "fork"), (Forgetful, "preemption")],
)
def test_a_broken_law_is_named(monkeypatch: pytest.MonkeyPatch, cls: type[Any], law: str) -> None:
    method = made(monkeypatch, cls)
    with pytest.raises(AssertionError, match="Broken by") as raised:
        test_methods.holds((*method, SCHEDULE))
    said = re.sub(r" \(.*?\)", "", str(raised.value).splitlines()[0])
    assert said == f"tokens are not a request's own. Broken by {law}.", raised.value
