"""Harder look-ups: the text holds one right answer, and the others are as near to it as the row says."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest

from phasewise.bench import harder, quality
from phasewise.bench.judge import Judge
from phasewise.bench.quality import TextCodec
from phasewise.bench.rows import english, index
from phasewise.llm import LLM
from phasewise.load import model_path
from phasewise.reproduce import headroom
from phasewise.train.tasks import held_out
from tests.bench.test_rows import quiet, subject

NAMES = sorted(harder.ROWS)


def apart(one: str, other: str) -> int:
    assert len(one) == len(other)
    return sum(a != b for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_seeded_held_out_and_as_long_as_the_name_says(name: str) -> None:
    text = TextCodec.load(Path(model_path("pocket")))
    some = quality.drawn(name, 4, 3)
    assert [one.messages for one in some] == [one.messages for one in quality.drawn(name, 4, 3)]
    assert [one.messages for one in some] != [one.messages for one in quality.drawn(name, 4, 4)]
    for one in some:
        assert held_out(one.messages[0]["content"])
        assert 1600 < len(text.chat(one.messages)) + len(text.encode(one.answer)) <= 1850
        assert one.check(f" {one.answer}\n") and not one.check(one.answer + "s") and not one.check("")


def test_eight_keys_are_asked_for_and_each_stands_once() -> None:
    for one in quality.drawn("keys@1.8k", 4, 0):
        text, _, question = one.messages[0]["content"].rpartition(". ")
        asked = re.findall(r"\w+", question.removeprefix("Which words go with "))
        pairs = dict(pair.split() for pair in re.findall(r"(?<=[:.] )[a-z]+ [a-z]+(?=\.)", text + "."))
        assert len(asked) == len(set(asked)) == 8 and len(pairs) > 100
        assert one.answer == ", ".join(f"{key} {pairs[key]}" for key in asked)


def test_other_pass_keys_differ_in_a_character_of_each_word_at_most() -> None:
    for one in quality.drawn("near@1.8k", 8, 0):
        said = dict(re.findall(r"The pass key of (\w+) is (\w+ \w+)\.", one.messages[0]["content"]))
        owner = re.search(r"pass key of (\w+)\?", one.messages[0]["content"])
        assert owner is not None and one.answer == f"The pass key of {owner[1]} is {said[owner[1]]}."
        right = said[owner[1]].split()
        off = [tuple(map(apart, right, key.split())) for key in said.values()]
        assert len(set(said.values())) == len(said) == 8
        assert off.count((0, 0)) == 1 and all(max(each) <= 1 for each in off)


def test_the_second_hop_starts_where_the_first_one_ends() -> None:
    for one in quality.drawn("hops@1.8k", 4, 0):
        first, reply, second = (message["content"] for message in one.messages)
        middle = reply.split()[1]
        assert second == f"Which word goes with {middle}?" and one.answer.split()[0] == middle
        assert len(re.findall(rf"\b{middle}\b", first)) >= 2  # a value of one pair, and the key of another
        assert first.count(f" {one.answer}.") == 1


@pytest.mark.parametrize("name", sorted(english.HARDER))
def test_the_keys_of_eight_people_in_english(name: str) -> None:
    ask = subject().ask
    for ids, key in english.asked(name, ask, Random(1), 3):
        assert 0.99 * english.LENGTHS[name] <= len(ids) <= english.LENGTHS[name]
        text = subject().text.decode(ids)
        said = dict(re.findall(r"The pass key of (\w+) is (\d{5})\.", text))
        owner = re.search(r"What is the pass key of (\w+)\?", text)
        assert owner is not None and said[owner[1]] == key and len(set(said.values())) == len(said) == 8
        off = [apart(key, other) for other in said.values()]
        assert sorted(off)[0] == 0 and (max(off) == 1) is english.HARDER[name]


def test_they_are_rows_by_name_that_nobody_gets_without_asking() -> None:
    for name in (*harder.ROWS, *english.HARDER):
        index.known([name], None)
        assert name not in quality.ALL
    assert not set(english.HARDER) & set(index.suited(LLM("pocket").tokenizer, 1 << 20, None)[0])


@pytest.mark.parametrize("name", NAMES)
def test_systems_are_asked_what_eval_asks(name: str) -> None:
    asked, text = headroom.questions(name, 2, 0)
    judge = Judge(LLM("pocket"), {})
    judge.measure(name, 2, 0, quiet)
    assert [one.prompt for one in asked] == [prompt for prompt, _ in judge.asked[name]]
    grades = [float(one.check(text(said))) for one, said in zip(asked, judge.answers[name], strict=True)]
    assert grades == judge.found[name][0].values and headroom.known(name)


@pytest.mark.parametrize("name", sorted(english.HARDER))
def test_systems_ask_the_other_model_in_english(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the pocket model's tokens in the other's place, which need not be there."""
    monkeypatch.setattr(headroom, "stranger_chat", lambda said: subject().ask(said, ""))
    monkeypatch.setattr(headroom, "stranger_text", lambda: subject().text)
    asked, text = headroom.questions(name, 2, 0)
    for one in asked:
        said = text(one.prompt)
        owner = re.search(r"What is the pass key of (\w+)\?", said)
        assert owner is not None and 0.99 * english.LENGTHS[name] <= len(one.prompt) <= english.LENGTHS[name]
        (key,) = re.findall(rf"The pass key of {owner[1]} is (\d+)", said)
        assert one.check(f"It is {key}.") and not one.check("It is 1.")
