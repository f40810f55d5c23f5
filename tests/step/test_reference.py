"""The reference of attention plans, against rules written out row by row; and lowered plans against the reference."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise.kv.pages import PageKeys
from phasewise.methods.attend._select import RowScorer
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.step import lower, reference
from phasewise.step.plan import (
    EVERYTHING,
    AttentionPlan,
    KernelScores,
    ReadBlocks,
    Rivals,
    Scores,
    TopK,
    Window,
    merge,
    share,
)
from phasewise.step.read import Read
from phasewise.step.reference import rivals_of, selected
from phasewise.step.span import Span
from phasewise.verbs.attend import Attend
from tests import seeds, tiny
from tests.kv.harness import Uneven, Walk, cuts, sliding
from tests.watched import passes

PROMPT, TOKENS = 70, tiny.prompts(130)[0]


# ---- against rules written out
def by_hand(keys: TopK, at: int, row: dict[int, int], scores: list[float]) -> set[int]:
    """The slots that a row at position `at` reads of those that it sees, {slot: position}."""
    unit = {slot: position // keys.unit for slot, position in row.items()}
    own = at // keys.unit
    must = {slot for slot in row if at + 1 < keys.least or unit[slot] < keys.first or unit[slot] > own - keys.local}
    left = share(keys.most, len(row)) - len(must) if row else 0
    chosen: set[int] = set()
    others = {unit[slot] for slot in row.keys() - must} if keys.unit > 1 else set(row) - must
    order, taken, blocked = sorted(others, key=lambda u: (-scores[u], u)), 0, False
    for u in order:
        mine = {slot for slot in row.keys() - must if (unit[slot] if keys.unit > 1 else slot) == u}
        if keys.units is None:
            blocked = blocked or taken + len(mine) > left
            if blocked:
                break
        elif len(chosen) == keys.units:
            break
        taken += len(mine)
        chosen.add(u)
    return must | {slot for slot in row.keys() - must if (unit[slot] if keys.unit > 1 else slot) in chosen}


def drawn(draw: Random) -> tuple[TopK, Tensor, Tensor, Tensor]:
    """A selection, rows at positions [R], slots at positions [1 | h, N], and who sees them [1 | h, R, N]."""
    unit, n, rows, heads = draw.choice([1, 1, 3, 5]), draw.randint(4, 60), draw.randint(1, 5), draw.choice([1, 2])
    count = draw.choice([None, None, draw.randint(1, 6)])
    most = draw.choice([draw.randint(unit, 40), draw.uniform(0.1, 1.0)])
    keys = TopK(
        None, most, draw.randint(1, 30), unit, draw.randint(0, 3), draw.randint(1, 3),  # type: ignore[arg-type]
        max(count, 1) if count and unit > 1 else None,
    )  # fmt: skip
    positions = torch.tensor([sorted(draw.sample(range(2 * n), n)) for _ in range(heads)])
    at = torch.tensor(sorted(draw.sample(range(2 * n), rows)))
    seen = positions[:, None] <= at[:, None]
    return keys, at, positions, seen & (torch.rand(seen.shape, generator=torch.Generator().manual_seed(n)) < 0.9)


@pytest.mark.parametrize("case", range(60))
def test_top_k_reads_what_the_rule_says(case: int) -> None:
    keys, at, positions, seen = drawn(seeds.draw("top k", case))
    heads, units = len(positions), int(at.max()) // keys.unit + 1 if keys.unit > 1 else positions.shape[1]
    scores = torch.randint(0, 9, (heads, len(at), units), generator=torch.Generator().manual_seed(case)).float()
    got = selected(keys, rivals_of(keys, at, positions, seen, int(at.max())), Scores(scores))
    for h in range(heads):
        for r, mine in enumerate(at.tolist()):
            row = {slot: int(positions[h, slot]) for slot in seen[h, r].nonzero()[:, 0].tolist()}
            assert set(got[h, r].nonzero()[:, 0].tolist()) == by_hand(keys, mine, row, scores[h, r].tolist())


@pytest.mark.parametrize("case", range(20))
def test_a_window_shows_what_the_rule_says(case: int) -> None:
    draw = seeds.draw("window", case)
    window = Window(draw.randint(0, 6), draw.randint(1, 20), draw.choice([0, 2, 3]), draw.randint(1, 9))
    for at in range(0, 80, 7):
        got = window.seen(torch.tensor(at), torch.arange(at + 1)).tolist()
        striped = window.stride or math.inf
        want = [
            p < window.sinks or p > at - window.size or (bool(window.stride) and p // window.block % striped == 0)
            for p in range(at + 1)
        ]
        assert got == want


def test_merging_keeps_both_and_refuses_two_of_a_kind() -> None:
    window, chosen = AttentionPlan(window=Window(1, 2)), AttentionPlan(ReadBlocks(4, lambda own: [own]))
    both = merge(chosen, window)
    assert both.keys is chosen.keys and both.window is window.window and both is merge(chosen, window)
    assert merge(chosen, EVERYTHING) is chosen and merge(EVERYTHING, window) is window
    assert merge(window, window) is window, "one method in both places"
    for twice, what in ((window, "window"), (chosen, "choose what rows read")):
        with pytest.raises(ValueError, match=what):
            merge(twice, AttentionPlan(twice.keys, twice.window))


# ---- lowered plans, against the reference
class PageMeans:
    """Scores pages by the mean of their keys: a scorer of this test alone."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.kernel = KernelScores(
            PageKeys.key("means", page), softmax=False, step=page, vectors=lambda rows: rows // page,
            empty=lambda keys: PageKeys.none("means", page, keys),
        )  # fmt: skip

    def index(self, read: Read) -> PageKeys:
        pages = read.part.n // self.page
        keys = PageKeys.none("means", self.page, read.part.keys(0, 0)).roomy(pages)
        keys.fill(read.part, pages)
        return keys

    def scores(self, read: Read, index: PageKeys, rows: Rivals) -> Scores:
        assert rows.number is not None
        (means,) = index.known  # [h, P, D]
        heads, pages, dim = means.shape
        q = read.q.float().view(len(read.q), heads, -1, dim).transpose(0, 1)  # [h, R, G, D]
        value = torch.zeros(heads, len(read.q), rows.number.shape[2])
        value[..., :pages] = (q @ means.float().mT[:, None]).amax(2)
        return Scores(value)


class Chooses(Attend):
    def __init__(self, keys: TopK) -> None:
        self.keys, self._plan = keys, AttentionPlan(keys)

    def plan(self, span: Span) -> AttentionPlan:
        return self._plan if span.last + 1 >= self.keys.least else EVERYTHING


def fed(model: Model, keys: TopK) -> list[Tensor]:
    walk = Walk(model, TOKENS[:PROMPT], attend=Chooses(keys))
    walk.feed(TOKENS[:PROMPT])
    return [walk.feed([token]) for token in TOKENS[PROMPT:]]


MEANS = TopK(PageMeans(5), 23, 24, unit=5, dense_layers=2)


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
def test_whole_steps_choose_as_the_reference_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, by layer with lists from kernels, and by layer with the reference's lists."""
    model, made = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16), passes(monkeypatch)
    whole = fed(model, MEANS)
    assert len(made) == 61 and all(each.whole for each in made)
    monkeypatch.setattr(lower, "_top_k", lambda *_: "a test asks by layer")
    by_layer = fed(model, MEANS)
    assert not any(each.whole for each in made[62:])
    monkeypatch.setattr(reference, "choose", lambda *_: {})
    plainly = fed(model, MEANS)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(whole, by_layer, plainly, strict=True))


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
def test_a_models_windows_that_hide_something_keep_a_plan_from_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hides nothing yet does not matter."""
    made = passes(monkeypatch)
    fed(Model.load(sliding(100, 3).files.path, dtype=torch.bfloat16), MEANS)
    assert [each.whole for each in made[1:]] == [position < 100 for position in range(PROMPT, 130)]


class Norms(RowScorer):
    """As docs/methods.md shows how to write one: rows with the largest keys are read."""

    name = "norms"

    def width(self, dim: int) -> int:
        return 1

    def stand(self, read: Read, start: int, stop: int) -> Tensor:
        return read.part.keys(start, stop).norm(dim=-1, keepdim=True)

    def votes(self, read: Read, stands: Tensor, among: Tensor | None) -> Tensor:
        return stands.mT.expand(-1, len(read.q), -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_selector_is_a_scorer_and_nothing_else(dtype: torch.dtype) -> None:
    """It reads the rows that it says, one by one, in slices, as drafts and after an eviction, and only these."""
    model = Model.load(tiny.checkpoint(hidden=64), dtype=dtype)
    for evict in (None, Uneven([[range(0, PROMPT, 2), range(10, PROMPT)]] * 4)):
        keys = TopK(Norms(), 12, 13, first=2, local=3)
        found = []
        for sizes in ([1], [3, 1, 5]):
            walk = Walk(model, TOKENS[:PROMPT], attend=Chooses(keys), evict=evict)
            walk.feed(TOKENS[:PROMPT])
            before = walk.counters.kv_bytes_read
            found.append(torch.cat([walk.feed(piece) for piece in cuts(TOKENS[PROMPT:100], sizes)]))
        read = (walk.counters.kv_bytes_read - before) / (30 * 4 * 2 * 2 * model.config.head_dim * dtype.itemsize)
        close = {"atol": 3e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.15, "rtol": 0.1}
        torch.testing.assert_close(found[1], found[0], **close)
        assert read < 30, "rows per token and head, of 70 and more"


@pytest.mark.parametrize("evict", ["none", "streaming"])
def test_chunks_equal_single_steps(evict: str) -> None:
    """A plan that only a test has: blocks by position, with and without a window that gives rows up."""
    plan = AttentionPlan(ReadBlocks(4, lambda own: sorted({0, own // 2, own})))
    window = None if evict == "none" else AttentionPlan(window=Window(2, 30, rebased=True))

    class Fixed(Attend):
        def plan(self, span: Span) -> AttentionPlan:
            return plan if window is None else merge(plan, window)

    def run(sizes: list[int]) -> Tensor:
        walk: Any = Walk(tiny.model(), TOKENS[:1], attend=Fixed())
        walk.plain = walk.phase
        walk.feed(TOKENS[:1])
        return torch.cat([walk.feed(piece) for piece in cuts(TOKENS[1:], sizes)])

    torch.testing.assert_close(run([7, 1, 12]), run([1]), atol=3e-4, rtol=1e-4)
