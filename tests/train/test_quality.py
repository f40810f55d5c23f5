"""The quality table measures what it says, with honest intervals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random

import pytest

from phasewise.bench.quality import ALL, TASKS, Row, TextCodec, evaluate, mean, next_line, proportion, table
from phasewise.errors import UserError
from phasewise.known.corpus import sources
from phasewise.load import model_path
from phasewise.train.tasks import example
from phasewise.train.tokenizer import write
from tests.train import tiny


@pytest.fixture
def text(tmp_path: Path) -> TextCodec:
    write(tiny.tokenizer(), tmp_path, 2048)
    return TextCodec.load(tmp_path)


def test_a_model_that_knows_the_answers_scores_one_and_a_mute_one_zero(text: TextCodec) -> None:
    rng = Random("7 sort")
    answers = {tuple(text.chat(item.messages)): item.answer for item in (example("sort", rng, 128) for _ in range(20))}

    def oracle(prompts: list[list[int]], room: int) -> list[list[int]]:
        replies = [text.encode(answers[tuple(prompt)] + "<|im_end|>") for prompt in prompts]
        assert all(len(reply) <= room for reply in replies)
        return replies

    right = evaluate(oracle, lambda ids: 0.0, text, tasks=["sort"], examples=20, seed=7)[0]
    assert (right.value, right.n, right.high) == (1.0, 20, 1.0)
    mute = evaluate(lambda prompts, room: [[] for _ in prompts], lambda ids: 0.0, text, tasks=["sort"], seed=7)[0]
    assert (mute.value, mute.low) == (0.0, 0.0)
    assert mute.n == 100


def test_prompts_and_answers_fit_the_context_in_pockets_tokens() -> None:
    lengths: list[int] = []

    def measure(prompts: list[list[int]], room: int) -> list[list[int]]:
        lengths.extend(len(prompt) + room for prompt in prompts)
        return [[] for _ in prompts]

    evaluate(measure, lambda ids: 0.0, TextCodec.load(Path(model_path("pocket"))), tasks=TASKS, examples=2)
    assert len(lengths) == 2 * len(TASKS)
    assert max(lengths) <= 2048


@pytest.mark.thorough
def test_next_line_accepts_the_true_line_only(text: TextCodec) -> None:
    files = list(sources(held_out=True).values())
    everything = "\n".join(files)

    def cheat(prompts: list[list[int]], room: int) -> list[list[int]]:
        found = (everything.partition(text.decode(prompt))[2] for prompt in prompts)
        return [text.encode("\n" + after.lstrip("\n").partition("\n")[0]) for after in found]

    row = next_line(cheat, text, Random(0), 40).row
    assert row.value > 0.9  # a prompt cut inside a character or repeated elsewhere may mislead the cheat
    wrong = next_line(lambda prompts, room: [text.encode("nothing") for _ in prompts], text, Random(0), 40)
    assert wrong.row.value == sum(wrong.values) == 0


def test_code_loss_is_reported_per_token_and_per_byte(text: TextCodec) -> None:
    tokens, size = evaluate(lambda prompts, room: [], lambda ids: math.log(2), text, tasks=["code"], examples=10)
    assert (tokens.unit, size.unit) == ("nats/token", "bits/byte")
    assert tokens.value == pytest.approx(math.log(2))
    assert 0.1 < size.value < 1.0  # one bit per token of more than one byte


def test_wilson_interval_and_mean_interval() -> None:
    row = proportion("x", 90, 100)
    assert (row.low, row.high) == (pytest.approx(0.8256, abs=1e-3), pytest.approx(0.9448, abs=1e-3))
    assert mean("x", "nats/token", [1.0, 3.0]).low == pytest.approx(2 - 1.96)


def test_unknown_rows_are_named(text: TextCodec) -> None:
    with pytest.raises(UserError, match="'sorting'.*Did you mean sort"):
        evaluate(lambda prompts, room: [], lambda ids: 0.0, text, tasks=["sorting"])
    assert len(set(ALL)) == len(ALL)


def test_the_table_shows_every_row() -> None:
    shown = table([Row("copy", "exact", 100, 0.9, 0.8256, 0.9448), Row("code", "nats/token", 5, 2.5, 2.4, 2.6)])
    assert "| copy | 90.0% exact | 82.6% to 94.5% | 100 |" in shown
    assert "| code | 2.500 nats/token | 2.400 to 2.600 | 5 |" in shown
    assert json.dumps(shown)
