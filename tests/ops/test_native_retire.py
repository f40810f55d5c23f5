"""Scores after rows that were weighed, natively, against one slot after another, for every instruction set here."""

from __future__ import annotations

from array import array

import pytest
import torch
from torch import Tensor

from phasewise.ops import native
from phasewise.ops.native import weighed
from phasewise.ops.native.weighed import Ranking, Retiring, Weighed
from tests.ops.targets import EACH, running

GONE = float("-inf")


def plainly(scores: Tensor, weights: Tensor, how: Ranking) -> Tensor:
    """The scores [layers, h, n] after a row that gave `weights` [layers, H, n], itself the last."""
    got = weights
    if how.shared:
        got = weights[:, :1].clone()
        for head in range(1, weights.shape[1]):
            got = got + weights[:, head : head + 1]
        got = got / how.shared
    before = torch.cat((scores, torch.zeros_like(got[:, :, :1])), -1)
    after = before + got if how.sums else got.masked_fill(before == GONE, GONE)
    for own in after.flatten(0, 1):
        older = max(0, len(own) - how.recent)
        while int((own > GONE).sum()) > how.most:
            rivals = [slot for slot in range(older) if own[slot] > GONE]
            if not rivals:
                break
            own[min(rivals, key=lambda slot: (float(own[slot]), -slot))] = GONE
    return after


@pytest.mark.parametrize("target", EACH)
@pytest.mark.parametrize("how", [
    Ranking(40, 0, True, 0), Ranking(40, 7, True, 0), Ranking(40, 0, False, 6), Ranking(40, 33, False, 0),
    Ranking(40, 40, True, 6), Ranking(1000, 5, True, 0), Ranking(2, 30, True, 0), Ranking(1, 0, False, 0),
])  # fmt: skip
def test_the_lowest_leave(how: Ranking, target: str) -> None:
    """Row after row, with scores that are often equal, until there are few and many that are gone."""
    heads = 3
    torch.manual_seed(how.recent)
    layers, kept, first = 3, 1 if how.shared else heads, 38
    scores = torch.randint(0, 9, (layers, kept, first)) / 8.0
    scores[torch.rand(scores.shape) < 0.1] = GONE
    want, room = scores.clone(), Weighed(layers, kept, (heads, 6), first + 40)
    state = torch.full((layers, kept, room.room), torch.nan)
    state[:, :, :first], room.gone[:, :, :first] = scores, scores == GONE
    with running(target, weighed):
        retire = Retiring(state, room, how)
        for n in range(first + 1, first + 40):
            room.weights[:, :, :n] = torch.randint(0, 5, (layers, heads, n)) / 8.0
            want = plainly(want, room.weights[:, :, :n], how)
            retire(n)
            assert torch.equal(state[:, :, :n], want)
            assert torch.equal(room.gone[:, :, :n].bool(), want == GONE) and not room.gone[:, :, n:].any()
    left = (want > GONE).sum(-1)
    assert int(left.min()) == int(left.max()) == max(how.most, how.recent) or how.most == 1000


@pytest.mark.parametrize("target", EACH)
@pytest.mark.parametrize(
    ("shared", "sums", "recent", "mean"),
    [(0, True, 0, False), (0, True, 7, True), (0, False, 3, False), (6, True, 2, True)],
)
def test_heads_of_unequally_many_slots(shared: int, sums: bool, recent: int, mean: bool, target: str) -> None:
    """Each has a budget of its own, and none is touched by what lies beside it; with `mean` ranks are scores over how
    many rows have come since."""
    torch.manual_seed(recent)
    layers, heads, steps = 3, 3, 30
    kept = 1 if shared else heads
    counts = [0, 70, 1, 64, 5, 33, 17, 2, 69][: layers * kept]
    most = [int(torch.randint(1, 40, ())) for _ in counts]
    longest, first = max(counts), 100
    room = Weighed(layers, kept, (heads, 6), longest + steps, [longest - count for count in counts])
    assert room.room >= longest + steps and len(room.gone) == sum(room.rooms)
    state, lines = torch.full((len(room.gone),), torch.nan), [0, *torch.tensor(room.rooms).cumsum(0).tolist()]
    want = [torch.randint(0, 9, (count,)) / 8.0 for count in counts]
    places = [torch.arange(first)[torch.randperm(first)[:count].sort().values] for count in counts]
    for at, own in zip(lines, want):
        state[at : at + len(own)] = own
    how = Ranking(most, recent, sums, shared)
    with running(target, weighed):
        retire = Retiring(state, room, how)
        for row in range(steps):
            n, here = longest + row + 1, first + row
            places = [torch.cat((own, torch.tensor([here]))) for own in places]
            said = array("q")
            for own in places:
                for _ in range(room.share):
                    said.extend((own.data_ptr() - 8 * (n - len(own)), 0))
            if row == steps - 1:  # or they are consecutive, and nobody says them
                places[-1] = torch.arange(here + 1 - len(places[-1]), here + 1)
                said = said[: -2 * room.share] + array("q", (0, n - 1 - here)) * room.share
            room.weights[:] = torch.randint(0, 5, room.weights.shape) / 8.0
            got = []
            for at, space, own in zip(lines, room.rooms, want):
                each = room.weights[at * room.share : (at + space) * room.share].view(room.share, space)
                got.append(each[:, : len(own) + 1].clone())
            retire(n, here, said.buffer_info()[0] if mean else 0)
            want = [after(*each, how, mean) for each in zip(want, got, most, places, strict=True)]
            for at, own in zip(lines, want):
                assert torch.equal(state[at : at + len(own)], own)
                assert torch.equal(room.gone[at : at + len(own)].bool(), own == GONE)
            assert int(room.gone.sum()) == sum(int((own == GONE).sum()) for own in want)
    assert all(int((own > GONE).sum()) == max(keep, recent) for own, keep in zip(want, most) if len(own) > keep)


def after(before: Tensor, weights: Tensor, most: int, places: Tensor, how: Ranking, mean: bool) -> Tensor:
    """The scores of one head, of slots at these places, after a row of `weights` [shared, n]."""
    got = weights[0]
    for each in weights[1:]:
        got = got + each
    got = got / how.shared if how.shared else got
    own = torch.cat((before, torch.zeros(1)))
    own = own + got if how.sums else got.masked_fill(own == GONE, GONE)
    ranks = own / (places[-1] + 1 - places) if mean else own
    while int((own > GONE).sum()) > most:
        rivals = [slot for slot in range(max(0, len(own) - how.recent)) if own[slot] > GONE]
        if not rivals:
            break
        own[min(rivals, key=lambda slot: (float(ranks[slot]), -slot))] = GONE
    return own


def test_threads_change_no_bit() -> None:
    torch.manual_seed(1)
    first, before, found = 3000, torch.get_num_threads(), []
    scores, weights = torch.rand(8, 5, first), torch.rand(8, 5, first + 1)
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            room = Weighed(8, 5, (5, 10), first + 1)
            state = torch.zeros(room.weights.shape)
            state[:, :, :first], room.weights[:, :, : first + 1] = scores, weights
            Retiring(state, room, Ranking(2990, 9, True, 0))(first + 1)
            found.append(state[:, :, : first + 1])  # what lies behind was never written
    finally:
        torch.set_num_threads(before)
    assert int((found[0] == GONE).sum()) == 8 * 5 * 11
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


if native.library() is None:
    pytestmark = pytest.mark.skip(reason="no native kernels here")
