"""`bench draft`: questions are read and spread, answers counted, and tables say what was counted."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from phasewise.bench.drafted import ALL, lengths, results, section, speeds, work
from phasewise.bench.drafting import PLAIN, Drafting, DraftPrompt, Heat, answer, drafters, loops
from phasewise.bench.drive import Bench
from phasewise.bench.questions import CHAT, MADE, made, questions, spread
from phasewise.bench.settings import BenchSetting
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.request.counters import Counters
from phasewise.request.params import Params
from phasewise.train.tasks import held_out
from tests import tiny

LIMITS = Limits(64 << 20, 8, True)


def as_ids(messages: object) -> list[int]:
    (message,) = messages  # type: ignore[misc]
    assert message["role"] == "user"
    return [len(message["content"])]


def test_questions_of_a_file_by_task(tmp_path: Path) -> None:
    """First turns, MT-Bench's categories as one task, evenly spread; lines without `turns` may have a `prompt`."""
    path = tmp_path / "asked.jsonl"
    lines = [{"category": "rag", "turns": ["x" * (i + 1), "second"]} for i in range(6)]
    lines += [{"category": "writing", "turns": ["abc"]}, {"category": "stem", "prompt": "abcd"}, {"prompt": "abcde"}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert questions(path, as_ids, None) == {"rag": [[1], [2], [3], [4], [5], [6]], CHAT: [[3], [4], [5]]}
    assert questions(path, as_ids, 2) == {"rag": [[1], [4]], CHAT: [[3], [4]]}
    assert spread("abc", 5) == "abc"


def test_questions_that_training_holds_out(tmp_path: Path) -> None:
    """What heads learned from this file is no measure of them: its lines are the others."""
    path = tmp_path / "asked.jsonl"
    lines = [json.dumps({"prompt": "x" * (i + 1)}) for i in range(64)]
    path.write_text("\n".join(lines))
    learned = [len(json.loads(line)["prompt"]) for line in lines if not held_out(line)]
    (unlearned,) = questions(path, as_ids, None, unlearned=True).values()
    assert sorted([*(length for (length,) in unlearned), *learned]) == list(range(1, 65))
    assert 0 < len(unlearned) < 16
    path.write_text(next(line for line in lines if not held_out(line)))
    with pytest.raises(UserError, match="holds no question that training holds out"):
        questions(path, as_ids, None, unlearned=True)


@pytest.mark.parametrize("line", ["{", "[]", '{"turns": []}', '{"turns": [3]}', '{"turns": [""]}', '{"text": "x"}'])
def test_a_line_that_is_no_question_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(UserError, match="line 2"):
        questions(path, as_ids, None)
    path.write_text("\n")
    with pytest.raises(UserError, match="holds no question"):
        questions(path, as_ids, None)
    with pytest.raises(UserError, match="cannot be read"):
        questions(tmp_path / "none.jsonl", as_ids, None)


def test_made_questions_are_the_same_for_the_same_seed() -> None:
    def encode(text: str) -> list[int]:
        return [ord(c) % 250 for c in text[:5000]]

    one, two, other = (made(as_ids, encode, [7], 3, seed) for seed in (0, 0, 1))
    assert one == two != other
    assert list(one) == ["library code", *MADE] and all(len(prompts) == 3 for prompts in one.values())


def test_a_loop_is_an_end_that_comes_again_and_again() -> None:
    assert loops([1, 2, 3, *[7] * 24]) and loops([9, *list(range(10)) * 3]) and loops([5, 6] * 20)
    assert not loops([7] * 23) and not loops(list(range(30)) * 2) and not loops(list(range(100)))
    assert not loops([*[7] * 24, 1])


def test_the_clock_and_the_counters_of_answers() -> None:
    """Against plain decoding's closed form: every step after the first gives each request a token, in its turn."""
    bench = Bench.load(str(tiny.checkpoint()))
    engine, ticks = bench.engine({}, Limits(32 << 20, 2, False)), iter([10.0, 14.0])
    asked = [DraftPrompt(prompt, Params(max_tokens=6)) for prompt in tiny.prompts(9, 12, 7)]
    seconds, turns, answers = answer(engine, asked, lambda: next(ticks))
    assert seconds == 4.0
    assert turns == sum(len(tokens) - 1 for tokens in answers)
    assert [len(tokens) for tokens in answers] == [6, 6, 6]


@pytest.mark.parametrize("batch", [1, 2])
def test_contenders_answer_the_same_questions(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter gives plain decoding's answers in float32; who cannot run says why; counters add up to the tokens."""
    bench = Bench.load(str(tiny.checkpoint()))
    settings = [BenchSetting(name, {"draft": name}) for name in ("prompt_lookup", "paced", "draft_model:model=nowhere")]
    run = Drafting(bench, settings, LIMITS, 12)
    asked = {"a": tiny.prompts(20, 24), "b": tiny.prompts(15)}
    heats = (3 if batch == 1 else 2) * 3
    engines, ended = run.start(asked, batch), list[str]()
    for name, engine in engines.items():
        monkeypatch.setattr(engine, "close", partial(ended.append, name))
    assert list(run.run(engines, asked, batch, 1)) == list(range(1, heats + 1))
    assert ended == list(engines), "a drafter may have a process of its own"
    assert list(run.refused) == ["draft_model:model=nowhere"] and "nowhere" in run.refused["draft_model:model=nowhere"]
    found = results(run.heats)
    assert [(one.setting, one.task) for one in found] == [
        (setting, task) for setting in (PLAIN, "prompt_lookup", "paced") for task in ("a", "b", ALL)
    ]
    assert all(one.same == one.answers and one.tokens == 12 * one.answers for one in found)
    assert {one.answers for one in found if one.task == ALL} == {3}
    assert all(one.speed == 1 and one.per_pass == 1 for one in found if one.setting == PLAIN)


def test_answers_are_as_long_as_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that plain decoding ends, and whose text a contender leaves, so that it would never end."""
    bench = Bench.load(str(tiny.checkpoint()))
    asked = {"a": tiny.prompts(20)}
    (usual,) = tiny.plain(asked["a"], tiny.greedy(12))
    end = max(usual.index(token) for token in set(usual))  # comes for the first time, after others
    monkeypatch.setattr(bench.model, "config", replace(bench.model.config, eos=(usual[end],)))
    half = {"skip": "unified:speedup=2,weights=none"}
    run = Drafting(bench, [BenchSetting("half", half), BenchSetting("copies", {"draft": "prompt_lookup"})], LIMITS, 12)
    list(run.run(run.start(asked, 1), asked, 1, 1))
    answers = {heat.setting: heat.answers[0] for heat in run.heats}
    assert answers[PLAIN] == answers["copies"] == usual[: end + 1]
    assert usual[end] not in answers["half"] and len(answers["half"]) == end + 1 > 1


def test_a_question_too_long_is_refused_before_anything_runs() -> None:
    bench = Bench.load(str(tiny.checkpoint()))
    context = bench.model.config.max_positions
    run = Drafting(bench, [], Limits(64 << 20, 1, True), 12)
    with pytest.raises(UserError, match="lower --tokens"):
        run.start({"a": [[1] * (context - 11)]}, 1)


def test_every_drafter_is_a_contender() -> None:
    assert {"prompt_lookup", "draft_model", "paced", "token_recycling"} <= {one.name for one in drafters()}


def heat(setting: str, task: str, seconds: float, tokens: int, **work: int) -> Heat:
    return Heat(setting, task, 1, 0, seconds, tokens - 1, Counters(**work), [[3] * tokens])


def test_tables() -> None:
    """Speeds are ratios of tokens per second; over all it is the tasks' geometric mean; counters are per token."""
    heats = [
        heat(PLAIN, "a", 2.0, 10, forwards=10, rows=20),
        heat("x", "a", 0.5, 10, forwards=4, rows=30, drafted=12, accepted=6),
        heat(PLAIN, "b", 1.0, 30, forwards=30, rows=40),
        heat("x", "b", 1.0, 30, forwards=16, rows=60, drafted=8, accepted=4),
    ]
    found = results(heats)
    assert speeds(found, 1) == (
        ["drafter", ALL, "a", "b", "tokens a pass"],
        [["x", "2.00", "4.00", "1.00", "1.00"]],
    )
    header, rows = work(found, 1)
    assert rows[1] == ["x", "1.00", "50%", "0.500", "2.25", "0.0", "0.00", "2 of 2"] and len(header) == len(rows[0])
    assert lengths(heats) == [
        "a: 1 answers of 10 tokens on average, 0 end in a loop",
        "b: 1 answers of 30 tokens on average, 1 end in a loop",
    ]
    text = section(heats, found, "## M", ["not run: y"])
    assert "| x | 2.00 | 4.00 | 1.00 | 1.00 |" in text and "- not run: y" in text and text.startswith("## M")


def test_a_disturbed_round_does_not_count() -> None:
    """Of each question the round of median time; different questions are summed."""
    rounds = [
        replace(heat(setting, "a", seconds, 10), question=question, number=2 * turn + question)
        for setting, question, times in [
            (PLAIN, 0, (1, 1, 9)),
            (PLAIN, 1, (3, 30, 3)),
            ("x", 0, (7, 1, 1)),
            ("x", 1, (1, 1, 1)),
        ]
        for turn, seconds in enumerate(times)
    ]
    assert [one.speed for one in results(rounds) if one.task == "a"] == [1, 2]
