"""evict.longgen: dense attention under a mask in some layers, whose other rows are gone, with weights of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise import catalog
from phasewise.errors import UserError
from phasewise.methods.evict._windows import EVERY
from phasewise.methods.evict.longgen import LongGen, full_layers
from phasewise.model.model import Model
from phasewise.request.counters import Counters
from phasewise.request.request import Request
from phasewise.verbs.host import Host
from tests import oracle, tiny
from tests.kv.harness import Masked, Walk, cuts, sliding, walk
from tests.merged import merged

# Six layers of random weights magnify rounding to 4e-4 in logits of up to 25 (avx2, a token at a time against spans);
# a window that is one row off moves them by 20.
CLOSE = {"atol": 2e-3, "rtol": 1e-4}
LAYERS, N = 6, 20
FULL = (2, 3)  # of six
WINDOW: dict[str, Any] = {"sinks": 3, "window": 17}
STRIDED: dict[str, Any] = {"sinks": 0, "window": 9, "stride": 3, "block": 4}
BOTH = pytest.mark.parametrize("knobs", [WINDOW, STRIDED], ids=["window", "strided"])


def model() -> Model:
    return tiny.model(layers=LAYERS)


def longgen(of: Model | None = None, **knobs: Any) -> Any:
    host = Host(of or model(), None, Counters(), None, None)  # type: ignore[arg-type]
    return LongGen(**({"weights": "none"} | knobs)).bind(host)


def spelled(knobs: dict[str, Any], weights: str = "none") -> dict[str, str]:
    return {"evict": "longgen:" + ",".join(f"{k}={v}" for k, v in (knobs | {"weights": weights}).items())}


def sees(knobs: dict[str, Any], q: int, k: int) -> bool:
    """One row and another, by the book."""
    stride = knobs.get("stride", 0)
    return k < knobs["sinks"] or q - k < knobs["window"] or bool(stride and k // knobs["block"] % stride == 0)


def truth(knobs: dict[str, Any]) -> Masked:
    """Nothing is given up, and rows are hidden one by one."""
    return Masked(lambda layer, head, q, k: layer in FULL or sees(knobs, q, k))


def text(n: int, seed: int = 0) -> list[int]:
    return tiny.prompts(n, seed=seed)[0]


def test_a_third_of_the_layers_is_full() -> None:
    assert full_layers(6, "middle") == [2, 3] and full_layers(8, "middle") == [2, 3, 4]
    assert full_layers(6, "ends") == [0, 5] and full_layers(8, "ends") == [0, 1, 7]
    assert full_layers(1, "middle") == full_layers(1, "ends") == [0] and not full_layers(9, "none")
    for layers in range(3, 60):
        middle = full_layers(layers, "middle")
        assert len(middle) == round(layers / 3) == len(set(full_layers(layers, "ends")))
        below, above = middle[0], layers - 1 - middle[-1]
        assert abs(below - above) <= 1 and middle == list(range(below, layers - above))


@BOTH
def test_what_is_freed_is_what_the_mask_hides(knobs: dict[str, Any]) -> None:
    tokens = text(150)
    got = walk(model(), tokens[:40], cuts(tokens[40:], [1, 5, 33]), evict=longgen(**knobs))
    torch.testing.assert_close(got, walk(model(), tokens, [], evict=truth(knobs)), **CLOSE)
    assert (got - oracle.logits(tiny.checkpoint(layers=LAYERS), tokens)).abs().max() > 10, (
        "the mask matters, or the test tests little"
    )


@settings(max_examples=2, deadline=None)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=5), st.integers(1, 140), st.sampled_from([WINDOW, STRIDED]))
def test_chunks_equal_single_steps(sizes: list[int], prompt: int, knobs: dict[str, Any]) -> None:
    """Prompt or not, in one span or many, before and after rows are really dropped."""
    tokens = text(140)
    want = walk(model(), tokens[:1], cuts(tokens[1:], [1]), evict=longgen(**knobs))
    one = Walk(model(), tokens[:prompt], evict=longgen(**knobs))
    torch.testing.assert_close(torch.cat([one.feed(piece) for piece in cuts(tokens, sizes)]), want, **CLOSE)


@BOTH
def test_draft_trees_equal_their_paths(knobs: dict[str, Any]) -> None:
    tokens, other = text(90), text(8, seed=5)

    def started() -> Walk:
        one = Walk(model(), tokens[:60], evict=longgen(**knobs))
        one.feed(tokens[:60])
        one.feed(tokens[60:70])
        return one

    one, parents = started(), [-1, 0, 0, 1, 2, 4, 5]
    tree = [tokens[70], tokens[71], other[0], tokens[72], other[1], other[2], other[3]]
    logits = one.try_(tree, parents)
    for node in range(len(tree)):
        path, at = [], node
        while at >= 0:
            path.insert(0, tree[at])
            at = parents[at]
        alone = started()
        torch.testing.assert_close(logits[node], torch.cat([alone.feed([t]) for t in path])[-1], **CLOSE)
    one.commit(tree, [0, 2, 4])
    follow = started()
    follow.feed([tree[0], tree[2], tree[4]])
    torch.testing.assert_close(one.feed(tokens[80:82]), follow.feed(tokens[80:82]), **CLOSE)


@pytest.mark.parametrize("full", ["middle", "none"])
def test_rows_held_are_the_closed_form(full: Any) -> None:
    """(n / 3) L + (2 n / 3) (S + W) rows at length L, and fewer than EVERY that wait to be dropped; memory falls."""
    one = Walk(model(), text(4), evict=longgen(full=full, **WINDOW))
    many, held = full_layers(LAYERS, full), 20
    for at, token in enumerate(text(200), 1):
        one.feed([token])
        for layer in range(LAYERS):
            rows = one.kv.layers[layer].n
            if layer in many:
                assert rows == at
            else:
                assert min(at, held - 1) <= rows < held + EVERY
                if rows < at:
                    kept = one.positions(layer)
                    assert kept[:3] == [0, 1, 2] and kept[3:] == list(range(at - rows + 3, at))
    layer = one.kv.layers
    assert one.kv.live_bytes == sum(each.live_bytes for each in layer)
    each = layer[0].live_bytes // layer[0].n
    assert one.kv.live_bytes == each * sum(200 if i in many else layer[i].n for i in range(LAYERS))
    narrow = [each for i, each in enumerate(layer) if i not in many]
    assert all(each.slabs[0].buffer.cap <= 128 for each in narrow), "freed, not hidden"


def test_blocks_on_the_stride_stay_and_others_never_come_back() -> None:
    one = Walk(model(), text(4), evict=longgen(**STRIDED))
    for token in text(200):
        one.feed([token])
    at, kept = 200, one.positions(0)
    window = next(p for p in kept if all(q in kept for q in range(p, at)))  # and what waits to be dropped
    assert kept == [p for p in range(at) if p // 4 % 3 == 0 or p >= window]
    assert at - 8 - EVERY - 4 <= window <= at - 8 and one.positions(2) == list(range(at))


def test_prompts_see_the_mask_too_and_forget_at_once() -> None:
    """In an engine: after the first slices of a prompt the narrow layers hold no more than a window."""
    placed = tiny.engine({**spelled(WINDOW), "schedule": "sarathi:budget=50"}, of=model(), prefix_cache=False)
    request = Request(text(300), tiny.greedy(4))
    placed.add(request)
    for step in range(1, 6):
        placed.step()
        assert request.kv is not None and request.prefilling
        rows = 50 * step if step == 1 else 19  # after the first slice fewer than EVERY have left the window
        assert [layer.n for layer in request.kv.layers] == [50 * step if i in FULL else rows for i in range(LAYERS)]
    tiny.finish(placed, [request])
    slow = walk(model(), [*request.prompt, *request.out[:-1]], [], evict=truth(WINDOW))
    assert request.out == slow[299:].argmax(-1).tolist()


def test_all_rows_run_with_its_weights(tmp_path: Path) -> None:
    """Prompts and answers: as a model with the low-rank weights merged in, under the mask."""
    method = LongGen(**WINDOW)
    tuned = merged(tiny.checkpoint(layers=LAYERS), tmp_path / "merged", method.artefact(model().config), 4)
    prompts = tiny.prompts(60, 7)
    placed = tiny.engine({**spelled(WINDOW, "random:4"), "schedule": "sarathi:budget=16"}, of=model())
    got = tiny.outs(tiny.run(placed, prompts, tiny.greedy(N)))
    for prompt, out in zip(prompts, got):
        rows = walk(tuned, [*prompt, *out[:-1]], [], evict=truth(WINDOW))
        assert out == rows[len(prompt) - 1 :].argmax(-1).tolist()
    assert got != tiny.outs(tiny.run(tiny.engine(spelled(WINDOW), of=model()), prompts, tiny.greedy(N)))


def test_a_models_own_window_hides_as_well() -> None:
    near, tokens = sliding(12, LAYERS), text(80)
    got = walk(near, tokens[:30], cuts(tokens[30:], [1, 4]), evict=longgen(near, **WINDOW))
    torch.testing.assert_close(got, walk(near, tokens, [], evict=truth(WINDOW)), **CLOSE)


def test_a_window_of_the_whole_context_is_the_model_itself() -> None:
    assert longgen(window=1 << 30, weights="auto") is None
    assert longgen(window=model().config.max_positions - 4, weights="auto") is None
    assert longgen(stride=1, weights="auto") is None, "all blocks"
    assert longgen(window=model().config.max_positions - 5) is not None


@pytest.mark.parametrize(("knob", "value"), [("sinks", -1), ("window", 0), ("stride", -1), ("block", 0)])
def test_bad_knobs_are_named_with_the_bound(knob: str, value: int) -> None:
    with pytest.raises(UserError, match=f"longgen: {knob}={value} must be at least {value + 1}"):
        LongGen(**{knob: value})


def test_a_bad_layout_is_named() -> None:
    with pytest.raises(UserError, match="full='top': choose middle, ends, none"):
        LongGen(full="top")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="full='top': choose one of middle, ends, none"):
        catalog.build("evict", "longgen:full=top")


def test_untrained_models_are_refused_with_what_to_do() -> None:
    with pytest.raises(UserError, match=r"phasewise train artefact evict.longgen:sinks=3,window=17,full=middle .*none"):
        tiny.engine(spelled(WINDOW, "auto"), of=model())


def test_two_methods_with_weights_are_refused() -> None:
    both = {**spelled(WINDOW, "random:0"), "skip": "unified:weights=random:0"}
    with pytest.raises(UserError, match="evict longgen and skip unified both bring low-rank weights"):
        tiny.engine(both)
    tiny.engine({**both, "skip": "unified:weights=none"})
