"""The largest attention score is the one that attention itself computes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from phasewise.train import dense
from phasewise.train.dense import TokenBlock
from phasewise.train.saturation import largest_score
from tests.train.test_dense import SMALL, awake


def test_the_largest_score_is_that_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, seen = awake(SMALL), list[float]()

    def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is None
        scores = (q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])).tril()
        seen.append(float(scores.abs().max()))
        hidden = torch.full(scores.shape[2:], -math.inf).triu(1)
        return torch.as_tensor((scores + hidden).softmax(-1) @ v)

    monkeypatch.setattr(dense, "_plain", plain)
    ids = torch.randint(0, 300, (2, 20))
    block = TokenBlock.of(ids, ids)
    with torch.no_grad():
        model.hidden([block])
    each, (most, layer) = list(seen), max((value, at) for at, value in enumerate(seen))
    assert len(each) == SMALL.num_hidden_layers
    assert largest_score(model, block) == pytest.approx(most, rel=1e-5)
    with torch.no_grad():
        model.layers[layer].self_attn.q_proj.weight.mul_(10)  # type: ignore[union-attr, operator]
    assert largest_score(model, block) >= 9 * most
