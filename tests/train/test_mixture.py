"""What a training step is made of."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from phasewise.train.mixture import BATCH, CURRICULUM, Stage, batched, size
from tests.train.tiny import mixture

COPIES = Stage(1.0, 256, 2048, code=0.0, long=0.0, copies=1.0)


def test_of_several_copies_the_one_with_most_tokens_is_taken() -> None:
    mix = mixture()

    def mean(stage: Stage) -> float:
        return sum(size(mix.short_row(Random(seed), stage)) for seed in range(300)) / 300

    assert mean(replace(COPIES, drawn=4)) > 1.2 * mean(COPIES)


def test_steps_grow_and_shrink_alike_but_never_below_a_row() -> None:
    assert batched(CURRICULUM, BATCH) == CURRICULUM
    double, tiny = batched(CURRICULUM, 2 * BATCH), batched(CURRICULUM, 256)
    assert [stage.step_tokens for stage in double] == [2 * stage.step_tokens for stage in CURRICULUM]
    assert [stage.step_tokens for stage in tiny] == [stage.row for stage in CURRICULUM]
    assert CURRICULUM[-1].until == 1.0 and [s.until for s in CURRICULUM] == sorted(s.until for s in CURRICULUM)


def test_the_same_seed_gives_the_same_rows() -> None:
    mix = mixture()
    rows = [[mix.short_row(Random(seed), replace(COPIES, drawn=n)) for seed in range(2)] for n in (1, 1, 2)]
    assert rows[0] == rows[1] != rows[2]
