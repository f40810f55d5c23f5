"""Where training computes: batches of every shape are brought there whole, and are the same whoever makes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from phasewise.train.dense import TokenBlock
from phasewise.train.device import batches, made_ahead, moved
from tests.train import tiny

AWAY = torch.device("meta")  # a device that every machine has


class Pair(NamedTuple):
    rows: Tensor
    seed: int


@dataclass(frozen=True)
class Held:
    parts: list[Pair]
    more: tuple[Tensor, str]


def test_every_tensor_is_moved_and_all_else_stays() -> None:
    held = moved(Held([Pair(torch.zeros(2), 7)], (torch.ones(3, dtype=torch.bool), "word")), AWAY)
    assert isinstance(held, Held) and isinstance(held.parts[0], Pair)
    assert held.parts[0].rows.device == held.more[0].device == AWAY
    assert (held.parts[0].seed, held.more[1], held.more[0].dtype) == (7, "word", torch.bool)


def test_batches_begin_where_a_run_stands() -> None:
    data, stage = tiny.mixture(), tiny.STAGES[0]
    found = list(batches(data, [stage] * 5, 3, torch.device("cpu")))
    assert len(found) == 2
    for step, batch in zip((3, 4), found, strict=True):
        assert same(batch, data.step(step, stage))


def test_other_processes_make_the_same_batches_in_the_same_order() -> None:
    data, stage = tiny.mixture(), tiny.STAGES[0]
    for step, batch in zip((2, 3, 4), made_ahead(data, [stage] * 5, 2, makers=2), strict=True):
        assert same(batch, data.step(step, stage))


def test_beside_a_device_they_are_made_ahead_and_brought_there() -> None:
    (source, tasks), _ = batches(tiny.mixture(), [tiny.STAGES[0]] * 5, 3, AWAY)
    assert source and tasks and {part.device for block in (*source, *tasks) for part in block} == {AWAY}


def same(one: tuple[list[TokenBlock], list[TokenBlock]], other: tuple[list[TokenBlock], list[TokenBlock]]) -> bool:
    pairs = [(a, b) for mine, yours in zip(one, other, strict=True) for a, b in zip(mine, yours, strict=True)]
    return bool(pairs) and all(torch.equal(x, y) for a, b in pairs for x, y in zip(a, b, strict=True))


def test_what_fails_while_batches_are_made_is_told() -> None:
    class Broken:
        def step(self, step: int, stage: Any) -> Any:
            raise ValueError("no such step")

    with pytest.raises(ValueError, match="no such step"):
        list(batches(Broken(), [tiny.STAGES[0]], 0, AWAY))
