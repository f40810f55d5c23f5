"""step.probe and step.trail: weights are those of the attention matrix, and states follow the rows that stayed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from phasewise.kv.format import Raw, RowFormat
from phasewise.methods.store.int8 import Int8
from phasewise.model.model import Model
from phasewise.ops import attention as ops
from phasewise.ops import native
from phasewise.request.request import Request
from phasewise.step.plan import AttentionPlan, Record
from phasewise.step.probe import logits, probe, received
from phasewise.step.read import FEW, Read
from phasewise.step.span import Span
from phasewise.step.trail import Trail, ends
from phasewise.verbs.evict import Evict
from tests import tiny
from tests.kv.harness import Masked, Recorder, Walk, sliding

TOKENS = tiny.prompts(30)[0]


class Watching(Evict):
    """Evicts nothing; `look` sees every read."""

    observes = 0

    def __init__(self, look: Callable[[Read], None]) -> None:
        self.look, self.trail = look, Trail("watching")
        self.stayed = self.trail.stayed

    def plan(self, span: Span) -> AttentionPlan:
        return AttentionPlan(record=Record(self.look))

    def due(self, request: Request) -> bool:
        return False

    def keep(self, request: Request, layer: int) -> None:
        return None


def matrix(model: Any) -> dict[int, Tensor]:
    """Attention probabilities [hq, L, L] by layer."""
    record = Recorder(len(TOKENS))
    one = Walk(model, TOKENS, attend=record)
    one.plain = one.phase
    one.feed(TOKENS)
    return record.seen


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("window", [None, 9])
def test_weights_are_the_attention_matrix(window: int | None, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels:
        monkeypatch.setattr("phasewise.ops.native.received.library", lambda: None)
    model = tiny.model() if window is None else sliding(window, 4)
    full, found = matrix(model), dict[int, list[Tensor]]()

    def look(read: Read) -> None:
        rows = read.q.shape[0]
        some = range(rows // 2, rows)
        before = read.step.counters.kv_bytes_read
        got = [probe(read, [rows - 1]), probe(read, some), received(read, some), received(read, range(rows))]
        entry = 2 * 12 * 4  # of one head: the keys of all slots count, once for each question
        assert read.step.counters.kv_bytes_read - before == 4 * 2 * read.part.size[1] * entry // 2
        at, n = read.span.positions, read.part.size[1]
        whole = full[read.layer].view(2, 2, 30, 30)[..., :n]
        for weights, want in zip(
            got,
            (whole[:, :, [at[-1]]], whole[:, :, at[rows // 2] : at[-1] + 1],
             whole[:, :, at[rows // 2] : at[-1] + 1].sum((1, 2)), whole[:, :, at[0] : at[-1] + 1].sum((1, 2))),
        ):  # fmt: skip
            torch.testing.assert_close(weights, want, atol=2e-5, rtol=1e-4)
        found.setdefault(read.layer, []).append(got[0])

    one = Walk(model, TOKENS, evict=Watching(look))
    for piece in (TOKENS[:17], TOKENS[17:25], TOKENS[25:]):
        one.feed(piece)
    assert [len(each) for each in found.values()] == [3] * 4


def test_weights_of_a_tree_are_those_of_its_paths() -> None:
    """Siblings, and what a view hides, get nothing."""
    full = matrix(tiny.model())
    wrong = [3 + (token + 5) % 60 for token in TOKENS]
    tree, parents, path = [TOKENS[20], wrong[21], TOKENS[21], wrong[22], TOKENS[22]], [-1, 0, 0, 2, 2], [0, 2, 4]
    seen: list[Tensor] = []

    def look(read: Read) -> None:
        if read.part.n == 20:
            got = probe(read, range(5))
            torch.testing.assert_close(got.sum(-1), torch.ones(got.shape[:3]))
            on_path = got[:, :, path][..., [*range(20), 20, 22, 24]]
            torch.testing.assert_close(on_path, full[read.layer].view(2, 2, 30, 30)[:, :, 20:23, :23],
                                       atol=2e-5, rtol=1e-4)  # fmt: skip
            read.view = Masked(lambda layer, head, q, k: k != 3).view(read)
            assert float(probe(read, range(5))[..., 3].abs().max()) == 0.0 < float(got[..., 3].max())
            assert float(logits(read, [4])[..., 3].abs().max()) > 0, "logits hide nothing"
            read.view = None
            seen.append(got)

    one = Walk(tiny.model(), TOKENS, evict=Watching(look))
    one.feed(TOKENS[:20])
    one.try_(tree, parents)
    assert len(seen) == 4


def test_the_state_of_the_last_row_that_stays_is_the_requests() -> None:
    trail = Trail("mine")

    def look(read: Read) -> None:
        before, (heads, n) = trail.before(read), read.part.size
        assert (before is None) == (read.part.n == 0) and (before is None or before.shape == (heads, read.part.n))
        rows = read.q.shape[0]
        after = torch.arange(rows).view(1, rows, 1) * 100.0 + torch.arange(n).expand(heads, rows, n)
        trail.note(read, range(rows), after)

    watching = Watching(look)
    watching.trail, watching.stayed = trail, trail.stayed
    one = Walk(tiny.model(), TOKENS, evict=watching)
    one.feed(TOKENS[:3])
    assert trail.layers(one.request)[2].tolist() == [[200.0, 201.0, 202.0]] * 2
    twin = one.fork()
    one.try_([TOKENS[3], 9, TOKENS[4], 8], [-1, 0, 0, 2])
    assert trail.layers(one.request)[2].tolist() == [[200.0, 201.0, 202.0]] * 2, "nobody has said that they stay"
    one.commit([TOKENS[3], 9, TOKENS[4], 8], [0, 2])
    for layer in range(4):  # slots 3 and 5 of what row 2 left
        assert trail.layers(one.request)[layer].tolist() == [[200.0, 201.0, 202.0, 203.0, 205.0]] * 2
        assert trail.layers(twin.request)[layer].shape == (2, 3)
    trail.kept(one.request, 0, torch.tensor([[0, 3], [1, 4]]))
    assert trail.layers(one.request)[0].tolist() == [[200.0, 203.0], [201.0, 205.0]]
    trail.kept(one.request, 1, [torch.tensor([0]), torch.tensor([1, 4])])
    assert [own.tolist() for own in trail.layers(one.request)[1]] == [[200.0], [201.0, 205.0]]
    assert trail.drop(one.request, 1) is not None and 1 not in trail.layers(one.request)


def test_who_holds_on_to_the_states_of_unequal_heads_finds_them_as_they_were() -> None:
    trail = Trail("mine")
    before = [torch.tensor([1.0]), torch.tensor([2.0, 3.0])]
    request = cast(Any, SimpleNamespace(state={"mine": {0: before}}))
    span = cast(Any, SimpleNamespace(request=request, trail=None))
    for slab, own in enumerate(before):
        part = SimpleNamespace(heads=torch.tensor([slab]), slab=slab, n=len(own))
        after = torch.cat((own, torch.tensor([7.0]))) * 10
        trail.note(cast(Any, SimpleNamespace(span=span, part=part, layer=0, rows=None)), [0], after[None, None])
    trail.stayed(span, 1)
    assert [own.tolist() for own in trail.layers(request)[0]] == [[10.0, 70.0], [20.0, 30.0, 70.0]]
    assert [own.tolist() for own in before] == [[1.0], [2.0, 3.0]] and trail.layers(request)[0] is not before


@pytest.mark.parametrize(("rows", "block", "ids", "want"), [
    (7, 1, None, [7]), (7, 4, None, [4, 7]), (8, 4, None, [4, 8]), (4, 4, None, [4]), (3, 8, None, [3]),
    (7, 4, [0, 3, 5], [2, 3]), (7, 4, [4, 5], [2]), (7, 1, [2], [1]),
])  # fmt: skip
def test_rows_may_end_before_the_last_block(rows: int, block: int, ids: list[int] | None, want: list[int]) -> None:
    one = Walk(tiny.model(), TOKENS)
    span = Span(one.request, one.kv, one.phase, TOKENS[:rows], range(rows), block=block)
    read = object.__new__(Read)
    read.span, read.rows = span, ids
    assert ends(read) == want


@pytest.mark.skipif(native.library() is None, reason="torch's own kernels give no log-sum-exp with their attention")
@pytest.mark.parametrize("format", [Raw(), Int8().format()], ids=["raw", "int8"])
def test_many_rows_attention_comes_with_their_log_sum_exp(format: RowFormat) -> None:
    """The look at it leaves the read's answer, by which the next rows do not change; and that answer is what counts."""
    tokens, found = tiny.prompts(150)[0], list[Tensor]()
    half = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16)

    def look(read: Read) -> None:
        lse, out = read.lse(), read.answer
        if read.q.shape[0] <= FEW:
            assert lse is None and out is None
            return
        assert lse is not None and out is not None
        _, want = ops.weigh(read.scores(), read.part.v, read.mask())
        torch.testing.assert_close(lse, want, atol=1e-4, rtol=1e-4)
        read.answer = None
        assert torch.equal(out, read.attend())
        got, own = received(read, range(3, 99)), probe(read, range(3, 99)).sum((1, 2))
        torch.testing.assert_close(got, own, atol=2e-4, rtol=2e-4)
        assert read.answer is not None
        found.append(got)

    def spoil(read: Read) -> None:
        if read.lse() is not None and read.answer is not None:
            read.answer.zero_()

    looked, plain, spoiled = (
        Walk(half, tokens, evict=evict, format=format) for evict in (Watching(look), None, Watching(spoil))
    )
    for piece in (tokens[:100], tokens[100:120], tokens[120:]):
        wanted = plain.feed(piece)
        assert torch.equal(looked.feed(piece), wanted) and not torch.equal(spoiled.feed(piece), wanted)
    assert len(found) == 4, "one prompt of more than FEW rows, four layers"
