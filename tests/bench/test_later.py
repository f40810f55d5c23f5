"""The second question about a text: asked over the KV that the first one left, the same of all methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import pytest

from phasewise.bench import kv
from phasewise.bench.forced import Forced, follow
from phasewise.bench.judge import Judge, free
from phasewise.bench.quality import TextCodec
from phasewise.bench.rows import index, later
from phasewise.bench.rows.later import ROWS, measure, talks
from phasewise.bench.rows.subject import Subject
from phasewise.bench.settings import BenchSetting
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.llm import LLM
from phasewise.load import model_path
from phasewise.reproduce.conversations import seconds
from phasewise.reproduce.lab import Lab, Scale
from phasewise.reproduce.system import Setting as Contender
from phasewise.train.tasks import Message, held_out
from tests.serve.tiny_chat import chat_checkpoint

ROW = "later@256"
LIMITS = Limits(kv_bytes=64 << 20, cluster="inline")


def quiet(done: int) -> None:
    """Nobody watches."""


@cache
def llm() -> LLM:
    return LLM(str(chat_checkpoint()), dtype="float32", limits=LIMITS)


@cache
def pocket() -> LLM:
    return LLM("pocket", limits=LIMITS)


def text_of(one: LLM) -> TextCodec:
    return TextCodec(lambda said: one.tokenizer.encode(said, add_special=False), one.tokenizer.decode, one.encode_chat)


def subject(**more: object) -> Subject:
    """The pocket model's way with text, and nothing behind it."""
    none = Subject(lambda prompts, room: [], lambda tokens, stretches: [], lambda jobs, room: [[] for _ in jobs],
                   TextCodec.load(Path(model_path("pocket"))), 2048)  # fmt: skip
    return replace(none, **more)  # type: ignore[arg-type]


# ---- what is asked
@pytest.mark.parametrize("evaluation", [True, False])
def test_no_text_that_is_asked_about_was_ever_trained_on(evaluation: bool) -> None:
    first: list[str] = []
    text = subject().text

    def chat(messages: Sequence[Message]) -> list[int]:
        first.append(messages[0]["content"])
        return text.chat(messages)

    made = talks(replace(text, chat=chat), Random(1), 20, 256, evaluation)
    assert len(made) == 20 and len(set(first)) == 20
    assert all(held_out(prompt) == evaluation for prompt in first)


@pytest.mark.parametrize("name", ROWS)
def test_the_second_question_is_about_another_pair_of_the_first_ones_text(name: str) -> None:
    text = subject().text
    for talk in talks(text, Random(2), 12, ROWS[name]):
        before, after = text.decode(talk.said[: talk.start]), text.decode(talk.said[talk.start :])
        key = talk.answer.split()[0]
        assert f" {talk.answer}." in before and f"goes with {key}?" in after
        assert f"goes with {key}?" not in before and talk.answer not in after
        assert 0.9 * ROWS[name] < len(talk.said) < min(2048 - 24, 1.1 * ROWS[name])


def test_a_row_draws_its_examples_by_the_seed() -> None:
    asked: list[list[tuple[list[int], int]]] = []

    def listen(jobs: list[tuple[list[int], int]], room: int) -> list[list[int]]:
        asked.append(jobs)
        return [[] for _ in jobs]

    for seed in (0, 0, 1):
        measure(ROW, subject(follow=listen), 3, seed)
    assert asked[0] == asked[1] and not {tuple(said) for said, _ in asked[0]} & {tuple(said) for said, _ in asked[2]}


# ---- what is right
def test_who_knows_the_pair_scores_one_and_who_says_the_first_answer_again_zero() -> None:
    text = subject().text
    known = talks(text, Random(f"7 {ROW}"), 10, ROWS[ROW])

    def oracle(jobs: list[tuple[list[int], int]], room: int) -> list[list[int]]:
        assert jobs == [(talk.said, talk.start) for talk in known]
        replies = [text.encode(talk.answer) for talk in known]
        assert max(map(len, replies)) <= room
        return replies

    def again(jobs: list[tuple[list[int], int]], room: int) -> list[list[int]]:
        return [text.encode(text.decode(said[start:]).split("\n")[0]) for said, start in jobs]

    assert measure(ROW, subject(follow=oracle), 10, 7).values == [1.0] * 10
    assert measure(ROW, subject(follow=again), 10, 7).row.value == 0.0
    assert measure(ROW, subject(), 10, 7).row.value == 0.0


# ---- the same request goes on
@pytest.mark.parametrize(
    "verbs",
    [{}, {"draft": "prompt_lookup:k=3"}, {"schedule": "sarathi:budget=16"}, {"evict": "snapkv:keep=1.0"}],
    ids=str,
)
def test_dense_answers_are_those_of_a_fresh_request_with_all_turns_in_its_prompt(verbs: dict[str, str]) -> None:
    judge, text = Judge(llm(), verbs), text_of(llm())
    measured = judge.measure(ROW, 3, 0, quiet)
    asked = talks(text, Random(f"0 {ROW}"), 3, ROWS[ROW])
    room = judge.asked[ROW][0][1] - (len(asked[0].said) - asked[0].start)
    assert judge.asked[ROW] == [(talk.said[: talk.start], len(talk.said) - talk.start + room) for talk in asked]
    fresh = [request.out for request in free(llm().engine, ROW, [talk.said for talk in asked], room, quiet)]
    ends = llm().model.config.eos
    assert judge.answers[ROW] == [[token for token in out if token not in ends] for out in fresh]
    assert sum(map(len, judge.answers[ROW])) > 3 and measured[0].n == 3


def test_what_an_evict_method_gave_up_for_the_first_question_is_gone_for_the_second() -> None:
    """One whose prompt has all turns chooses by the second question, and holds other rows."""
    judge, text = Judge(llm(), verbs := {"evict": "snapkv:keep=24,window=8"}), text_of(llm())
    judge.measure(ROW, 4, 0, quiet)
    asked = talks(text, Random(f"0 {ROW}"), 4, ROWS[ROW])
    room = judge.asked[ROW][0][1] - (len(asked[0].said) - asked[0].start)
    fresh = free(Judge(llm(), verbs).engine, ROW, [talk.said for talk in asked], room, quiet)
    assert judge.answers[ROW] != [request.out for request in fresh]


def test_a_request_holds_what_its_method_left_of_the_first_question_and_all_rows_since() -> None:
    shape = llm().model.config
    row = shape.layers * shape.kv_heads * 2 * shape.head_dim * 4
    run = kv.KVBench(llm(), "M", [BenchSetting.parse("evict=snapkv:keep=24,window=8")], (ROW,), 1)
    dense, cut = run.run([], lambda title, total: _Bar())
    [talk] = talks(text_of(llm()), Random(f"0 {ROW}"), 1, ROWS[ROW])
    assert dense["live"] - cut["live"] == row * (talk.start - 24)
    assert cut["live"] > row * (24 + len(talk.said) - talk.start)


class _Bar:
    def __enter__(self) -> object:
        return quiet

    def __exit__(self, *about: object) -> None:
        """Nothing was drawn."""


def test_who_forgot_the_text_fails_and_who_holds_it_does_not() -> None:
    """SnapKV at a sixteenth answers the question at the prompt's end, of which its votes know, and not the second."""
    right = {
        evict: [
            Judge(pocket(), {"evict": evict}).measure(task, 6, 0, quiet)[0].value for task in ("recall@1k", "later@1k")
        ]
        for evict in ("none", "snapkv:keep=0.0625", "streaming:sinks=4,window=60")
    }
    assert right["none"] == [1.0, 1.0]
    assert right["snapkv:keep=0.0625"][0] >= 5 / 6 and right["snapkv:keep=0.0625"][1] <= 0.5
    assert max(right["streaming:sinks=4,window=60"]) <= 0.5


def test_what_is_gone_on_with_ends_at_an_end_token_and_leaves_nothing_behind() -> None:
    forced, bench = Forced(), Judge(llm(), {})
    engine, tokens = bench.writer, text_of(llm()).encode("the quick brown fox jumps over the lazy dog")
    [free_run] = follow(engine, bench.forced, [(tokens, 4)], 12, ())
    assert len(free_run) == 12
    end = free_run[7]
    [cut] = follow(engine, bench.forced, [(tokens, 4)], 12, (end,))
    assert cut == free_run[: free_run.index(end)]
    assert not bench.forced.scripts and not bench.forced.nats and not bench.forced.choices and not forced.scripts
    with pytest.raises(UserError, match="context"):
        follow(engine, bench.forced, [(tokens * 300, 4)], 12, ())


def test_reproduced_systems_are_asked_the_same_questions() -> None:
    with Lab.open(Scale()) as lab:
        found = seconds(lab, Contender({"evict": "snapkv:keep=0.25"}), 4)
        dense = seconds(lab, Contender(), 4)
    judge, text = Judge(pocket(), {"evict": "snapkv:keep=0.25"}), text_of(pocket())
    asked = talks(text, Random("0 second"), 4, 1000)
    ends = pocket().model.config.eos
    mine = later.grades(asked, text, lambda jobs, room: follow(judge.writer, judge.forced, jobs, room, ends))
    assert found == [float(grade) for grade in mine] and dense == [1.0] * 4


# ---- where it is found, and what keeps it from being measured
def test_the_rows_are_for_models_that_learned_such_tasks() -> None:
    assert set(ROWS) <= set(index.EVERY) and not set(ROWS) & set(index.GENERAL)
    assert set(ROWS) <= set(index.suited(pocket().tokenizer, 2048, None)[0])


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    text = subject().text

    def latest(messages: Sequence[Message]) -> list[int]:
        return text.chat(messages[-1:])

    with pytest.raises(UserError, match="writes earlier turns otherwise"):
        measure(ROW, subject(text=replace(text, chat=latest)), 1, 0)


def test_a_model_without_a_chat_template_is_told_so() -> None:
    bare = LLM(str(chat_checkpoint(False)), dtype="float32", limits=LIMITS)
    with pytest.raises(UserError, match=f"{ROW} is asked through a chat template"):
        Judge(bare, {}).measure(ROW, 1, 0, quiet)
