"""What a row sees: skipped rows, windows, uneven heads and branches, in one span or row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phasewise.methods.attend.quest import Quest
from phasewise.methods.evict.streaming import Streaming
from phasewise.model.model import Model
from phasewise.step.read import Read
from phasewise.step.reads import attend_all
from phasewise.step.span import Span
from phasewise.verbs.host import Host
from phasewise.verbs.skip import Skip
from tests import tiny
from tests.asking import Asking
from tests.kv.harness import Masked, Walk, cuts, mixed, sliding

CLOSE = {"atol": 2e-4, "rtol": 1e-4}
TOKENS = tiny.prompts(100)[0]
PROMPT = 50


class SomeRows(Skip):
    """Rows skip layers by their position and depth alone, the first and last layer excepted."""

    def __str__(self) -> str:
        return "some rows skip layers"

    def rows(self, layer: int, span: Span, x: Tensor) -> Tensor | None:
        if layer == 0:
            return None
        return torch.tensor([r for r, p in enumerate(span.positions) if (p + layer) % 3], dtype=torch.int64)

    def unused(self, layers: int) -> tuple[int, ...]:
        return ()


def streaming() -> Any:
    return Streaming(sinks=3, window=21).bind(Host(tiny.model(), None, None, None, None))  # type: ignore[arg-type]


METHODS = {
    "dense": dict,
    "quest": lambda: {"attend": Quest(page=4, budget=16, dense_layers=1)},
    "streaming": lambda: {"evict": streaming()},
    "masks per head": lambda: {"evict": Masked(lambda layer, head, q, k: (k + head) % 3 > 0 or k == q)},
}
MODELS = {"full": tiny.model, "window": lambda: sliding(19, 4), "both": lambda: mixed(19)}


@pytest.mark.parametrize(("methods", "model", "skip"), [
    ("dense", "both", SomeRows()), ("quest", "full", SomeRows()), ("streaming", "window", SomeRows()),
    ("masks per head", "full", SomeRows()), ("masks per head", "both", None), ("streaming", "full", None),
], ids=str)  # fmt: skip
def test_a_span_equals_its_rows_one_by_one(methods: str, model: str, skip: Any) -> None:
    def started() -> Walk:
        one = Walk(MODELS[model](), TOKENS[:PROMPT], skip=skip, **METHODS[methods]())
        one.feed(TOKENS[:PROMPT])
        return one

    one = started()
    want = torch.cat([one.feed([token]) for token in TOKENS[PROMPT:]])
    for sizes in ([50], [2, 9, 1]):
        other = started()
        got = torch.cat([other.feed(piece) for piece in cuts(TOKENS[PROMPT:], sizes)])
        torch.testing.assert_close(got, want, **CLOSE)
    tree, parents = TOKENS[PROMPT : PROMPT + 6], [-1, 0, 0, 1, 2, 4]
    logits = started().try_(tree, parents)
    for path in ([0, 1, 3], [0, 2, 4, 5]):
        alone = started()
        torch.testing.assert_close(logits[path], torch.cat([alone.feed([tree[node]]) for node in path]), **CLOSE)
        other = started()
        other.try_(tree, parents)
        other.commit(tree, path)
        assert [other.positions(layer) for layer in range(4)] == [alone.positions(layer) for layer in range(4)]
        torch.testing.assert_close(other.feed(TOKENS[:4]), alone.feed(TOKENS[:4]), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_a_prompt_that_leave_a_layer_out_need_no_mask(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are a prompt of their own there, for the kernels as well: in two slices, the same as by masks."""
    model = Model.load(tiny.checkpoint(hidden=64), dtype=dtype)
    tokens = tiny.prompts(240)[0]

    def run() -> Tensor:
        one = Walk(model, tokens, skip=SomeRows())
        one.plain = one.phase
        return torch.cat([one.feed(tokens[:130]), one.feed(tokens[130:])])

    with monkeypatch.context() as patch:
        patch.setattr(Read, "_causal", lambda *_: False)
        want = run()
    monkeypatch.setattr(Read, "_build", lambda *_: pytest.fail("a mask"))
    got = run()
    if dtype == torch.float32:
        torch.testing.assert_close(got, want, **CLOSE)
    else:
        assert (got - want).abs().max() < 0.2 * want.abs().max()


class Look(Asking):
    """Dense attention that keeps its reads."""

    def __init__(self) -> None:
        self.reads: list[tuple[bool, Tensor | None]] = []

    def __call__(self, reads: list[Read]) -> list[Tensor]:
        self.reads.extend((read.part.plain, read.mask()) for read in reads)
        return attend_all(reads)


def masks(model: Model, prompt: list[int], tokens: list[int], parents: list[int] | None = None) -> list[Tensor | None]:
    look = Look()
    one = Walk(model, prompt, attend=look)
    one.feed(prompt)
    one.try_(tokens, parents)
    return [mask for _, mask in look.reads]


def test_a_single_row_needs_no_mask() -> None:
    assert masks(tiny.model(), TOKENS[:9], [5]) == [None] * 4
    assert masks(sliding(10, 2), TOKENS[:9], [5]) == [None] * 2, "everything is within the window"


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 14), st.lists(st.integers(0, 4), max_size=5))
def test_masks_are_positions_and_structure(prompt: int, rows: int, window: int, parents: list[int]) -> None:
    """Each row sees committed rows within the window and its own ancestors."""
    tree = [-1, *(min(parent, i) for i, parent in enumerate(parents))][:rows]
    for parent in (None, tree):
        count = rows if parent is None else len(tree)
        depth: list[int] = []
        for i in range(count):
            up = i - 1 if parent is None else parent[i]
            depth.append(0 if up < 0 else depth[up] + 1)
        positions = [*range(prompt), *(prompt + d for d in depth)]
        found = masks(sliding(window, 2), TOKENS[:prompt], TOKENS[prompt : prompt + count], parent)
        for mask in found:
            for r in range(count):
                line, at = set(), r
                while at >= 0:
                    line.add(prompt + at)
                    at = at - 1 if parent is None else parent[at]
                want = [(slot < prompt or slot in line) and positions[prompt + r] - positions[slot] < window
                        for slot in range(prompt + count)]  # fmt: skip
                assert (want == [True] * len(want)) if mask is None else mask[0, r].tolist() == want


class Chosen(Asking):
    """Attends to a random choice of entries, by mask and by rows, and to the same by hand."""

    def __init__(self, share: float) -> None:
        self.share, self.gen, self.checked = share, torch.Generator().manual_seed(1), 0

    def __call__(self, reads: list[Read]) -> list[Tensor]:
        return [self.one(read) for read in reads]

    def one(self, read: Read) -> Tensor:
        (heads, n), rows = read.part.size, read.q.shape[0]
        own = torch.zeros(rows, n, dtype=torch.bool)
        own[torch.arange(rows), read.part.n + torch.arange(rows)] = True
        select = (torch.rand(heads, rows, n, generator=self.gen) < self.share) | own
        bytes_ = read.step.counters.kv_bytes_read
        out = read.attend(select)
        bytes_ = read.step.counters.kv_bytes_read - bytes_
        mask = read.mask()
        seen = select if mask is None else select & mask
        count = int(seen.sum())
        entry = 2 * read.q.shape[2] * 4
        gathered = int(seen.sum(-1).max()) * rows < n
        assert bytes_ == entry * (count if gathered else heads * n), "what is gathered, or everything once"
        most = int(seen.sum(-1).max())
        index = seen.byte().topk(most, -1).indices
        if int(seen.sum(-1).min()) == most:
            torch.testing.assert_close(read.attend_rows(index), out, atol=1e-5, rtol=1e-4)
            self.checked += 1
        group = read.q.shape[1] // heads
        for h in range(heads):
            for r in range(rows):
                slots = torch.nonzero(seen[h, r])[:, 0]
                for g in range(h * group, (h + 1) * group):
                    weights = (read.part.k[h, slots] @ read.q[r, g] * read.scale).softmax(0)
                    torch.testing.assert_close(out[r, g], weights @ read.part.v[h, slots], atol=1e-5, rtol=1e-4)
        return out


@pytest.mark.parametrize("share", [0.0, 0.03, 0.3, 1.0])
def test_selections_are_attended_exactly_and_counted(share: float) -> None:
    chosen = Chosen(share)
    one = Walk(tiny.model(), TOKENS[:PROMPT], attend=chosen)
    one.feed(TOKENS[:PROMPT])
    for piece in cuts(TOKENS[PROMPT:70], [1, 1, 3]):
        one.feed(piece)
    assert chosen.checked or share not in (0.0, 1.0)
