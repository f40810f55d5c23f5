"""Rows chosen by votes for what stands for their keys, against brute force, on every instruction set there is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phasewise.methods.store.int8 import Int8
from phasewise.ops import native
from phasewise.ops.native import choice
from phasewise.ops.native.abi import LayerChoiceStruct
from phasewise.ops.native.choice import CHOSEN, MOST_VOTING, PEAK, PROMISE, SHARE, Ballot, Candidates, choose
from tests import seeds
from tests.ops.targets import EACH

RULES = {"promise": PROMISE, "share": SHARE, "peak": PEAK}


@pytest.fixture(params=EACH)
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    patch, kernels = pytest.MonkeyPatch(), native.load(request.param)
    native._share_threads(kernels)  # type: ignore[arg-type]
    for module in (native, choice):
        patch.setattr(module, "library", lambda: kernels)
    yield request.param
    patch.undo()


def layer(
    vectors: Tensor | None, scale: float, channels: Tensor | None = None, turn: Tensor | None = None
) -> LayerChoiceStruct:
    head, turned = 0 if vectors is None else vectors.stride(0), 0 if turn is None else turn.shape[1]
    return LayerChoiceStruct(
        way=CHOSEN, low=vectors, head=head, channels=channels, turn=turn, turned=turned, line=1, scale=scale
    )


def votes(q: Tensor, vectors: Tensor, among: Candidates, scale: float) -> Tensor:
    """Of every candidate, float64 [H | 1, units]: q [Hq, W] and vectors [H, N, W] as they meet."""
    heads = len(vectors)
    logits = (q.double().view(heads, -1, q.shape[1]) @ vectors.double().mT)[:, :, among.begin : among.end] * scale
    if among.joint:
        logits = logits.flatten(0, 1)[None]
    shares = logits if among.rule == PROMISE else logits.log_softmax(-1)
    each = shares.logsumexp(1) if among.rule == SHARE else shares.amax(1)
    wide = torch.full((len(each), among.units), float("-inf"), dtype=torch.float64)
    for u in range(among.units):
        first = max(among.at + u * among.each - among.before, among.begin) - among.begin
        last = min(among.at + (u + 1) * among.each, among.end) - among.begin
        if first < last:
            wide[:, u] = each[:, first:last].amax(1)
    return wide


def check(slots: Tensor, found: Tensor, among: Candidates, n: int) -> None:
    """Lists [H, 1, S] are in order, hold what is read in any case, and nothing is left out for what has fewer votes (as
    far as float32 can tell)."""
    assert slots.shape[2] == among.listed(n)
    for head, own in enumerate(slots[:, 0].tolist()):
        assert own == sorted(set(own))
        after = among.first + among.units * among.size
        assert own[: among.first] == list(range(among.first))
        assert own[len(own) - (n - after) :] == list(range(after, n))
        middle = own[among.first : len(own) - (n - after)]
        units = [slot // among.size for slot in (each - among.first for each in middle[:: among.size])]
        whole = [among.first + u * among.size + j for u in units for j in range(among.size)]
        assert middle == whole and len(units) == among.chosen
        values = found[0 if among.joint else head]
        rest = [u for u in range(among.units) if u not in set(units)]
        if units and rest:
            assert float(values[units].min()) >= float(values[rest].max()) - 1e-3


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize(
    ("heads", "group", "dim", "n", "rule"),
    seeds.some([(*shape, n, rule) for shape in ((3, 3, 64), (1, 1, 16), (2, 4, 20), (2, 1, 128))
                for n in (40, 700, 2100) for rule in RULES], 8, "votes"),
)  # fmt: skip
def test_the_rows_of_most_votes(rule: str, heads: int, group: int, dim: int, n: int) -> None:
    """Keys as they lie, bfloat16 and int8; apart and together."""
    gen = torch.Generator().manual_seed(n)
    q = torch.randn(1, heads * group, dim, generator=gen).bfloat16()
    k = torch.randn(heads, n, dim, generator=gen).bfloat16()
    format = Int8().format()
    planes = format.encode(k, k)
    ballots, wanted = list[Ballot](), list[tuple[Tensor, Candidates]]()
    for joint in (False, True):
        among = Candidates(3, n - 3 - 5, 1, n // 5, RULES[rule], joint, 3, n - 5, at=3, width=dim)
        for keys, scale in ((k, None), (planes[0], planes[1])):
            ballots.append(Ballot(q, keys, scale, among, among.end, layer(None, 0.3)))
            stand = k if scale is None else format.decode(planes, torch.bfloat16)[0]
            wanted.append((votes(q[0], stand, among, 0.3), among))
    assert all(choice.takes(ballot) for ballot in ballots)
    together = choose(ballots)
    for ballot, slots, (found, among) in zip(ballots, together, wanted, strict=True):
        check(slots, found, among, n)
        assert torch.equal(choose([ballot])[0], slots)


@pytest.mark.usefixtures("target")
def test_channels_are_taken_and_kept() -> None:
    """Missing vectors are made, and no others are written."""
    heads, group, dim, n, width = 2, 3, 64, 1500, 16
    gen = torch.Generator().manual_seed(0)
    q, k = (
        torch.randn(1, heads * group, dim, generator=gen).bfloat16(),
        torch.randn(heads, n, dim, generator=gen).bfloat16(),
    )
    channels = torch.stack([torch.randperm(dim, generator=gen)[:width].sort().values for _ in range(heads)]).int()
    true = k.gather(2, channels.long()[:, None].expand(-1, n, -1))
    among = Candidates(0, n - 1, 1, 77, SHARE, False, 0, n - 1, width=width)
    stands = torch.full((heads, n + 9, width), float("nan"), dtype=torch.bfloat16)
    stands[:, :600] = true[:, :600]
    (slots,) = choose([Ballot(q, k, None, among, 600, layer(stands, 0.125, channels))])
    assert torch.equal(stands[:, : n - 1], true[:, : n - 1]) and bool(stands[:, n - 1 :].isnan().all())
    rows = q[0].view(heads, group, dim).gather(2, channels.long()[:, None].expand(-1, group, -1)).flatten(0, 1)
    check(slots, votes(rows, true, among, 0.125), among, n)


@pytest.mark.usefixtures("target")
@settings(max_examples=40)
@given(
    stride=st.integers(1, 16), parts=st.integers(1, 3), each=st.integers(1, 6), before=st.integers(0, 2),
    first=st.integers(0, 3), chosen=st.integers(0, 4), extra=st.integers(1, 90), rule=st.sampled_from([*range(3)]),
    joint=st.booleans(),
)  # fmt: skip
def test_blocks_of_the_best_means(
    stride: int, parts: int, each: int, before: int, first: int, chosen: int, extra: int, rule: int, joint: bool
) -> None:
    """Windows that overlap, blocks that take the best of several."""
    heads, group, dim, size = 2, 2, 16, stride * each
    units = chosen + 5
    n = (first + units) * size + extra
    gen = torch.Generator().manual_seed(n)
    q, k = (
        torch.randn(1, heads * group, dim, generator=gen).bfloat16(),
        torch.randn(heads, n, dim, generator=gen).bfloat16(),
    )
    end = max(n // stride - parts + 1, 0)
    if end <= first * each + 1:
        return
    among = Candidates(
        first * size, units, size, chosen, rule, joint, 0, end, first * each, each, before, stride, parts, dim
    )  # fmt: skip
    windows = [k[:, i * stride : (i + parts) * stride].float() for i in range(end)]
    true = torch.stack([window.mean(1) for window in windows], 1).bfloat16()
    stands = torch.empty(heads, end, dim, dtype=torch.bfloat16)
    (slots,) = choose([Ballot(q, k, None, among, 0, layer(stands, 0.5))])
    torch.testing.assert_close(stands, true, atol=1e-2, rtol=1e-2)
    check(slots, votes(q[0], stands, among, 0.5), among, n)


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("size", [20, 12])
def test_queries_are_turned(size: int) -> None:
    heads, dim, n = 2, 20, 300
    gen = torch.Generator().manual_seed(size)
    q, k = (
        torch.randn(1, heads * 2, dim, generator=gen).bfloat16(),
        torch.randn(heads, n, dim, generator=gen).bfloat16(),
    )
    angles = torch.randn(size // 2, generator=gen)
    turn = torch.stack((torch.cat((angles, angles)).cos(), torch.cat((-angles, angles)).sin()))
    near = q[..., :size].float()
    moved = (near * turn[0] + near.roll(size // 2, -1) * turn[1]).bfloat16()
    rows = torch.cat((moved, q[..., size:]), -1)[0]
    among = Candidates(0, n - 1, 1, 30, SHARE, False, 0, n - 1, width=dim)
    (slots,) = choose([Ballot(q, k, None, among, n - 1, layer(None, 0.5, turn=turn))])
    check(slots, votes(rows, k, among, 0.5), among, n)


@pytest.mark.usefixtures("target")
def test_of_equal_votes_the_earlier_and_what_is_no_number_is_read() -> None:
    q, k = torch.ones(1, 2, 16).bfloat16(), torch.ones(1, 100, 16).bfloat16()
    among = Candidates(2, 90, 1, 7, SHARE, False, 2, 92, at=2, width=16)
    (slots,) = choose([Ballot(q, k, None, among, 92, layer(None, 1.0))])
    assert slots[0, 0].tolist() == [*range(9), *range(92, 100)]
    k[0, 50] = float("nan")
    (slots,) = choose([Ballot(q, k, None, among._replace(rule=PROMISE), 92, layer(None, 1.0))])
    assert slots[0, 0].tolist() == [*range(8), 50, *range(92, 100)]


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize(("size", "joint"), [(1, True), (3, False)])
def test_votes_too_small_for_a_float_are_ranked(joint: bool, size: int) -> None:
    """Shares far below the smallest number, in more than one chunk: their logarithms differ."""
    heads, units, chosen = 2, 700, 200
    k = torch.zeros(heads, units * size + 1, 16)
    order = torch.randperm(units, generator=torch.Generator().manual_seed(size))
    k[:, :-1, 0] = (order * -4.0).repeat_interleave(size)
    q = torch.ones(1, heads * 3, 16) * 2
    vectors = k[:, :-1:size].bfloat16().contiguous()
    among = Candidates(0, units, size, chosen, SHARE, joint, 0, units, step=size, width=16)
    (slots,) = choose([Ballot(q.bfloat16(), k.bfloat16(), None, among, units, layer(vectors, 1.0))])
    best = order.argsort()[:chosen].sort().values.tolist()
    want = [unit * size + i for unit in best for i in range(size)] + [units * size]
    assert slots[:, 0].tolist() == [want] * heads


@pytest.mark.usefixtures("target")
def test_more_voters_than_there_is_room_for_are_refused() -> None:
    k, among = torch.zeros(2, 40, 16).bfloat16(), Candidates(0, 39, 1, 5, SHARE, False, 0, 39, width=16)
    for queries, fits in ((2 * MOST_VOTING, True), (2 * MOST_VOTING + 2, False)):
        ballot = Ballot(torch.zeros(1, queries, 16).bfloat16(), k, None, among, 39, layer(None, 1.0))
        assert choice.takes(ballot) is fits
        assert not choice.takes(ballot._replace(candidates=among._replace(joint=True)))
        if fits:
            assert choose([ballot])[0][0, 0].tolist() == [0, 1, 2, 3, 4, 39]
