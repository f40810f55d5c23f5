"""Splitwise's provisioning: what a budget buys, and what the attempts say of what is found."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from phasewise.plan.cost import StepWork
from phasewise.plan.search import Choice, Goal, Tried
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.system import AttemptOutcome
from phasewise.reproduce.systems import splitwise

QUICK = cast(Lab, SimpleNamespace(scale=SimpleNamespace(quick=True, seed=0)))


@pytest.mark.parametrize(
    ("attempt", "apart", "passed"),
    [(splitwise.same_price, 2.4, True), (splitwise.same_price, 2.3, False), (splitwise.same_power, 2.3, False),
     (splitwise.lower_price, 1.4, True), (splitwise.lower_price, 1.3, False)],
)  # fmt: skip
def test_the_papers_factors(
    monkeypatch: pytest.MonkeyPatch, attempt: Callable[[Lab], AttemptOutcome], apart: float, passed: bool
) -> None:
    pools = Tried(Choice("splitwise:prompt=2,token=1", "splitwise"), 24, apart, apart)
    plain = Tried(Choice("colocated", "prefill_first"), 8, 0.1, 1.0)
    asked: list[float] = []
    monkeypatch.setattr(splitwise.Provisioning, "found", lambda self, share: (asked.append(share), (pools, plain))[1])
    outcome = attempt(QUICK)
    assert outcome.passed is passed and "splitwise:prompt=2,token=1" in outcome.measured
    assert asked == [splitwise.LESS if attempt is splitwise.lower_price else 1.0]


@pytest.mark.parametrize("goal", ["iso-cost", "iso-power"])
def test_no_pools_take_more_than_there_is(goal: Goal) -> None:
    bought = splitwise.Provisioning(goal, 14, 100, 0)
    seen = set()
    for space in bought.pools(0.8):
        (choice,) = space.choices()
        prompt, token = choice.roles
        sizes = dict(part.split("=") for part in choice.place.partition(":")[2].split(","))
        taken = int(sizes["prompt"]) * bought.of(prompt.device) + int(sizes["token"]) * bought.of(token.device)
        assert bought.budget(0.8) - bought.of(token.device) < taken <= bought.budget(0.8)
        seen.add((prompt.device, token.device))
    assert seen == set(splitwise.DESIGNS.values())


def test_a_capped_token_machine_saves_power_and_decodes_as_fast() -> None:
    """HHcap: the same price, half the power of a GPU, and a decode step that memory bounds takes no longer."""
    price, power = (splitwise.Provisioning(goal, 14, 100, 0) for goal in ("iso-cost", "iso-power"))
    assert price.of("h100") == price.of(splitwise.CAPPED)
    assert power.of("h100") == 2 * power.of(splitwise.CAPPED)
    step = StepWork(decode_rows=32, context=32 * 1000, emits=32)
    steps = [splitwise.known({"": kind}, 8, splitwise.LLAMA).cost("", None) for kind in ("h100", splitwise.CAPPED)]
    assert steps[0].seconds(step) == steps[1].seconds(step)


def test_a_small_budget_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitwise, "DESIGNS", {"HA": ("h100", "a100")})
    monkeypatch.setattr(splitwise, "CONVERSATION", "lognormal:prompt=1000,longest=2000,new=10,new_longest=20")
    apart, together = splitwise.Provisioning("iso-cost", 4, 400, 0).found(1.0)
    assert apart.worth > 0 and together.worth > 0
    assert [role.device for role in apart.choice.roles] == ["h100", "a100"] and together.choice.place == "colocated"
