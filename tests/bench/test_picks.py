"""What layers would pick for themselves, against picks made one by one."""

from __future__ import annotations

import pytest
import torch

from phasewise.bench.picks import found, overlaps
from tests import tiny
from tests.kv.harness import Recorder, Walk


def test_overlaps_are_those_of_picks_made_one_by_one() -> None:
    model, text, k, rows = tiny.model(), tiny.prompts(60)[0], 7, 20
    seen = Recorder(60)
    walk = Walk(model, text, attend=seen)
    walk.plain = walk.phase
    walk.feed(text)
    picks: dict[tuple[int, int, int], set[int]] = {}
    for layer, weights in seen.seen.items():
        for head in range(2):
            most = weights[2 * head : 2 * head + 2].amax(0)  # [T, T]
            for row in range(60 - rows, 60):
                others = [(-float(most[row, at]), at) for at in range(row)]
                picks[layer, head, row] = {at for _, at in sorted(others)[:k]}
    got = overlaps(model, [text], k, rows)
    for a in range(4):
        for b in range(4):
            pairs = [(picks[a, h, r], picks[b, h, r]) for h in range(2) for r in range(60 - rows, 60)]
            want = sum(len(x & y) / len(y) for x, y in pairs) / len(pairs)
            assert float(got[a, b]) == pytest.approx(want, abs=1e-4)
    assert torch.allclose(got.diagonal(), torch.ones(4))


def test_what_layers_get_of_their_own_picks() -> None:
    shared = torch.tensor([[0.0, 0.1, 0.2, 0.3], [0.0, 0.0, 0.5, 0.6], [0.0, 0.0, 0.0, 0.9], [0.0] * 4])
    assert found(shared, 0, None) == pytest.approx(0.2)
    assert found(shared, 0, 2) == pytest.approx((0.1 + 0.9) / 2)
    assert found(shared, 1, 2) == pytest.approx(0.9)
