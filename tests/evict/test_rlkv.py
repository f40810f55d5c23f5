"""evict.rlkv: after the prompt some KV heads see sinks and window alone, and hold no more; prompts are dense."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phasewise import catalog
from phasewise.errors import UserError
from phasewise.methods.evict._windows import EVERY
from phasewise.methods.evict.rlkv import RLKV, CutHeads
from phasewise.model import artefacts
from phasewise.model.model import Model
from phasewise.request.counters import Counters
from phasewise.step.plan import Window
from phasewise.verbs.host import Host
from tests import oracle, tiny
from tests.kv.harness import Masked, Walk, cuts

CLOSE = {"atol": 2e-4, "rtol": 1e-4}
LAYERS, HEADS = 4, 2  # of the tiny model
SINKS, WINDOW, PROMPT = 2, 8, 60
TOKENS = tiny.prompts(170)[0]
SOME = torch.tensor([[True, False], [False, False], [True, True], [False, True]])


def cutting(cut: Tensor = SOME) -> Any:
    return CutHeads(cut, Window(SINKS, WINDOW))


def started(evict: Any, **more: Any) -> Walk:
    one = Walk(tiny.model(), TOKENS[:PROMPT], evict=evict, **more)
    one.feed(TOKENS[:PROMPT])
    return one


def sees(layer: int, head: int, q: int, k: int) -> bool:
    return q < PROMPT or not bool(SOME[layer, head]) or k < SINKS or q - k < WINDOW


# ---- which heads
def test_the_lowest_gates_are_cut_whichever_layers_they_lie_in() -> None:
    gates = torch.tensor([[0.9, 0.1], [0.5, 0.5], [0.0, 0.2]])
    assert RLKV(share=0.5).cut(gates).tolist() == [[False, True], [False, False], [True, True]]
    assert RLKV(share=4 / 6).cut(gates).tolist() == [[False, True], [True, False], [True, True]], (
        "of equals the earlier"
    )
    assert not RLKV(share=0.0).cut(gates).any() and RLKV(share=1.0).cut(gates).all()


def test_gates_come_from_an_artefact() -> None:
    host = Host(tiny.model(), None, Counters(), None, None)  # type: ignore[arg-type]
    made = RLKV(weights="random:3", share=0.4).bind(host)
    wanted = RLKV().artefact(tiny.model().config)
    assert wanted.shapes == {"gates": (LAYERS, HEADS)}
    gates = artefacts.random(wanted, "3")["gates"]
    assert isinstance(made, CutHeads) and torch.equal(made.cut, RLKV(share=0.4).cut(gates)) and int(made.cut.sum()) == 3
    with pytest.raises(UserError, match=r"phasewise train artefact evict\.rlkv .*say share=0"):
        tiny.engine({"evict": "rlkv"})
    assert RLKV(share=0.0).bind(host) is None, "and needs none to keep everything"


def reordered(orders: list[list[int]], to: Path, **options: Any) -> Model:
    """The tiny model with the KV heads of each layer in another order, and their query heads with them."""
    path, dim = tiny.checkpoint(**options), options["hidden"] // options["heads"]
    tensors, group = load_file(path / "model.safetensors"), options["heads"] // options["kv_heads"]
    for layer, order in enumerate(orders):
        at = f"model.layers.{layer}.self_attn."
        for name, size in (("q_proj", group * dim), ("k_proj", dim), ("v_proj", dim)):
            tensors[f"{at}{name}.weight"] = tensors[f"{at}{name}.weight"].unflatten(0, (-1, size))[order].flatten(0, 1)
        out = tensors[f"{at}o_proj.weight"].unflatten(1, (-1, group * dim))
        tensors[f"{at}o_proj.weight"] = out[:, order].flatten(1).contiguous()
    shutil.copy(path / "config.json", to)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return Model.load(to)


def test_the_order_of_heads_is_nothing_if_gates_follow(tmp_path: Path) -> None:
    """What the paper's two kernels rest on: Wq, Wk, Wv, Wo and the gates in another order, in each layer its own."""
    shape: dict[str, Any] = {"hidden": 64, "heads": 8, "kv_heads": 4}
    orders = [[2, 0, 3, 1], [3, 2, 1, 0], [0, 1, 2, 3], [1, 3, 0, 2]]
    gates = torch.rand(4, 4, generator=torch.Generator().manual_seed(2))
    moved = torch.stack([own[order] for own, order in zip(gates, orders)])
    cut = RLKV(share=0.5).cut
    assert 0 < int(cut(gates)[0].sum()) < 4

    def logits(model: Model, gates: Tensor) -> Tensor:
        one = Walk(model, TOKENS[:PROMPT], evict=cutting(cut(gates)))
        return torch.cat([one.feed(TOKENS[:PROMPT]), *(one.feed([token]) for token in TOKENS[PROMPT:90])])

    other, own = reordered(orders, tmp_path, **shape), tiny.model(**shape)
    want = logits(own, gates)
    torch.testing.assert_close(logits(other, moved), want, **CLOSE)
    assert (logits(other, gates) - want)[PROMPT:].abs().max() > 0.1, "gates that stay behind cut other heads"
    dense = oracle.logits(tiny.checkpoint(**shape), TOKENS[:90])
    assert (dense - want)[PROMPT:].abs().max() > 0.1, "or the test tests little"
    torch.testing.assert_close(
        oracle.logits(tmp_path, TOKENS[:90]), oracle.logits(tiny.checkpoint(**shape), TOKENS[:90]), **CLOSE
    )


# ---- what rows see, and what is held
@pytest.mark.parametrize("sizes", [[1, 5, 40], [50]])
def test_equals_masked_dense_attention(sizes: list[int]) -> None:
    masked = Walk(tiny.model(), TOKENS[:PROMPT], evict=Masked(sees))
    masked.feed(TOKENS[:PROMPT])
    want = masked.feed(TOKENS[PROMPT:])
    one = started(cutting())
    got = torch.cat([one.feed(piece) for piece in cuts(TOKENS[PROMPT:], sizes)])
    torch.testing.assert_close(got, want, **CLOSE)
    assert (got - oracle.logits(tiny.checkpoint(), TOKENS)[PROMPT:]).abs().max() > 0.1, "or the test tests little"


def test_prompts_are_dense() -> None:
    one = Walk(tiny.model(), TOKENS[:PROMPT], evict=cutting())
    got = torch.cat([one.feed(TOKENS[:25]), one.feed(TOKENS[25:PROMPT])])
    torch.testing.assert_close(got, oracle.logits(tiny.checkpoint(), TOKENS[:PROMPT]), **CLOSE)


def test_bytes_held_are_the_closed_form() -> None:
    """n_full L + n_cut (S + W - 1), and what lies idle: freed, not masked. (The row to come is the window's last.)"""
    one = started(cutting())
    row = one.kv.live_bytes * 0 + 2 * 12 * 4  # of one head
    full, cut = int((~SOME).sum()), int(SOME.sum())
    for n in range(PROMPT, len(TOKENS)):
        idle = (n - PROMPT) % EVERY
        assert one.kv.live_bytes == row * (full * n + cut * (SINKS + WINDOW - 1 + idle))
        one.feed([TOKENS[n]])
    n = len(TOKENS)
    for layer in range(LAYERS):
        for head in range(HEADS):
            held = one.positions(layer, head)
            assert (
                held == list(range(n)) if not SOME[layer, head] else held[:SINKS] == [0, 1] and len(held) < 10 + EVERY
            )
    assert one.kv.bytes < 0.75 * row * (full + cut) * (n + 64), "allocated bytes fall as well"
    assert one.kv.layers[1].slabs[0].positions is None, "no head of this layer is cut"


def test_bytes_read_are_the_closed_form() -> None:
    one = started(cutting())
    for n in range(PROMPT, 110):
        before = one.counters.kv_bytes_read
        one.feed([TOKENS[n]])
        idle = (n - PROMPT) % EVERY
        rows = int((~SOME).sum()) * (n + 1) + int(SOME.sum()) * (SINKS + WINDOW + idle)
        assert one.counters.kv_bytes_read - before == 2 * 12 * 4 * rows


def test_rejected_rows_leave_no_trace() -> None:
    plain, drafted = started(cutting()), started(cutting())
    for at in range(PROMPT, 150, 2):
        first, second = TOKENS[at : at + 2]
        want = torch.cat([plain.feed([first]), plain.feed([second])])
        wrong = (second + 1) % tiny.VOCAB
        tree = [first, wrong, second, wrong]
        got = drafted.try_(tree, [-1, 0, 0, 1])
        drafted.commit(tree, [0, 2])
        torch.testing.assert_close(got[[0, 2]], want, **CLOSE)
    assert drafted.positions(2) == plain.positions(2)


def test_short_texts_are_dense_and_prompts_within_the_window_are_cut_later() -> None:
    prompt = TOKENS[:5]
    one = Walk(tiny.model(), prompt, evict=cutting())
    got = torch.cat([one.feed(prompt), *(one.feed([token]) for token in TOKENS[5 : SINKS + WINDOW])])
    torch.testing.assert_close(got, oracle.logits(tiny.checkpoint(), TOKENS[: SINKS + WINDOW]), **CLOSE)
    for token in TOKENS[SINKS + WINDOW : 80]:
        one.feed([token])
    assert len(one.positions(2)) < SINKS + WINDOW + EVERY and len(one.positions(1)) == 80


@pytest.mark.parametrize(("knobs", "says"), [
    ({"share": 1.2}, r"share=1\.2 must lie in \[0, 1\]"), ({"share": -0.1}, r"share=-0\.1 must lie in \[0, 1\]"),
    ({"sinks": -1}, "sinks=-1 must be at least 0"), ({"window": 0}, "sinks=16 .* window=0 at least 1"),
])  # fmt: skip
def test_bad_knobs_are_named_with_the_bound(knobs: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=f"rlkv: {says}"):
        RLKV(**knobs)
    with pytest.raises(UserError, match="share"):
        catalog.build("evict", "rlkv:share=half")
