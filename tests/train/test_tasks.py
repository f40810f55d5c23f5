"""Generated tasks: right by construction, checked exactly, and never shared between training and evaluation."""

from __future__ import annotations

import json
import re
from random import Random

import pytest

from phasewise.train.tasks import TASKS, example, held_out, turns

NAMES = sorted(TASKS)


@pytest.mark.parametrize("task", NAMES)
def test_the_expected_answer_passes_and_a_changed_one_fails(task: str) -> None:
    rng = Random(1)
    for _ in range(50):
        item = example(task, rng)
        assert item.check(item.answer)
        assert item.check(f" {item.answer}\n")
        assert not item.check("")
        assert not item.check(f"{item.answer}x")


@pytest.mark.parametrize("task", NAMES)
def test_the_same_seed_gives_the_same_examples(task: str) -> None:
    first, second = Random(5), Random(5)
    assert [turns(task, first, 256, True) for _ in range(5)] == [turns(task, second, 256, True) for _ in range(5)]


@pytest.mark.parametrize("task", NAMES)
def test_training_and_evaluation_never_share_a_prompt(task: str) -> None:
    rng = Random(2)
    for _ in range(100):
        assert not held_out(turns(task, rng, 128, evaluation=False)[0].prompt)
        assert held_out(example(task, rng, 128).messages[0]["content"])


def test_arithmetic_answers_are_right_and_only_the_result_is_scored() -> None:
    rng = Random(3)
    for _ in range(300):
        item = example("arithmetic", rng)
        prompt = item.messages[-1]["content"]
        a, b = map(int, re.findall(r"\d+", prompt))
        if prompt.startswith("Subtract"):
            result = b - a
        else:
            result = a - b if " - " in prompt else a + b
        assert item.answer.endswith(f", so {result}")
        for step in re.findall(r"[-+\d]+=\d+", item.answer):
            left, right = step.split("=")
            assert eval(left) == int(right)
        assert int(re.findall(r": (\d+)", item.answer)[-1]) == result  # the running result ends as the result
        assert item.check(f"so {result}")
        assert not item.check(f"so {result + 1}")


def test_sort_and_reverse_agree_with_python() -> None:
    rng = Random(4)
    for _ in range(200):
        item = example("sort", rng)
        listed = item.messages[-1]["content"].partition(": ")[2].split()
        key = int if listed[0].isdigit() else str
        assert item.answer.split() == sorted(listed, key=key)  # type: ignore[arg-type]
        item = example("reverse", rng)
        listed = item.messages[-1]["content"].partition(": ")[2].split()
        assert item.answer.split() == listed[::-1]


def test_recall_answers_are_pairs_of_the_prompt() -> None:
    rng = Random(5)
    for length in (64, 256, 1024, 2000):
        made = turns("recall", rng, length, evaluation=True)
        context = made[0].prompt.partition(": ")[2]
        for turn in made:
            asked = re.findall(r"(\w+)[,?]", turn.prompt.rpartition(" with ")[2])
            given = [pair.split() for pair in turn.answer.split(", ")]
            assert asked == [key for key, _ in given]
            assert all(re.search(rf"(^|\. ){key} {value}\.", context) for key, value in given)
            assert all(len(re.findall(rf"(?:^|\. ){key} \w+\.", context)) == 1 for key in asked)


def test_pass_keys_are_the_ones_in_the_prompt() -> None:
    rng = Random(6)
    for _ in range(20):
        made = turns("passkey", rng, 256, evaluation=True)
        for turn in made:
            owner = turn.prompt.rpartition("of ")[2].rstrip("?")
            assert turn.answer.startswith(f"The pass key of {owner} is ")
            assert turn.answer in made[0].prompt


def test_a_second_question_cannot_be_answered_without_the_first() -> None:
    """Equal questions get answers that depend on the list, and the list is in the first question alone."""
    rng, answers = Random(8), dict[str, set[str]]()
    for _ in range(200):
        item = example("second", rng)
        opened, noted, asked = item.messages
        listed = opened["content"].partition(": ")[2]
        assert noted["role"] == "assistant" and listed not in asked["content"]
        answers.setdefault(asked["content"], set()).add(item.answer)
        expected = {"Repeat the list.": listed, "Now backwards.": " ".join(reversed(listed.split())),
                    "Now sorted.": " ".join(sorted(listed.split())), "Which word came first?": listed.split()[0],
                    "How many words were there?": str(len(listed.split()))}  # fmt: skip
        assert item.answer == expected.get(asked["content"], item.answer)
        if asked["content"].startswith("Now without "):
            gone = asked["content"].split()[-1].rstrip(".")
            assert item.answer.split() == [word for word in listed.split() if word != gone]
    assert all(len(answers[fixed]) > 3 for fixed in ("Repeat the list.", "Now backwards.", "Which word came first?"))


def test_json_is_compared_by_value() -> None:
    item = example("json", Random(6))
    assert item.check(json.dumps(json.loads(item.answer), indent=2))
    assert not item.check("{}")
    assert not item.check("not json")
