"""attend.instinfer: SparF's approximation, its mean, the bytes of the drive and of the link."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.methods.attend.instinfer import InstInfer, _Index, fewest
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.request.counters import Counters
from phasewise.step import lower, reads
from phasewise.step.plan import share
from phasewise.step.reference import attend
from phasewise.verbs.host import Host
from tests import oracle, tiny
from tests.kv.harness import Walk
from tests.watched import passes

native_only = pytest.mark.skipif(native.library() is None, reason="no native kernels here")
PROMPT, TOKENS = 70, tiny.prompts(130)[0]
LAYERS, HEADS, DIM, HEADS_Q = 4, 2, 12, 4  # of the tiny model, in float32
KEY = HEADS * DIM * 4


def started(**knobs: Any) -> tuple[Walk, Counters]:
    host = Host(tiny.model(), None, Counters(), None, None)  # type: ignore[arg-type]
    one = Walk(tiny.model(), TOKENS[:PROMPT], attend=InstInfer(**knobs).bind(host))
    one.feed(TOKENS[:PROMPT])
    return one, host.counters


def test_all_numbers_and_all_rows_are_dense() -> None:
    one, counters = started(r=1.0, k=1.0)
    got = torch.cat([one.feed([token]) for token in TOKENS[PROMPT:]])
    torch.testing.assert_close(got, oracle.logits(tiny.checkpoint(), TOKENS)[PROMPT:], atol=3e-4, rtol=1e-4)
    assert counters.link_bytes == 0


def test_with_all_numbers_the_weights_are_those_of_attention() -> None:
    """r = D: only which rows stand for themselves is approximate; with all but one of them, hardly anything."""
    one, _ = started(r=1.0, k=float(PROMPT))
    got = torch.cat([one.feed([token]) for token in TOKENS[PROMPT : PROMPT + 5]])
    want = oracle.logits(tiny.checkpoint(), TOKENS)[PROMPT : PROMPT + 5]
    few, _ = started(r=1.0, k=8.0)
    far = torch.cat([few.feed([token]) for token in TOKENS[PROMPT : PROMPT + 5]])
    assert (got - want).abs().mean() < 0.2 * (far - want).abs().mean()


@pytest.mark.parametrize("group", [1, 4])
def test_bytes_read_are_the_closed_form(monkeypatch: pytest.MonkeyPatch, group: int) -> None:
    """r lines of every row before, whole groups of listed rows, the sum of the values, each row once to index it."""
    r, k = 3, 20
    one, _ = started(r=float(r), k=float(k), group=group)
    listed: list[Tensor] = []
    plain = reads.attend_listed

    def watched(some: Any, slots: Any, rests: Any) -> list[Tensor]:
        listed.extend(slots)
        return plain(some, slots, rests)

    monkeypatch.setattr("phasewise.step.reference.attend_listed", watched)
    indexed = 0
    for token in TOKENS[PROMPT:]:
        n, before = one.request.computed + 1, one.counters.kv_bytes_read
        listed.clear()
        one.feed([token])
        fetched = 0  # rows, over layers and heads
        for slots in listed:
            for head in slots[:, 0].tolist():
                groups = {slot // group for slot in head}
                fetched += sum(min((g + 1) * group, n) - g * group for g in groups)
                assert len(head) == k and head[-1] == n - 1
        assert LAYERS * HEADS * k <= fetched <= LAYERS * HEADS * min(n, k * group)
        assert (fetched == LAYERS * HEADS * k) or group > 1
        rest = (n - 1) * HEADS * r * 4 + HEADS * DIM * 4 + (n - 1 - indexed) * 2 * KEY
        assert one.counters.kv_bytes_read - before == fetched * 2 * DIM * 4 + LAYERS * rest
        indexed = n - 1


def test_link_bytes_are_four_vectors_a_layer() -> None:
    """However long the text is: q, k and v down, the output up; drafts bring as many rows as they have."""
    one, counters = started(r=3.0, k=20.0)
    each = LAYERS * (2 * HEADS_Q + 2 * HEADS) * DIM * 4
    for rows in (1, 1, 5):
        before = counters.link_bytes
        one.feed(TOKENS[one.request.computed : one.request.computed + rows])
        assert counters.link_bytes - before == rows * each


def test_the_mean_of_values_stands_for_what_is_left_out() -> None:
    """Without it the output of attention is further from the dense one, on every layer of queries that spread."""
    gen = torch.Generator().manual_seed(0)
    worse = 0
    for _ in range(40):
        q, k = torch.randn(1, HEADS_Q, DIM, generator=gen), torch.randn(HEADS, 90, DIM, generator=gen)
        v = torch.randn(HEADS, 90, DIM, generator=gen) + 0.5
        errors = []
        for mean in (True, False):
            read = _read(q, k, v)
            method = InstInfer(r=4.0, k=12.0, mean=mean).bind(Host(tiny.model(), None, Counters(), None, None))  # type: ignore[arg-type]
            (out,) = attend(method.plan(read.span), [read])
            assert out is not None
            errors.append(float((out - read.attend()).pow(2).sum()))
        worse += errors[1] > errors[0]
    assert worse >= 36


def _read(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """A single row that sees all of k, v [H, N, D], its own the last."""
    from phasewise.step.inside import Inside
    from phasewise.step.read import Read
    from phasewise.step.span import Span

    n = k.shape[1] - 1
    one = Walk(tiny.model(), TOKENS[:PROMPT])
    one.kv.reserve(n + 1)
    layer = one.kv.layers[0]
    layer.append(k[:, :n], v[:, :n], range(n))
    layer.commit(n)
    layer.append(k[:, n:], v[:, n:], [n])
    span = Span(one.request, one.kv, one.phase, [5], range(n, n + 1))
    (part,) = layer.read()
    return Read(Inside(tiny.model(), Counters()), 0, span, q, part)


def test_the_sum_of_values_counts_every_committed_row_once() -> None:
    """After tries that were given up, in any steps."""
    one, _ = started(r=3.0, k=20.0)
    for rows in (1, 3, 1, 6):
        one.try_(tiny.prompts(4, seed=rows)[0])
        with torch.inference_mode():
            one.kv.commit(0)
        one.feed(TOKENS[one.request.computed : one.request.computed + rows])
    (part,) = one.kv.layers[2].read()
    index: Any = one.kv.layers[2].derived["instinfer", 0]
    torch.testing.assert_close(index.sums, part.v[:, : index.upto].sum(1), atol=1e-5, rtol=1e-5)
    assert torch.equal(index.known, part.k[:, : index.upto].mT)


# ---- whole steps, in bfloat16
@pytest.fixture(scope="module")
def model() -> Model:
    return Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16)


@native_only
@pytest.mark.parametrize("group", [1, 4])
def test_whole_steps_count_what_steps_in_halves_do(group: int, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link's bytes by the closed form, and those of the rows that come with those listed."""
    found = []
    for whole in (True, False):
        host = Host(model, None, Counters(), None, None)  # type: ignore[arg-type]
        one = Walk(model, TOKENS[:PROMPT], attend=InstInfer(r=3.0, k=20.0, group=group).bind(host))
        one.feed(TOKENS[:PROMPT])
        with monkeypatch.context() as patch:
            if not whole:
                patch.setattr(lower, "_top_k", lambda *_: "a test asks by layer")
            made, before = passes(patch), one.counters.kv_bytes_read
            for token in TOKENS[PROMPT:]:
                one.feed([token])
        assert all(each.whole is whole for each in made)
        found.append((one.counters.kv_bytes_read - before, host.counters.link_bytes))
    config, steps = model.config, len(TOKENS) - PROMPT
    each = config.layers * (2 * config.heads + 2 * config.kv_heads) * config.head_dim * 2
    assert found[0] == found[1] and found[0][1] == steps * each
    least = steps * config.layers * config.kv_heads * 20 * config.head_dim * 4  # the rows that are listed
    assert found[0][0] > least * (1 if group == 1 else 1.2)


@native_only
def test_layers_that_know_unequally_many_are_asked(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no value is counted twice; after that step they know alike."""
    host = Host(model, None, Counters(), None, None)  # type: ignore[arg-type]
    one = Walk(model, TOKENS[:PROMPT], attend=InstInfer(r=3.0, k=20.0).bind(host))
    one.feed(TOKENS[:PROMPT])
    made = passes(monkeypatch)
    for i, token in enumerate(TOKENS[PROMPT : PROMPT + 8]):
        if i == 4:
            del one.kv.layers[2].beside.kept["instinfer", 0]
        one.feed([token])
    assert [each.whole for each in made] == [i != 4 for i in range(8)]
    for layer in one.kv.layers:
        (part,), index = layer.read(), layer.derived["instinfer", 0]
        assert isinstance(index, _Index) and index.sums is not None
        assert index.upto == PROMPT + 7 and torch.equal(index.known, part.k[:, : index.upto].mT)
        torch.testing.assert_close(index.sums, part.v[:, : index.upto].float().sum(1), atol=1e-4, rtol=1e-4)


def test_the_fewest_rows_that_choose() -> None:
    for k in (0.001, 0.125, 1 / 3, 0.9, 0.999, 1.0, 1.5, 12.0):
        assert all((share(k, n) < n) is (n >= fewest(k)) for n in range(1, 3000)), k


def test_more_numbers_than_a_query_has_are_refused() -> None:
    assert tiny.engine({"attend": "instinfer:r=12,k=4"})
    with pytest.raises(UserError, match="instinfer: r=13, but a query has 12 numbers: say at most 12"):
        tiny.engine({"attend": "instinfer:r=13,k=4"})


@pytest.mark.parametrize(("knobs", "said"), [
    ({"r": 0.0}, r"r=0\.0 must be above 0: a share up to 1, or a number"), ({"k": -1.0}, r"k=-1\.0 must be above 0"),
    ({"k": 1.5}, r"k=1\.5: above 1 it is a number of rows, which 1\.5 is not: say 2, or a share up to 1"),
    ({"r": 3.5}, r"r=3\.5: above 1 it is a number of a query's numbers, which .*: say 3 or 4"),
    ({"group": 0}, "group=0 must be at least 1: 1 fetches rows one by one"),
])  # fmt: skip
def test_bad_knobs_are_named_with_the_fix(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=f"instinfer: {said}"):
        InstInfer(**knobs)
