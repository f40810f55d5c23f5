"""attend.loopserve: lines that hold their share of attention, rows chosen anew along the path that stays, and bytes by
closed form."""

from __future__ import annotations

from itertools import combinations
from math import e
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise.engine.engine import Engine
from phasewise.errors import UserError
from phasewise.kv.drawers import Room
from phasewise.kv.store import Store
from phasewise.methods.attend._lines import AttentionLines, cover, masses, sampled
from phasewise.methods.attend.loopserve import NAME, Looping, LoopServe
from phasewise.methods.evict.snapkv import SnapKV
from phasewise.methods.evict.streaming import Streaming
from phasewise.methods.store.int8 import Int8
from phasewise.request.counters import Counters
from phasewise.request.request import Request
from phasewise.step.read import Read
from phasewise.verbs.host import Host
from tests import seeds, tiny
from tests.attend.slow_loop import SlowLoop, greedy
from tests.kv.harness import Walk, drafting

PROMPT, TOKENS = 70, tiny.prompts(130)[0]
TIGHT = LoopServe(alpha=0.6, budget=10, every=6, block=4, sample=16, voters=6)
ONLY_TOKENS = LoopServe(alpha=1.0, budget=10, every=6, voters=6)
LAYERS, HEADS, DIM, GROUP = 4, 2, 12, 2  # of the tiny model, in float32


def runtime(knobs: LoopServe) -> Looping:
    return knobs.bind(Host(tiny.model(), None, Counters(), None, None))  # type: ignore[arg-type]


def started(attend: Any, **more: Any) -> Walk:
    """A prompt that meets the method as well."""
    one = Walk(tiny.model(), TOKENS[:PROMPT], attend=attend, **more)
    one.plain = one.phase
    one.logits = one.feed(TOKENS[:PROMPT])  # type: ignore[attr-defined]
    return one


def state(one: Walk, layer: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = one.request.state[NAME][layer]
    return found


# ---- lines
def maps(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) ** 4


@pytest.mark.parametrize("alpha", [0.3, 0.8, 0.97, 0.9999])
def test_lines_are_greedy_and_hold_their_share(alpha: float) -> None:
    mass, at = maps(3, 9, 7), torch.tensor([0, 1, 1, 2, 3, 4, 5, 6, 6])
    mass[:, at[:, None] < torch.arange(7)] = 0.0
    lines = cover(mass, at, alpha)
    for h in range(3):
        columns, diagonals = greedy(mass[h].double().tolist(), at.tolist(), alpha)
        assert lines.columns[h].nonzero()[:, 0].tolist() == sorted(columns)
        assert lines.diagonals[h].nonzero()[:, 0].tolist() == sorted(diagonals)
        assert held(mass[h], at, columns, diagonals) >= alpha * float(mass[h].sum()) * (1 - 1e-6)
        less = (columns[:-1], diagonals) if len(columns) > len(diagonals) else (columns, diagonals[:-1])
        if all(less):
            assert sum(map(len, less)) < len(columns) + len(diagonals)


def held(mass: Tensor, at: Tensor, columns: Any, diagonals: Any) -> float:
    """Of mass [r, B]."""
    return sum(
        float(mass[r, b])
        for r in range(len(at))
        for b in range(int(at[r]) + 1)
        if b in columns or int(at[r]) - b in diagonals
    )


@pytest.mark.parametrize("seed", range(2))
def test_greedy_lines_hold_most_of_what_the_best_ones_hold(seed: int) -> None:
    """On maps small enough to try all: at least 1 - 1 / e of what any as many lines add to those always there."""
    at = torch.arange(6)
    mass = maps(1, 6, 6, seed=seed).tril()
    base = held(mass[0], at, [0], [0])
    every = [(i, None) for i in range(1, 6)] + [(None, i) for i in range(1, 6)]
    for k in (1, 2, 3, 4):
        best = 0.0
        for some in combinations(every, k):
            columns, diagonals = [0, *(c for c, _ in some)], [0, *(d for _, d in some)]
            best = max(best, held(mass[0], at, columns, diagonals) - base)
        tried = (cover(mass, at, alpha / 1000) for alpha in range(1000))
        enough = (lines for lines in tried if int(lines.columns.sum() + lines.diagonals.sum()) >= k + 2)
        taken = next(enough, cover(mass, at, 1 - 1e-6))  # or fewer lines hold everything
        assert int(taken.columns.sum() + taken.diagonals.sum()) <= k + 2
        columns, diagonals = (x[0].nonzero()[:, 0].tolist() for x in taken)
        assert held(mass[0], at, columns, diagonals) - base >= (1 - 1 / e) * best


def test_sampled_rows_lie_in_all_of_a_prompt() -> None:
    assert sampled(8, 100) == list(range(8))
    assert sampled(100, 4) == [24, 49, 74, 99] and sampled(5, 1) == [4]


def test_the_share_of_pairs_is_counted_over_heads() -> None:
    none, all_ = torch.zeros(1, 4, dtype=torch.bool), torch.ones(1, 4, dtype=torch.bool)
    own = none.clone()
    own[0, 0] = True
    assert AttentionLines(all_, none).share == 1.0 and AttentionLines(none, own).share == 0.4
    assert AttentionLines(torch.cat((all_, none)), torch.cat((none, own))).share == pytest.approx(0.7)


class Watched(Looping):
    """What share of all rows' attention a layer's lines held, and that of the sampled rows."""

    def __init__(self, knobs: LoopServe) -> None:
        super().__init__(knobs, tiny.model().config)
        self.found: dict[int, tuple[float, float]] = {}

    def lines(self, read: Read) -> AttentionLines:
        size, n, lines, kept = self.knobs.block, read.q.shape[0], super().lines(read), []
        for some in (sampled(n, self.knobs.sample), list(range(n))):
            mass, at = masses(read, some, size), torch.tensor(some) // size
            seen = lines.of(at, torch.arange(mass.shape[2])[None])
            kept.append(float((mass * seen).sum((1, 2)).div(mass.sum((1, 2))).min()))
        self.found[read.layer] = kept[0], kept[1]
        return lines


def test_the_share_holds_in_sampled_rows_and_nearly_so_in_all() -> None:
    watched = Watched(LoopServe(alpha=0.8, budget=10, every=6, block=4, sample=35))
    started(watched)
    assert set(watched.found) == set(range(LAYERS))
    for sampled_, whole in watched.found.values():
        assert sampled_ >= 0.8 - 1e-5 and whole >= 0.7


# ---- held to the book
@pytest.mark.parametrize(("knobs", "evict"), seeds.params([
    (TIGHT, None), (ONLY_TOKENS, SnapKV(keep=40.0, window=8)), (LoopServe(0.5, 20, 0, 8, 5), None),
    (TIGHT, SnapKV(keep=40.0, window=8, heads="ada")), (LoopServe(0.9, 3, 1, 1, 70, 9), None),
], 1, "loopserve", always=[(TIGHT, None)]))  # fmt: skip
def test_equals_the_book(knobs: LoopServe, evict: SnapKV | None) -> None:
    host = Host(tiny.model(), None, Counters(), None, None)  # type: ignore[arg-type]
    slow = SlowLoop(knobs)
    fast, book = (started(attend, evict=evict and evict.bind(host)) for attend in (runtime(knobs), slow))
    torch.testing.assert_close(fast.logits, book.logits, atol=2e-4, rtol=2e-4)  # type: ignore[attr-defined]
    for token in TOKENS[PROMPT:100]:
        torch.testing.assert_close(fast.feed([token]), book.feed([token]), atol=2e-4, rtol=2e-4)
    most = max(len(rows) for (_, _, at), rows in slow.selected.items() if at >= PROMPT)
    assert most <= knobs.budget + knobs.voters + (knobs.every or 30)
    if evict is None and knobs.alpha < 1:
        whole = sum(range(1, PROMPT + 1)) * LAYERS * HEADS
        assert sum(len(rows) for (_, _, at), rows in slow.selected.items() if at < PROMPT) < whole


def test_replays_in_pieces_equal_single_rows() -> None:
    single, pieces = started(runtime(TIGHT)), started(runtime(TIGHT))
    want = torch.cat([single.feed([token]) for token in TOKENS[PROMPT:100]])
    got, at = [], PROMPT
    while at < 100:
        size = min((1, 12, 2)[len(got) % 3], 100 - at)
        got.append(pieces.feed(TOKENS[at : at + size]))
        at += size
    torch.testing.assert_close(torch.cat(got), want, atol=2e-4, rtol=2e-4)
    for layer in range(LAYERS):
        mine, theirs = state(pieces, layer), state(single, layer)
        assert mine["border"] == theirs["border"] == 94
        assert torch.equal(mine["chosen"], theirs["chosen"]) and torch.equal(mine["at"], theirs["at"])


def test_rejected_rows_leave_no_trace() -> None:
    plain, drafted = started(runtime(TIGHT)), started(runtime(TIGHT))
    tokens = TOKENS[PROMPT : PROMPT + 14]
    for token in tokens:
        plain.feed([token])
    for at in (0, 2, 4, 6, 8, 10, 12):
        first, second = tokens[at : at + 2]
        wrong = (second + 1) % tiny.VOCAB
        tree = [first, wrong, second, wrong]  # two guesses for the next token, and one behind the wrong one
        if at == 6:  # a step that failed comes again
            drafted.try_(tree, [-1, 0, 0, 1])
            drafted.kv.commit(0)
        drafted.try_(tree, [-1, 0, 0, 1])
        drafted.commit(tree, [0, 2])
    for layer in range(LAYERS):
        mine, theirs = state(drafted, layer), state(plain, layer)
        assert torch.equal(mine["chosen"], theirs["chosen"]) and mine["at"].tolist() == theirs["at"].tolist()
        torch.testing.assert_close(mine["q"], theirs["q"], atol=1e-4, rtol=1e-4)


def test_drafts_end_where_a_choice_is_due() -> None:
    prompts = tiny.prompts(40, 55)
    verbs = {"attend": "loopserve:budget=6,every=5,block=4,alpha=0.7,voters=3"}
    want = tiny.plain(prompts, tiny.greedy(30), verbs)
    script = {tuple(prompt): out for prompt, out in zip(prompts, want)}
    placed = drafting(verbs, script)
    assert tiny.outs(tiny.run(placed, prompts, tiny.greedy(30))) == want
    assert placed.counters.accepted
    made = runtime(LoopServe(budget=6, every=5))
    request = Request(prompts[0] + [5])
    request.tokens += [7] * 7  # known: 41 + 7
    assert made.until(request) == 41 + 10
    assert made.until(Request([3] * 9)) is None, "nothing to choose from"


def test_what_was_left_out_comes_back_but_not_where_it_is_chosen_once() -> None:
    """Rows that one choice has left out are among the next ones': nothing is given up. `every=0` never looks again."""
    found: dict[int, list[set[int]]] = {}
    for every in (6, 0):
        one = started(runtime(LoopServe(alpha=1.0, budget=10, every=every, voters=6)))
        found[every] = []
        for token in TOKENS[PROMPT:100]:
            one.feed([token])
            chosen = set(state(one, 1)["chosen"][0].tolist())
            if not found[every] or chosen != found[every][-1]:
                found[every].append(chosen)
    assert len(found[0]) == 1 and found[0][0] == found[6][0] and len(found[6]) == 5
    assert any(late - early and min(late - early) < PROMPT - 6 for early, late in zip(found[6], found[6][1:]))


# ---- what it costs
def test_bytes_read_are_the_closed_form() -> None:
    """The chosen rows and all since the voters; at a border all keys before the voters, once."""
    one = started(runtime(ONLY_TOKENS))
    key = HEADS * DIM * 4
    for token in TOKENS[PROMPT:]:
        before, since = one.counters.kv_bytes_read, (one.request.computed - PROMPT) % 6
        first = one.request.computed - since - 6
        one.feed([token])
        rows = 2 * (10 + 6 + since + 1) + (first if since == 0 else 0)
        assert one.counters.kv_bytes_read - before == LAYERS * key * rows


def test_what_is_kept_beside_is_booked() -> None:
    one, made = started(runtime(ONLY_TOKENS)), runtime(ONLY_TOKENS)
    one.feed(TOKENS[PROMPT:80])
    for layer, kv in enumerate(one.kv.layers):
        kept = state(one, layer)
        size, queries = sum(kept[each].nbytes for each in ("q", "at", "chosen")), 6 * HEADS * GROUP * DIM * 4
        assert size == queries + 6 * 8 + 10 * HEADS * 4
        assert made.drawer(layer, kv.shape, Room(81, 81, False)) == size + queries  # of whole steps
    assert made.drawer(0, one.kv.layers[0].shape, Room(16, 16, False)) == 0
    placed = tiny.engine({"attend": "loopserve:budget=10,every=6,voters=6"})
    assert isinstance(placed, Engine) and isinstance(placed.store, Store)
    placed.add(Request(TOKENS[:PROMPT], tiny.greedy(8)))
    placed.step()
    assert placed.running[0].kv is not None and placed.running[0].kv.beside >= LAYERS * size


def test_a_fork_goes_on_by_itself() -> None:
    one = started(runtime(TIGHT))
    for token in TOKENS[PROMPT:80]:
        one.feed([token])
    twin, kept = one.fork(), state(one, 1)["at"].clone()
    for token in TOKENS[80:92]:
        twin.feed([(token + 1) % tiny.VOCAB])
    assert torch.equal(state(one, 1)["at"], kept)
    again = started(runtime(TIGHT))
    want = torch.cat([again.feed([token]) for token in TOKENS[PROMPT:100]])[10:]
    got = torch.cat([one.feed([token]) for token in TOKENS[80:100]])
    torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)


def test_rows_as_int8_are_chosen_by_what_they_are_then() -> None:
    one = started(SlowLoop(TIGHT), format=Int8().format())
    two = started(runtime(TIGHT), format=Int8().format())
    for token in TOKENS[PROMPT:90]:
        torch.testing.assert_close(two.feed([token]), one.feed([token]), atol=1e-3, rtol=1e-3)


def test_moved_sinks_are_read_in_any_case() -> None:
    """Streaming's sinks stand elsewhere for a row that has lost others: nobody votes on them."""
    host = Host(tiny.model(), None, Counters(), None, None)  # type: ignore[arg-type]
    evict = Streaming(sinks=2, window=40).bind(host)
    one = started(runtime(ONLY_TOKENS), evict=evict)
    for token in TOKENS[PROMPT:90]:
        one.feed([token])
    chosen = state(one, 2)["chosen"]
    assert bool((chosen >= PROMPT + 18 - 6 - 40).all()), "no sink, and nothing behind the window"


@pytest.mark.parametrize(("knobs", "says"), [
    ({"alpha": 0.0}, r"alpha=0\.0 must lie in \(0, 1\]"),
    ({"alpha": 1.5}, r"alpha=1\.5 must lie in \(0, 1\]: .*1 is all"),
    ({"budget": 0}, "budget=0 must be at least 1"), ({"every": -1}, "every=-1 must be at least 0"),
    ({"block": 0}, "block=0 must be at least 1"), ({"sample": 0}, "sample=0 must be at least 1"),
    ({"voters": 0}, "voters=0 must be at least 1"),
])  # fmt: skip
def test_bad_knobs_are_named_with_the_bound(knobs: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=f"loopserve: {says}"):
        LoopServe(**knobs)
