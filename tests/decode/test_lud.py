"""Lexical unit decoding against its slow twin: which tokens a step emits, and what it computes."""

from __future__ import annotations

import pytest
import torch

from phasewise.errors import UserError
from phasewise.methods.decode.lud import LUD
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.sample import Purpose, pick, uniform
from tests import oracle, tiny

N, PAD = 24, tiny.VOCAB - 1


def twin(prompt: list[int], pads: int, beta: float, temperature: float = 0.0, seed: int = 0) -> list[list[int]]:
    """The units of a text, each from a pass over the whole of it with pads behind."""

    def drawn(row: torch.Tensor, position: int) -> int:
        if not temperature:
            return int(row.argmax())
        return pick((row / temperature).softmax(-1), uniform(seed, position, Purpose.SAMPLE))

    text = [*prompt, drawn(oracle.logits(tiny.checkpoint(), prompt)[-1], len(prompt))]
    units = [text[-1:]]
    while (left := len(prompt) + N - len(text)) > 0:
        behind = min(pads, left - 1)
        rows = oracle.logits(tiny.checkpoint(), [*text, *[PAD] * behind])[len(text) - 1 :]
        unit = [drawn(rows[0], len(text))]
        for row in rows[1:]:
            token = drawn(row, len(text) + len(unit))
            if float(row.softmax(-1).max()) < beta or token == unit[-1]:
                break
            unit.append(token)
        text += unit
        units.append(unit)
    return units


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("pads", "beta"), [(3, 0.4), (1, 0.3), (5, 0.0), (3, 1.1)])
def test_equals_the_uncached_twin(pads: int, beta: float, temperature: float) -> None:
    prompts = tiny.prompts(12, 3, 30)
    params = Params(max_tokens=N, ignore_eos=True, temperature=temperature, seed=5)
    placed = tiny.engine({"decode": f"lud:pads={pads},beta={beta}"})
    requests = tiny.run(placed, prompts, params)
    units = [twin(prompt, pads, beta, temperature, 5) for prompt in prompts]
    for request, its in zip(requests, units):
        assert request.out == [token for unit in its for token in unit]
    longest = max(len(unit) for its in units for unit in its)
    assert longest == 1 if beta > 1 else longest > 1, "nothing but single tokens"


@pytest.mark.parametrize("schedule", ["sarathi:budget=3", "splitfuse:budget=5"])
def test_load_changes_no_token(schedule: str) -> None:
    """A request has its pads however few rows it is granted, and tokens that were computed before are a slice."""
    prompts = tiny.prompts(12, 3, 30)
    placed = tiny.engine({"decode": "lud:pads=3,beta=0.4", "schedule": schedule})
    requests = [Request(prompt, tiny.greedy(N)) for prompt in prompts]
    for request in requests:
        placed.add(request)
    for step in range(60):
        if step % 7 == 6:
            for request in placed.running[1:]:
                placed.room.preempt(request)
        placed.step()
    tiny.finish(placed, requests)
    assert placed.counters.preemptions > 0
    for request, prompt in zip(requests, prompts):
        assert request.out == [token for unit in twin(prompt, 3, 0.4) for token in unit]


def test_what_a_lone_request_costs() -> None:
    """A step brings the unit before and its pads, of which no row stays: none is ever computed twice."""
    (prompt,), pads = tiny.prompts(20), 3
    placed = tiny.engine({"decode": f"lud:pads={pads},beta=0.4"})
    tiny.run(placed, [prompt], tiny.greedy(N))
    units, rows, said = twin(prompt, pads, 0.4), len(prompt), 0
    for unit in units[:-1]:
        said += len(unit)
        rows += len(unit) + min(pads, N - said - 1)
    assert placed.counters.forwards == len(units)
    assert placed.counters.rows == rows
    assert placed.counters.accepted == sum(map(len, units)) - len(units)


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"pads": 16}, "pads=16 must be from 0"),
        ({"pads": -1}, "pads=-1"),
        ({"beta": -0.1}, "beta=-0.1 must be at least"),
    ],
)
def test_knobs_are_refused_by_name(knobs: dict[str, float], says: str) -> None:
    with pytest.raises(UserError, match=says):
        LUD(**knobs)  # type: ignore[arg-type]


def test_a_pad_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match=r"pad=64 is outside the vocabulary: it must lie in \[0, 64\)"):
        tiny.engine({"decode": "lud:pad=64"})
