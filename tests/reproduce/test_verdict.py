"""The word follows from the checks, and nothing else: by brute force over combinations of conditions, and by plants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import pytest

from phasewise.reproduce.system import Kind, Part
from phasewise.reproduce.verdict import ANSWERS_ALONE, CONTROL, SAVING_ALONE, UNTRIED, WITHOUT, Check, Verdict, judge

EVERY: tuple[Kind, ...] = ("answers", "cost", "time")
RANK = {"not here": 0, "open": 1, "partly": 1, "holds": 2}
Passed = bool | None


def check(
    part: Part, passed: Passed = True, of: Part | None = None, model: str = "", rival: bool = False
) -> Check:  # fmt: skip
    return Check(part, f"a {part}", "this", "that", passed, of, model, rival=rival)


def answers(passed: Passed = True, model: str = "pocket") -> Check:
    return check("answers", passed, model=model)


def loses(passed: Passed = True, of: Part = "answers", model: str = "pocket") -> Check:
    """A control, which loses or does not."""
    return check("control", passed, of, model)


LOSSY = [check("counter"), answers(), loses(), check("time")]
EXACT = [check("exact"), check("counter"), check("cost"), loses(of="cost", model=""), check("time")]


def lossy(*checks: Check) -> Verdict:
    """Of a method whose saving follows from its knobs, and whose paper promises answers and speed."""
    return judge(checks or LOSSY, EVERY, arithmetic=True)


def exact(*checks: Check) -> Verdict:
    return judge(checks or EXACT, ("cost", "time"))


def but(checks: Sequence[Check], *others: Check) -> list[Check]:
    """All checks, with those of some part and model replaced."""
    gone = {(each.part, each.of, each.model) for each in others}
    return [each for each in checks if (each.part, each.of, each.model) not in gone] + list(others)


def test_holds_when_every_condition_and_every_control_is_as_it_must_be() -> None:
    assert lossy() == Verdict("holds", ()) and exact() == Verdict("holds", ())


# ---- plants
def test_a_control_that_wins_takes_the_condition_away() -> None:
    """Answers that a control keeps as well show nothing; neither does a cost that a control has as well."""
    verdict = lossy(*but(LOSSY, loses(False)))
    assert verdict.word == "not here" and verdict.reasons[0] == SAVING_ALONE
    assert any(reason.startswith(CONTROL) for reason in verdict.reasons)
    assert exact(*but(EXACT, loses(False, "cost", ""))).word == "partly", "the clock stands without it"
    assert exact(*but(EXACT, loses(False, "cost", ""), check("time", False))).word == "not here"


def test_a_saturated_baseline_examines_nothing() -> None:
    """What is not counted neither holds nor is lost."""
    verdict = lossy(*but(LOSSY, answers(None), loses(None)))
    assert verdict.word == "partly" and verdict.reasons[0].startswith("a answers: not examined")
    assert lossy(*but(LOSSY, answers(None), loses(None), check("time", False))).word == "not here"


def test_a_saving_without_the_answers_is_not_here_whatever_is_saved() -> None:
    assert lossy(*but(LOSSY, answers(False))).reasons[0] == SAVING_ALONE
    assert lossy(*but(LOSSY, answers(False))).word == "not here"
    faster = [check("cost"), check("time"), answers(False), loses()]
    assert judge(faster, EVERY).word == "not here" and judge(faster, EVERY).reasons[0] == SAVING_ALONE


def test_answers_without_the_saving_are_not_here() -> None:
    """A method that does nothing keeps every answer."""
    nothing = [answers(), loses(), check("cost", False), check("time", False)]
    verdict = judge(nothing, EVERY)
    assert verdict.word == "not here" and verdict.reasons[0] == ANSWERS_ALONE
    assert judge(nothing, EVERY, arithmetic=True).word == "partly", "the knobs save, and the answers are kept"
    assert judge([answers(), loses()], ("answers",)).word == "holds", "a paper that promises answers alone"


def test_speed_that_no_clock_was_judged_for_does_not_hold() -> None:
    unclocked = [each for each in EXACT if each.part != "time"]
    assert exact(*unclocked).word == "partly" and f"not examined here: {WITHOUT['time']}" in exact(*unclocked).reasons
    assert judge(unclocked, ("cost",)).word == "holds", "a paper that does not say faster"
    assert exact(*but(EXACT, check("time", None))).word == "partly", "a clock that was not started"


def test_who_is_no_better_than_a_rival_of_equal_cost_has_not_what_is_claimed() -> None:
    """Fewer passes than the baseline are no condition that stands if a rival has as few; nor are answers."""
    for passed, word in ((True, "holds"), (False, "partly")):
        assert exact(*EXACT, check("cost", passed, rival=True)).word == word, "the clock stands in either case"
    slow = [*but(EXACT, check("time", False)), check("cost", False, rival=True)]
    assert exact(*slow).word == "not here" and exact(*slow[:-1]).word == "partly"
    assert lossy(*LOSSY, check("answers", False, model="pocket", rival=True)).word == "not here"


# ---- parts
def test_one_model_makes_up_for_another_and_no_task_for_another() -> None:
    strangers = [answers(False, "smollm2"), loses(True, model="smollm2")]
    assert lossy(*LOSSY, *strangers).word == "partly"
    assert lossy(*LOSSY, answers(False)).word == "not here", "an easy task beside a hard one"
    assert lossy(*but(LOSSY, answers(False)), answers(True, "smollm2"), loses(True, model="smollm2")).word == "partly"


def test_the_control_of_another_model_or_part_says_nothing_of_this_one() -> None:
    assert lossy(*LOSSY, loses(False, "mechanism", "")).word == "partly"
    assert lossy(*but(LOSSY, loses(False)), loses(True, "mechanism")).word == "not here"
    assert lossy(*but(LOSSY, loses(False)), loses(True, model="smollm2")).word == "not here"


def test_a_mechanism_alone_is_nothing_of_the_claim() -> None:
    slow = but(EXACT, check("cost", False), check("time", False))
    assert exact(*slow, check("mechanism")).word == "not here"
    assert exact(*EXACT, check("mechanism", False)).word == "partly"


def test_other_tokens_than_an_exact_systems_are_not_here() -> None:
    assert exact(*but(EXACT, check("exact", False))).word == "not here"


def test_a_failing_counter_spoils() -> None:
    assert exact(*but(EXACT, check("counter", False))).word == "partly"
    assert judge([check("counter", False), check("time", None)], ("time",)).word == "not here"
    assert judge([check("counter"), check("time", None)], ("time",)).word == "open"


def test_where_nothing_that_is_promised_was_judged_the_verdict_is_open() -> None:
    """Neither a counter, nor a mechanism, nor what follows from the knobs is something of the claim that came true."""
    nothing = [check("exact"), check("counter"), check("mechanism"), check("time", None)]
    for arithmetic in (False, True):
        verdict = judge(nothing, ("cost", "time"), arithmetic=arithmetic)
        assert verdict.word == "open" and verdict.reasons[0] == UNTRIED
    assert judge([*nothing, check("cost")], ("cost", "time")).word == "partly"
    assert judge(but(nothing, check("exact", False)), ("time",)).word == "not here"


def test_what_is_missing_is_said_and_counts() -> None:
    assert judge(LOSSY, EVERY, ("the moon",), True) == Verdict("partly", ("not examined here: the moon",))
    assert "no control was tried" in exact(*[each for each in EXACT if each.part != "control"]).reasons
    assert judge(EXACT, ()).reasons == ("not examined here: nothing says what the paper promises",)


def test_reasons_say_what_was_measured_and_what_was_wanted() -> None:
    assert exact(*but(EXACT, check("time", False))).reasons == ("a time: this, not that",)


# ---- brute force
CHOICES: tuple[tuple[Check | None, ...], ...] = (
    (None, check("exact"), check("exact", False)),
    (None, answers(True), answers(False), answers(None)),
    (None, loses(True), loses(False)),
    (None, answers(True, "smollm2")),
    (None, check("cost"), check("cost", False)),
    (None, loses(False, "cost", "")),
    (None, check("time"), check("time", False), check("time", None)),
    (None, check("cost", False, rival=True)),
)
PROMISES: tuple[tuple[Kind, ...], ...] = (("answers",), ("cost", "time"), EVERY)


def combinations() -> Iterator[tuple[list[Check], tuple[Kind, ...], bool]]:
    for picked in product(*CHOICES):
        checks = [each for each in picked if each is not None]
        for promises, arithmetic in product(PROMISES, (False, True)):
            yield checks, promises, arithmetic


def word_of(checks: Sequence[Check], promises: Sequence[Kind], arithmetic: bool) -> str:
    """The rule, said once more: a table of what stands, looked up."""
    of = {(each.part, each.of, each.model): each.passed for each in checks if not each.rival}
    rival = next((each.passed for each in checks if each.rival), None)
    pocket, strangers = of.get(("answers", None, "pocket")), of.get(("answers", None, "smollm2"))
    if pocket and of.get(("control", "answers", "pocket")) is False:
        pocket = False
    cost = of.get(("cost", None, ""))
    if of.get(("control", "cost", "")) is False or rival is False:
        cost = cost and False
        rival = rival and False
    time = of.get(("time", None, ""))
    if of.get(("exact", None, "")) is False:
        return "not here"
    stands = [each for each in (pocket, strangers, cost, rival, time) if each is not None]
    kept, judged = bool(pocket or strangers), pocket is not None or strangers is not None
    savings = [each for each in (cost, rival, time) if each is not None]
    if "answers" in promises and judged and not kept:
        return "not here"
    if {"cost", "time"} & set(promises) and kept and savings and True not in savings and not arithmetic:
        return "not here"
    if stands and True not in stands:
        return "not here"
    whole = all(each.passed for each in checks) and any(part == "control" for part, _, _ in of)
    asked = {each.part for each in checks} | ({"cost"} if arithmetic else set())
    if whole and set(promises) <= asked:
        return "holds"
    return "partly" if stands else "open"


def test_the_rule_by_brute_force() -> None:
    """Every combination of conditions and controls, passed, failed, unexamined or left out, under every promise."""
    seen = dict.fromkeys(RANK, 0)
    for checks, promises, arithmetic in combinations():
        verdict = judge(checks, promises, arithmetic=arithmetic)
        assert verdict.word == word_of(checks, promises, arithmetic), (checks, promises, arithmetic)
        assert (verdict.word == "holds") == (not verdict.reasons) or verdict.word == "not here"
        seen[verdict.word] += 1
    assert all(count > 50 for count in seen.values()), seen


@pytest.mark.parametrize("arithmetic", [False, True])
def test_no_check_that_gets_worse_makes_a_verdict_better(arithmetic: bool) -> None:
    """A condition that fails instead of passing, or a control that wins, lifts no verdict."""
    lifted = []
    for checks, promises, given in combinations():
        if given is not arithmetic or promises != EVERY:
            continue
        before = RANK[judge(checks, promises, arithmetic=arithmetic).word]
        for at, each in enumerate(checks):
            if each.passed:
                worse = [*checks[:at], check(each.part, False, each.of, each.model, each.rival), *checks[at + 1 :]]
                if RANK[judge(worse, promises, arithmetic=arithmetic).word] > before:
                    lifted.append((checks, each, promises))
    assert not lifted, lifted[0]
