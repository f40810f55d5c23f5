"""Grouped experts against the plain sum over experts, row by row."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.nn import functional as F

from phasewise.model.mlp import MLP, MoE
from phasewise.ops.linear import Linear

EXPERTS, WIDTH, INNER = 7, 12, 20


class Counts:
    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def count(self, counter: str, n: int) -> None:
        self.seen[counter] += n


def make(top_k: int, renormalise: bool) -> MoE:
    torch.manual_seed(0)
    experts = tuple(
        MLP(Linear(torch.randn(2 * INNER, WIDTH)), Linear(torch.randn(WIDTH, INNER)), "silu") for _ in range(EXPERTS)
    )
    return MoE(Linear(torch.randn(EXPERTS, WIDTH)), experts, top_k, renormalise)


def by_hand(moe: MoE, row: torch.Tensor) -> tuple[torch.Tensor, set[int]]:
    p = F.softmax(moe.router.dense() @ row, 0)
    chosen = p.argsort(descending=True)[: moe.top_k].tolist()
    total = sum(p[e] for e in chosen) if moe.renormalise else 1.0
    out = torch.zeros(WIDTH)
    for e in chosen:
        gate, up = (moe.experts[e].gate_up.dense() @ row).split(INNER)
        out += p[e] / total * (moe.experts[e].down.dense() @ (F.silu(gate) * up))
    return out, set(chosen)


@pytest.mark.parametrize(
    ("top_k", "renormalise", "rows"), [(1, False, 2), (3, True, 1), (3, False, 31), (EXPERTS, True, 31)]
)
def test_sum_over_chosen_experts(top_k: int, renormalise: bool, rows: int) -> None:
    moe, counts = make(top_k, renormalise), Counts()
    x, add = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)
    expected = [by_hand(moe, row) for row in x]
    want = torch.stack([out for out, _ in expected])
    torch.testing.assert_close(moe(x, counts), want, atol=1e-4, rtol=1e-4)
    loads = len(set().union(*(chosen for _, chosen in expected)))
    assert counts.seen == {"expert_loads": loads}
    before = add.clone()
    torch.testing.assert_close(moe(x, counts, add), want + add, atol=1e-4, rtol=1e-4)
    assert torch.equal(add, before)


def test_a_row_is_not_moved_by_its_mates() -> None:
    moe = make(2, True)
    x = torch.randn(16, WIDTH)
    together = moe(x, Counts())
    for i in range(16):
        torch.testing.assert_close(moe(x[i : i + 1], Counts())[0], together[i], atol=1e-5, rtol=1e-5)


def test_no_rows() -> None:
    counts = Counts()
    assert make(2, True)(torch.zeros(0, WIDTH), counts).shape == (0, WIDTH)
    assert counts.seen["expert_loads"] == 0
