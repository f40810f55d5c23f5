"""Muon in stacks: torch's own step, and singular values near one."""

from __future__ import annotations

import pytest
import torch

from phasewise.train.muon import Muon, orthogonal

SHAPES = [(32, 32), (16, 32), (48, 32), (32, 48), (16, 32), (48, 32)]
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def test_steps_are_torchs_own() -> None:
    torch.manual_seed(0)
    theirs = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    ours = [torch.nn.Parameter(each.detach().clone()) for each in theirs]
    options = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    plain, stacked = torch.optim.Muon(theirs, **options), Muon(ours, torch.float32, **options)
    for _ in range(3):
        for one, other in zip(theirs, ours, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        plain.step()
        stacked.step()
    for one, other in zip(theirs, ours, strict=True):
        assert float((one - other).detach().abs().max()) < 0.002  # torch rounds to bfloat16, a step moves by 0.02


def test_a_parameter_without_gradient_stays_and_states_are_torchs() -> None:
    torch.manual_seed(0)
    moved, still = (torch.nn.Parameter(torch.randn(8, 8)) for _ in range(2))
    before = still.detach().clone()
    moved.grad = torch.randn(8, 8)
    optimiser = Muon([moved, still], torch.float32, lr=0.02)
    optimiser.step()
    assert torch.equal(still, before) and still not in optimiser.state
    torch.optim.Muon([moved, still], lr=0.02).load_state_dict(optimiser.state_dict())


@pytest.mark.parametrize("shape", [(3, 24, 24), (2, 16, 40), (2, 40, 16)])
def test_directions_stay_and_lengths_become_alike(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    found = orthogonal(x, COEFFICIENTS, 5, 1e-7)
    u, values, v = torch.linalg.svd(x, full_matrices=False)
    inner = u.mT @ found @ v.mT
    assert float((inner - torch.diag_embed(inner.diagonal(dim1=1, dim2=2))).abs().max()) < 1e-6
    after = torch.linalg.svdvals(found)
    assert float(after.max()) < 1.35 and float(after[values / values.sum(1, keepdim=True) > 0.02].min()) > 0.3
