"""The word follows from the checks, and nothing else."""

from __future__ import annotations

import pytest

from phasewise.reproduce.system import Part
from phasewise.reproduce.verdict import CONTROL, Check, judge


def check(part: Part, passed: bool | None = True) -> Check:
    return Check(part, f"a {part}", "this", "that", passed)


ALL = [check("exact"), check("counter"), check("claim"), check("quality"), check("control")]


def but(*others: Check) -> list[Check]:
    """All checks, with some of a part replaced."""
    return [c for c in ALL if c.part not in {o.part for o in others}] + list(others)


def test_holds_when_every_check_passes() -> None:
    assert judge(ALL).word == "holds" and judge(ALL).reasons == ()


def test_a_control_that_wins_spoils_the_verdict() -> None:
    verdict = judge(but(check("control", False)))
    assert verdict.word == "partly"
    assert verdict.reasons[0].startswith(CONTROL)


def test_one_of_two_controls_that_wins_is_enough() -> None:
    assert judge([*ALL, check("control", False)]).word == "partly"


def test_without_any_control_nothing_holds() -> None:
    verdict = judge([c for c in ALL if c.part != "control"])
    assert verdict.word == "partly" and "no control was tried" in verdict.reasons


def test_a_failing_counter_spoils() -> None:
    assert judge(but(check("counter", False))).word == "partly"


def test_other_tokens_than_an_exact_systems_are_not_here() -> None:
    assert judge(but(check("exact", False))).word == "not here"


def test_a_claim_of_which_nothing_passes_is_not_here() -> None:
    assert judge(but(check("claim", False), check("quality", False))).word == "not here"
    assert judge(but(check("claim", False))).word == "partly"
    assert judge([check("counter"), check("control"), check("claim", False), check("claim", None)]).word == "not here"
    assert judge(but(check("claim", False), check("control", False))).word == "not here", (
        "kept quality says nothing then"
    )
    assert judge(but(check("claim"), check("claim", False), check("control", False))).word == "partly"


def test_quality_that_is_lost_and_no_better_than_the_controls_is_not_here() -> None:
    assert judge(but(check("quality", False))).word == "partly"
    assert judge(but(check("quality", False), check("control", False))).word == "not here"


@pytest.mark.parametrize("part", ["claim", "control", "exact", "counter", "quality"])
def test_what_was_not_examined_cannot_hold(part: Part) -> None:
    verdict = judge([*ALL, check(part, None)])
    assert verdict.word == "partly" and "not examined" in verdict.reasons[0]


def test_nothing_of_the_claim_examined_is_partly_while_the_counters_agree() -> None:
    unseen = [check("counter"), check("claim", None), check("control", None)]
    assert judge(unseen).word == "partly"
    assert judge([*unseen, check("counter", False)]).word == "not here"
    assert judge([check("counter"), check("control")]).reasons == ("nothing of the claim was tried",)


def test_missing_parts_are_said_and_count() -> None:
    verdict = judge(ALL, missing=("the moon",))
    assert verdict.word == "partly" and verdict.reasons == ("not examined here: the moon",)


def test_reasons_say_what_was_measured_and_what_was_wanted() -> None:
    assert judge(but(check("claim", False))).reasons == ("a claim: this, not that",)
