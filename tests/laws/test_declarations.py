"""What a method may say of itself besides its guarantee: the laws believe it, and catch one that lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from torch import Tensor

from phasewise.methods.sample.standard import Standard
from phasewise.verbs.sample import Context, Dist
from tests import tiny
from tests.laws import axes, test_methods
from tests.laws.compare import build, reference
from tests.laws.dummies import register
from tests.laws.settings import options

STANDARD = Standard()


@dataclass(frozen=True)
class Contrary:
    """The least likely token, in two ways of computing it."""

    fast: bool = True

    paper: ClassVar[str] = ""
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}
    reference: ClassVar[dict[str, object]] = {"fast": False}

    def __call__(self, logits: Tensor, contexts: Sequence[Context]) -> Dist:
        return STANDARD(-2 * logits / 2 if self.fast else -logits, contexts)


@dataclass(frozen=True)
class Careless(Contrary):
    """The fast way is another: exact in its own words only."""

    def __call__(self, logits: Tensor, contexts: Sequence[Context]) -> Dist:
        return STANDARD(logits if self.fast else -logits, contexts)


@dataclass(frozen=True)
class Private:
    """Says something else where rows were not computed for the request itself; so it shares none."""

    paper: ClassVar[str] = ""
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}
    shares_prefix: ClassVar[bool] = False

    def __call__(self, logits: Tensor, contexts: Sequence[Context]) -> Dist:
        for row, context in enumerate(contexts):
            if context.request.kv is not None and context.request.kv.reused:
                logits[row] *= -1
        return STANDARD(logits, contexts)


@dataclass(frozen=True)
class Open(Private):
    """The same, and does not say so."""

    shares_prefix: ClassVar[bool] = True


def case(monkeypatch: pytest.MonkeyPatch, cls: type[Any]) -> axes.Single:
    register(monkeypatch, {("sample", "made"): cls})
    return "sample", "made", "sarathi:budget=9"


def test_exact_means_its_own_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    made = case(monkeypatch, Contrary)
    test_methods.equals_its_reference(made)
    test_methods.test_declares_itself(*made[:2])
    monkeypatch.delattr(Contrary, "reference")
    with pytest.raises(AssertionError, match="instead of"):  # and is not greedy
        test_methods.equals_its_reference(made)


def test_a_reference_that_is_another_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="instead of"):
        test_methods.equals_its_reference(case(monkeypatch, Careless))


@pytest.mark.parametrize(("cls", "fits"), [(Contrary, True), (Careless, False)])
def test_compositions_are_compared_with_the_reference(monkeypatch: pytest.MonkeyPatch, cls: Any, fits: bool) -> None:
    case(monkeypatch, cls)
    (made,) = (choice for choice in axes.methods("sample") if choice.name == "sample.made")
    assert dict(made.alone) == {"sample": "made:fast=False"}
    want = reference(dict(made.alone), tiny.prompts(41, 7), tiny.greedy(8))
    got = tiny.outs(tiny.run(build(dict(made.verbs) | {"schedule": "layered"}), want.prompts, tiny.greedy(8)))
    assert (got == want.tokens) == fits


def test_what_shares_no_prefix_is_never_given_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made = case(monkeypatch, Private)
    test_methods.prefix_reuse_changes_nothing(test_methods.given(made), Private)
    assert tiny.engine(options("sample", "made")).store.tree is None


def test_what_should_not_share_and_does_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    made = case(monkeypatch, Open)
    with pytest.raises(AssertionError):
        test_methods.prefix_reuse_changes_nothing(test_methods.given(made), Open)
