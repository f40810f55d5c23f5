"""attend.tidal: layers hand picks on, a row reads what it would alone, and rows are dense again after a while."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from phasewise.engine.engine import Engine
from phasewise.errors import UserError
from phasewise.load import load_model
from phasewise.methods.attend.dense import Dense
from phasewise.methods.attend.tidal import Tidal
from phasewise.methods.evict.snapkv import SnapKV
from phasewise.methods.evict.streaming import Streaming
from phasewise.methods.store.int8 import Int8
from phasewise.model.artefacts import fingerprint, save
from phasewise.model.model import Model
from phasewise.request.request import Request
from phasewise.step import reference
from phasewise.step.plan import AttentionPlan
from phasewise.step.reference import attend
from phasewise.train.artefacts import ArtefactJob, attend_tidal
from phasewise.train.artefacts.attend_tidal import answers, count, needles
from phasewise.verbs.host import Host
from tests import oracle, seeds, tiny
from tests.attend.slow_tidal import SlowTidal
from tests.kv.harness import Uneven, Walk, cuts, drafting, sliding

CLOSE = {"atol": 2e-4, "rtol": 1e-4}
K, EVERY = 9, 6
KNOBS = {"k": K, "dense": 0, "second": 2, "every": 0}  # of four layers, 0 and 2 pick, 1 and 3 read less
PROMPT, TOKENS = 70, tiny.prompts(110)[0]
OTHER = tiny.prompts(40, seed=9)[0]
ON = {"attend": f"tidal:k={K},dense=0,second=2,every={EVERY}"}


def bound(method: Any, model: Model | None = None) -> Any:
    return method.bind(Host(model or tiny.model(), None, None, None, None))  # type: ignore[arg-type]


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "streaming": lambda: {"evict": bound(Streaming(sinks=6, window=43))},
    "streaming, text": lambda: {"evict": bound(Streaming(sinks=6, window=43, positions="text"))},
    "snapkv": lambda: {"evict": bound(SnapKV(keep=0.5, window=5))},
    "heads that keep other rows": lambda: {"evict": Uneven([[range(0, 70, 2), [*range(34), 69]]] * 4)},
    "heads that keep more rows": lambda: {"evict": Uneven([[range(1, 70, 2), [*range(50), 68, 69]]] * 4)},
    "int8": lambda: {"format": Int8().format()},
}


def started(attend: Any, case: str = "plain", model: Model | None = None) -> Walk:
    one = Walk(model or tiny.model(), TOKENS[:PROMPT], attend=attend, **CASES[case]())
    one.feed(TOKENS[:PROMPT])
    return one


def tidal(model: Model | None = None, **knobs: int) -> Any:
    return bound(Tidal(**KNOBS | knobs), model)


def slow(k: int = K) -> SlowTidal:
    return SlowTidal(k, 0, 2)


# ---- what is read
@pytest.mark.parametrize("case", seeds.params(CASES, 1, "tidal", always=["plain"]))
def test_equals_tidal_by_the_book(case: str) -> None:
    """Single rows, slices and a whole replay, against rows and heads that pick one by one."""
    truth = started(slow(), case)
    want = torch.cat([truth.feed([token]) for token in TOKENS[PROMPT:]])
    for sizes in ([1], [2, 7, 1], [40]):
        one = started(tidal(), case)
        got = torch.cat([one.feed(piece) for piece in cuts(TOKENS[PROMPT:], sizes)])
        torch.testing.assert_close(got, want, **CLOSE)
    dense = started(None, case)
    assert (dense.feed(TOKENS[PROMPT:]) - want).abs().max() > 1e-2, "the choice matters, or the test tests little"


def test_room_for_all_is_dense() -> None:
    one = started(tidal(k=109))
    got = torch.cat([one.feed(piece) for piece in cuts(TOKENS[PROMPT:], [1, 3])])
    torch.testing.assert_close(got, oracle.logits(tiny.checkpoint(), TOKENS)[PROMPT:], **CLOSE)


def test_windows_of_the_model() -> None:
    model = sliding(17, 4)
    truth, one, chunked = (started(m, model=model) for m in (slow(), tidal(model), tidal(model)))
    want = torch.cat([truth.feed([token]) for token in TOKENS[PROMPT:]])
    torch.testing.assert_close(torch.cat([one.feed([token]) for token in TOKENS[PROMPT:]]), want, **CLOSE)
    got = torch.cat([chunked.feed(piece) for piece in cuts(TOKENS[PROMPT:], [6, 1, 13])])
    torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("case", seeds.params(["plain", "streaming"], 1, "tidal's trees"))
def test_draft_trees_equal_their_paths(case: str) -> None:
    """Siblings share a position: each node picks among the rows of its own path."""
    tree, parents = TOKENS[PROMPT : PROMPT + 1], [-1]
    for depth in range(1, 9):
        tree = [*tree, TOKENS[PROMPT + depth], OTHER[depth]]
        parents = [*parents, 0 if depth == 1 else len(parents) - 2, 0 if depth == 1 else len(parents) - 1]
    one = started(tidal(), case)
    logits = one.try_(tree, parents)
    for leaf in (len(tree) - 2, len(tree) - 1):
        path, node = [], leaf
        while node >= 0:
            path.insert(0, node)
            node = parents[node]
        alone = started(tidal(), case)
        steps = torch.cat([alone.feed([tree[node]]) for node in path])
        torch.testing.assert_close(logits[path], steps, **CLOSE)
        taken = started(tidal(), case)
        taken.try_(tree, parents)
        taken.commit(tree, path)
        torch.testing.assert_close(taken.feed(OTHER[:5]), alone.feed(OTHER[:5]), **CLOSE)


def test_the_second_choice_replaces_the_first() -> None:
    truth = slow()
    one = started(truth)
    for token in TOKENS[PROMPT:]:
        one.feed([token])
    rows = [(head, at) for head in range(2) for at in range(PROMPT, 110)]
    assert all(truth.picks[1, *row] == truth.picks[0, *row] for row in rows)
    assert all(truth.picks[3, *row] == truth.picks[2, *row] for row in rows)
    assert any(truth.picks[0, *row] != truth.picks[2, *row] for row in rows)


def test_bytes_read_are_the_closed_form() -> None:
    """Two layers that pick read all rows, and all keys once more; the other two read k rows and the row itself."""
    one = started(tidal())
    row = 2 * 12 * 4 * 2  # heads, dim, bytes, keys and values
    for token in TOKENS[PROMPT:]:
        n, before = one.request.computed + 1, one.counters.kv_bytes_read
        one.feed([token])
        assert one.counters.kv_bytes_read - before == 2 * (n * row + n * row // 2) + 2 * (K + 1) * row


def test_rows_that_were_not_picked_are_not_even_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast path touches the picked rows alone, in whatever form they are stored."""
    whole: list[bool] = []

    def watched(plan: AttentionPlan, reads: Any) -> Any:
        out = attend(plan, reads)
        whole.extend(read.part._whole is not None for read in reads if read.layer in (1, 3))
        return out

    monkeypatch.setattr(reference, "attend", watched)
    for case in ("plain", "int8"):
        one = started(tidal(), case)
        whole.clear()
        for token in TOKENS[PROMPT:90]:
            one.feed([token])
        assert whole and not any(whole)


# ---- computed once more
def rows_of(request: Request) -> list[torch.Tensor]:
    """Keys and values of all layers, [H, n, D] each."""
    assert request.kv is not None
    parts = [layer.read()[0] for layer in request.kv.layers]
    return [x.clone() for part in parts for x in (part.k, part.v)]


@torch.inference_mode()
def dense_rows(tokens: list[int]) -> list[torch.Tensor]:
    walk = Walk(tiny.model(), tokens)
    walk.feed(tokens)
    return rows_of(walk.request)


def test_after_a_correction_rows_equal_those_of_a_dense_prefill() -> None:
    """After every step: below the last border all rows are dense ones, and behind it some are not."""
    placed = tiny.engine(ON, prefix_cache=False)
    assert isinstance(placed, Engine)
    request = Request(TOKENS[:PROMPT], tiny.greedy(40))
    placed.add(request)
    bitten = 0
    while request.left is None:
        placed.step()
        if request.left is not None or request.prefilling:
            continue
        if request.computed < request.known - 1:
            continue  # some are to come once more
        want, border = dense_rows(request.tokens[: request.computed]), request.computed - 1
        border = PROMPT + (border - PROMPT) // EVERY * EVERY
        for mine, truth in zip(rows_of(request), want):
            torch.testing.assert_close(mine[:, :border], truth[:, :border], atol=1e-5, rtol=1e-4)
        bitten += any((a - b)[:, border:].abs().max() > 1e-2 for a, b in zip(rows_of(request), want))
    assert bitten > 20, "rows that were never wrong need no correction"


def test_each_token_costs_one_more_row() -> None:
    new = 4 * EVERY + 3
    placed = tiny.engine(ON, prefix_cache=False)
    (request,) = tiny.run(placed, [TOKENS[:PROMPT]], tiny.greedy(new))
    assert request.n_out == new
    work = placed.counters
    assert work.recomputed == 4 * EVERY and work.rows == PROMPT + new - 1 + work.recomputed
    never = tiny.engine({"attend": f"tidal:k={K},dense=0,second=2,every=0"}, prefix_cache=False)
    tiny.run(never, [TOKENS[:PROMPT]], tiny.greedy(new))
    assert never.counters.recomputed == 0 and never.counters.rows == PROMPT + new - 1


def test_nothing_is_computed_again_while_all_is_read() -> None:
    placed = tiny.engine({"attend": f"tidal:k=200,dense=0,second=2,every={EVERY}"}, prefix_cache=False)
    got = tiny.outs(tiny.run(placed, [TOKENS[:PROMPT]], tiny.greedy(30)))
    assert got == tiny.plain([TOKENS[:PROMPT]], tiny.greedy(30)) and placed.counters.recomputed == 0


def test_drafts_change_no_token_and_reach_no_border() -> None:
    verbs = {"attend": f"tidal:k={K},dense=0,second=2,every=3"}
    prompts = tiny.prompts(41, 7, 90)
    alone = [tiny.outs(tiny.run(tiny.engine(verbs, prefix_cache=False), [p], tiny.greedy(30)))[0] for p in prompts]
    placed = drafting(verbs, {tuple(p): out for p, out in zip(prompts, alone)}, prefix_cache=False)
    assert tiny.outs(tiny.run(placed, prompts, tiny.greedy(30))) == alone
    assert placed.counters.drafted > placed.counters.accepted > 0
    assert placed.counters.recomputed > 0


def test_correction_changes_what_is_said() -> None:
    """Otherwise nothing above would tell it from none."""
    prompts = tiny.prompts(60, 61, 62)
    said = []
    for every in (0, 2, 5):
        verbs = {"attend": f"tidal:k=4,dense=0,second=-1,every={every}"}
        said.append(tiny.outs(tiny.run(tiny.engine(verbs, prefix_cache=False), prompts, tiny.greedy(40))))
    assert said[0] != said[1] != said[2] != said[0]


# ---- knobs
@pytest.mark.parametrize(
    ("knobs", "says"),
    [({"k": 0}, "k=0 must be at least 1"), ({"dense": -1}, "dense=-1"), ({"every": -1}, "every=-1"),
     ({"every": 1}, "every=1 computes each row twice"), ({"second": -2}, "second=-2"),
     ({"dense": 3, "second": 3}, "second=3 must lie behind")],
)  # fmt: skip
def test_bad_knobs(knobs: dict[str, int], says: str) -> None:
    with pytest.raises(UserError, match=says):
        Tidal(**knobs)


def test_which_layers_pick() -> None:
    assert Tidal().choosing(32) == (2, 13)
    assert Tidal().choosing(8) == (2, 3)
    assert Tidal(second=-1).choosing(8) == (2,)
    assert Tidal(dense=0, second=5).choosing(8) == (0, 5)
    with pytest.raises(UserError, match="second=9, but the model has 8 layers"):
        Tidal(second=9).choosing(8)
    with pytest.raises(UserError, match="of 4 layers, 2 read everything and 2 pick"):
        Tidal().choosing(4)


@pytest.mark.parametrize(
    ("verbs", "says"),
    [({"evict": "streaming"}, "evict streaming gives up rows they need"),
     ({"decode": "block_diffusion:block=8"}, "block_diffusion finishes tokens in blocks")],
)  # fmt: skip
def test_what_cannot_be_corrected_is_refused(verbs: dict[str, str], says: str) -> None:
    with pytest.raises(UserError, match=f"attend tidal has decoded rows computed once more, and .*{says}"):
        tiny.engine(ON | verbs)
    tiny.engine({"attend": "tidal:dense=0,second=2,every=0"} | verbs)


# ---- the layer that picks again, by needles
def test_the_choice_is_the_layer_that_finds_most_and_of_equal_ones_the_nearest_to_two_fifths(tmp_path: Path) -> None:
    model = load_model("pocket")  # of 8 layers: two fifths is layer 3
    host = Host(model, None, None, None, None)  # type: ignore[arg-type]
    for counts, want in (([9, 9, 9, 1, 5, 5, 2, 9], 4), ([0] * 8, 3), ([0, 0, 0, 2, 2, 2, 3, 0], 6)):
        made = Tidal().artefact(model.config)
        path = tmp_path / f"{want}.safetensors"
        save(path, made, {"found": torch.tensor(counts).float()}, fingerprint(model), "a test")
        assert Tidal(weights=str(path)).bind(host).choosing == (2, want)
    assert Tidal(weights="auto").bind(host).choosing == (2, 5), "what is shipped: 44 of 48 needles elsewhere"
    assert Tidal().bind(host).choosing == (2, 3)
    with pytest.raises(UserError, match=r"weights=auto chooses the layer that second=5 names: say one"):
        Tidal(weights="auto", second=5)


def test_needles_are_counted_as_the_method_itself_would_answer() -> None:
    """On the pocket model: right answers with every row to read, other ones where a row reads itself and one more;
    needles are those of the training part, and of layers that cannot pick again there is no count."""
    model, wanted = load_model("pocket", dtype=torch.float32), 2
    given = list(islice(needles(ArtefactJob("pocket", Path()).mixture(), 3), 4))
    assert given == list(islice(needles(ArtefactJob("pocket", Path()).mixture(), 3), 4))
    every, one = (tidal(model, k=k, dense=2, second=5) for k in (4096, 1))
    for prompt, answer in given[:2]:
        dense, whole, blind = answers(model, prompt, answer, [Dense(), every, one])
        assert dense == whole == 1 > blind
        wrong = [*answer[:-1], answer[-1] + 1]
        assert answers(model, prompt, wrong, [Dense()]) == [pytest.approx(1 - 1 / len(answer))]
    found, counted = count(model, Tidal(), iter(given), wanted)
    assert counted == wanted and found.shape == (8,) and found.max() <= wanted
    assert found[[0, 1, 2, 7]].tolist() == [0, 0, 0, 0] and found[5] > 0


def test_a_model_that_finds_no_needle_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend_tidal, "answers", lambda model, prompt, answer, ways: [0.5] * len(ways))
    with pytest.raises(UserError, match=r"pocket finds 0 needles of 4 with dense attention, .* Name one: second=LAYER"):
        attend_tidal.train(Tidal(), ArtefactJob("pocket", tmp_path, tokens=1024))
