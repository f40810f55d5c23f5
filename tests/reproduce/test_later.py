"""What attempts about second questions say, of grades that are given to them."""

from __future__ import annotations

from typing import Any

import pytest

from phasewise.reproduce import conversations
from phasewise.reproduce.lab import Lab, Scale
from phasewise.reproduce.system import Setting
from phasewise.reproduce.systems import loopserve, quest, snapkv

GOOD, POOR = [1.0] * 40 + [0.0] * 10, [1.0] * 10 + [0.0] * 40


class FakeLab:
    scale = Scale(examples=50)


LAB: Any = FakeLab()


def grading(monkeypatch: pytest.MonkeyPatch, *poor: Setting) -> None:
    """Who is among `poor` answers less, the others more."""
    monkeypatch.setattr(conversations, "seconds", lambda lab, setting, n: POOR if setting in poor else GOOD)


@pytest.mark.parametrize(
    ("poor", "passes"),
    [((quest.EVICTED,), True), ((), False), ((quest.TENTH,), False), ((quest.TENTH, quest.EVICTED), False)],
)
def test_quest_must_answer_more_than_h2o(
    monkeypatch: pytest.MonkeyPatch, poor: tuple[Setting, ...], passes: bool
) -> None:
    grading(monkeypatch, *poor)
    tried = quest.later(LAB)
    assert tried.passed is passes
    assert "less H2O" in tried.measured and "dense 80%" in tried.measured and "of 50" in tried.measured


@pytest.mark.parametrize("even", ["once a turn", "random rows", "SnapKV", "none"])
def test_loopserve_must_answer_more_than_each_of_three(monkeypatch: pytest.MonkeyPatch, even: str) -> None:
    losing = {"once a turn": loopserve.ONCE, "random rows": loopserve.OTHERS, "SnapKV": loopserve.GIVEN_UP}
    grading(monkeypatch, *(setting for name, setting in losing.items() if name != even))
    tried = loopserve.second_questions(LAB)
    assert tried.passed is (even == "none") and all(f"less {name}" in tried.measured for name in losing)


@pytest.mark.parametrize("even", ["random rows", "SnapKV", "none"])
def test_loopserve_over_kept_rows_must_answer_more_than_two(monkeypatch: pytest.MonkeyPatch, even: str) -> None:
    losing = {"random rows": loopserve.OTHERS_KEPT, "SnapKV": loopserve.GIVEN_UP}
    poor = [setting for name, setting in losing.items() if name != even]
    for name in ("seconds", "in_turns"):
        monkeypatch.setattr(loopserve, name, lambda lab, each, n, own=name: graded(own, POOR if each in poor else GOOD))
    tried = loopserve.turns_kept(LAB)
    assert tried.passed is (even == "none") and all(f"less {name}" in tried.measured for name in losing)


def graded(how: str, grades: list[float]) -> Any:
    return grades if how == "seconds" else conversations.SecondQuestions(grades)


def test_a_second_question_runs_what_is_new_where_the_first_ones_rows_are_taken() -> None:
    """And everything where they are not; it is answered all the same."""
    with Lab.open(Scale(examples=2, quick=True)) as lab:
        kept, computed = (conversations.in_turns(lab, each, 2) for each in (loopserve.KEPT, loopserve.ON))
        assert loopserve.new_rows(lab).passed
    assert kept.ran == kept.new < kept.tokens / 10 and computed.ran > computed.tokens > computed.new
    assert kept.grades == computed.grades == [1.0, 1.0]


@pytest.mark.parametrize(
    ("last", "later", "passes"),
    [((GOOD, POOR), (POOR, POOR), True), ((GOOD, POOR), (GOOD, POOR), False), ((GOOD, GOOD), (GOOD, POOR), False)],
)
def test_snapkvs_lead_must_shrink_where_the_question_is_hidden(
    monkeypatch: pytest.MonkeyPatch, last: Any, later: Any, passes: bool
) -> None:
    monkeypatch.setattr(snapkv, "right", lambda lab, setting, row, n: last[setting == snapkv.ANY])
    monkeypatch.setattr(snapkv, "seconds", lambda lab, setting, n: later[setting == snapkv.ANY])
    assert snapkv.hidden(LAB).passed is passes


def test_as_many_second_questions_as_the_scale_says() -> None:
    with Lab.open(Scale(quick=True)) as lab:
        assert conversations.number(lab) == conversations.FEW
    with Lab.open(Scale(examples=3)) as lab:
        grades = conversations.seconds(lab, Setting(), conversations.number(lab))
    assert grades == [1.0] * 3, "without a method nothing is lost"
