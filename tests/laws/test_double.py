"""What is exact in the mathematics is exact to 1e-12 in double precision: chunks, layers and shared prefixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from phasewise.engine.engine import Engine
from phasewise.methods.sample.standard import Standard
from phasewise.request.request import Request
from phasewise.step import shared
from phasewise.verbs.method import Method
from phasewise.verbs.sample import Context, Dist, Sample
from phasewise.verbs.traits import Traits
from tests import double, tiny
from tests.laws.compare import build

PROMPT = tiny.prompts(90)[0]
N = 5
EXACT = {"rtol": 0.0, "atol": 1e-12}


@pytest.fixture(autouse=True)
def in_double(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    double.everything(monkeypatch)
    with torch.inference_mode():
        yield


@dataclass
class Noting(Method, Sample):
    """Keeps the logits of every token, by prompt and position."""

    plain: Sample
    seen: dict[tuple[tuple[int, ...], int], Tensor] = field(default_factory=dict)
    traits: ClassVar[Traits] = Traits("sample")

    def __call__(self, logits: Tensor, contexts: Sequence[Context]) -> Dist:
        for row, context in zip(logits, contexts):
            self.seen[tuple(context.request.prompt), context.position] = row.clone()
        return self.plain(logits, contexts)


def run(verbs: dict[str, str], prompts: Sequence[Sequence[int]]) -> tuple[Engine, dict[Any, Tensor], list[Tensor]]:
    """The engine, all logits, and the keys and values of every layer once the first request has its last token."""
    noting: list[Noting] = []

    def note(methods: dict[str, Any]) -> None:
        methods["sample"] = Noting(Standard())
        noting.append(methods["sample"])

    placed = build(verbs, note)
    assert isinstance(placed, Engine)
    first, *others = (Request(prompt, tiny.greedy(N)) for prompt in prompts)
    placed.add(first)
    while first.n_out < N - 1:
        placed.step()
    assert first.kv is not None
    planes = [plane for piece in first.kv.dump() for plane in piece["planes"]]
    tiny.finish(placed, [first])
    for request in others:
        placed.add(request)
    tiny.finish(placed, others)
    return placed, noting[0].seen, planes


def same(got: dict[Any, Tensor], want: dict[Any, Tensor]) -> None:
    assert got.keys() == want.keys() and all(row.dtype == torch.float64 for row in got.values())
    for key, row in got.items():
        torch.testing.assert_close(row, want[key], **EXACT)


@pytest.mark.parametrize(
    "schedule", ["sarathi:budget=1", "sarathi:budget=7", "splitfuse:budget=17", "layered:rows_per_group=7"]
)
@pytest.mark.parametrize("experts", [0, 4], ids=["dense", "experts"])
def test_parts_of_a_prompt_have_the_kv_and_logits_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, schedule: str, experts: int
) -> None:
    model = tiny.model(experts=experts)
    monkeypatch.setattr(tiny, "model", lambda: model)
    whole, logits, planes = run({"schedule": "prefill_first"}, [PROMPT])
    parts, got, ours = run({"schedule": schedule}, [PROMPT])
    assert parts.counters.steps > whole.counters.steps + 1
    same(got, logits)
    for mine, its in zip(ours, planes, strict=True):
        assert mine.dtype == torch.float64
        torch.testing.assert_close(mine, its, **EXACT)


def test_a_prefix_read_once_for_all_gives_the_logits_of_reading_it_alone() -> None:
    sharing = [PROMPT, *([*PROMPT[:64], *tail] for tail in tiny.prompts(5, 17, 3, seed=1))]
    dense, want, _ = run({}, sharing)
    shared, got, _ = run({"attend": "hydragen:rows=32"}, sharing)
    assert shared.counters.kv_bytes_read < dense.counters.kv_bytes_read
    same(got, want)


def test_three_levels_read_once_for_all_give_the_logits_of_reading_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some share 64 rows, some 128, some 192; one prompt is just what it shares with the others."""
    text = tiny.prompts(200)[0]
    tails = tiny.prompts(5, 17, 3, 8, 20, seed=1)
    sharing = [text, text[:192], *([*text[:at], *tail] for at, tail in zip((192, 192, 128, 128, 64), tails))]
    dense, want, _ = run({}, sharing)
    deepest, found = [-1], shared.in_common

    def commons(spans: Any, how: Any) -> Any:
        made = found(spans, how)
        deepest[0] = max([deepest[0], *(common.level for common in made)])
        return made

    monkeypatch.setattr("phasewise.step.reference.in_common", commons)
    party, got, _ = run({"attend": "hydragen:rows=32"}, sharing)
    assert deepest[0] == 2 and party.counters.kv_bytes_read < dense.counters.kv_bytes_read
    same(got, want)


def test_single_precision_would_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "float", lambda tensor: tensor.to(torch.float32))
    _, want, _ = run({"schedule": "prefill_first"}, [PROMPT])
    _, got, _ = run({"schedule": "sarathi:budget=7"}, [PROMPT])
    with pytest.raises(AssertionError):
        same(got, want)
