"""Rows in two classes that native kernels read packed: whole steps over them, beside the open path over opened ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise.engine.engine import Engine
from phasewise.kv.format import SIDES
from phasewise.methods.store._classed import Classed
from phasewise.methods.store.zipcache import BLOCK, ZipCache
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.request.request import Request
from phasewise.verbs.host import Host
from tests import tiny
from tests.kv.harness import Walk
from tests.store.packed_steps import beside_mates, forks_and_dumps_change_nothing
from tests.watched import passes

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")
GAP, PROMPT, WHOLE = 8, 37, 80
EVERY: dict[str, dict[str, Any]] = {
    "4 and 2": {"gap": GAP, "important": 0.5},
    "8 and 4": {"gap": GAP, "important": 0.25, "high": 8, "low": 4},
    "all alike": {"gap": 13, "important": 0.0},
    "keys by row": {"gap": GAP, "important": 0.5, "keys": "row"},
}
KNOBS = pytest.mark.parametrize("knobs", EVERY.values(), ids=EVERY)


def model(dtype: torch.dtype = torch.bfloat16) -> Model:
    return Model.load(tiny.checkpoint(hidden=128), dtype=dtype)  # heads of 32 numbers


def walk(of: Model, knobs: dict[str, Any]) -> Walk:
    method = ZipCache(**knobs)
    evict = method.bind(Host(of, None, None, None, None))  # type: ignore[arg-type]
    return Walk(of, tiny.prompts(WHOLE)[0][:PROMPT], evict=evict, format=method.format())


def fed(of: Model, knobs: dict[str, Any], sizes: Sequence[int] = (1,)) -> tuple[Tensor, Walk]:
    """Logits of the rows after a prompt, in steps of so many rows, over and over, as far as the next border."""
    every, found, at = tiny.prompts(WHOLE)[0], list[Tensor](), PROMPT
    one, gap = walk(of, knobs), knobs["gap"]
    one.feed(every[:PROMPT])
    while at < WHOLE:
        some = every[at : min(at + sizes[len(found) % len(sizes)], (at // gap + 1) * gap)]
        found.append(one.feed(some))
        at += len(some)
    return torch.cat(found), one


def plainly(of: Model, knobs: dict[str, Any], patch: pytest.MonkeyPatch) -> tuple[Tensor, Walk]:
    """`fed`, over blocks that are opened."""
    with patch.context() as here:
        here.setattr("phasewise.kv.blocks.packings", lambda format, shape: None)
        return fed(of, knobs)


def far(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


@KNOBS
def test_whole_steps_are_as_near_as_the_open_path(knobs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the rows that are asked as well: their keys need not be read twice."""
    made = passes(monkeypatch)
    got, one = fed(model(), knobs)
    assert [each.rows for each in made] == [PROMPT] + [1] * (WHOLE - PROMPT)
    assert all(each.whole for each in made[1:]), "a prompt's probes are asked within its layers"
    made.clear()
    plain, other = plainly(model(), knobs, monkeypatch)
    assert [each.rows for each in made] == [PROMPT], "the twin was to open blocks"
    exact, _ = fed(model(torch.float32), knobs)
    assert far(got, exact) < 1.2 * far(plain, exact) + 1e-3
    for name in ("row_layers", "rows", "kv_bytes_written"):
        assert getattr(one.counters, name) == getattr(other.counters, name)
    for layer, twin in zip(one.kv.layers, other.kv.layers):
        assert layer.blocks is not None and twin.blocks is not None
        assert layer.blocks.counts == twin.blocks.counts and layer.live_bytes == twin.live_bytes
        assert layer.blocks.counts == [WHOLE // knobs["gap"]] * 2


def test_what_is_found_on_the_way_is_what_probing_finds() -> None:
    """Of the same row over the same blocks, opened."""
    every, one = tiny.prompts(WHOLE)[0], walk(model(), EVERY["4 and 2"])
    one.feed(every[:PROMPT])
    for at in range(PROMPT, WHOLE):
        twin = one.fork() if (at + 1) % GAP == 0 else None
        one.feed([every[at]])
        if twin is None:
            continue
        for layer in twin.kv.layers:
            assert layer.blocks is not None
            layer.blocks.packings = None
        twin.feed([every[at]])
        here, there = one.request.state[BLOCK], twin.request.state[BLOCK]
        assert list(here) == list(there) == list(range(4))  # type: ignore[call-overload]
        for layer in range(4):
            assert torch.allclose(here[layer], there[layer], rtol=0.1, atol=0.01)  # type: ignore[index]


@KNOBS
def test_what_is_sealed_is_what_each_layer_seals_by_itself(
    knobs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of all layers are sealed in one go."""
    asked, sealed, gap = list[tuple[Any, ...]](), Classed.seal_ranked, knobs["gap"]

    def watched(self: Classed, side: int, x: Tensor, saliency: Tensor, settled: Sequence[Tensor]) -> Sequence[Tensor]:
        asked.append((side, x.clone(), saliency.clone(), [plane.clone() for plane in settled]))
        return sealed(self, side, x, saliency, settled)

    monkeypatch.setattr(Classed, "seal_ranked", watched)
    _, one = fed(model(), knobs)
    layers = len(one.kv.layers)
    later = asked[2 * layers :]
    assert len(later) == 2 * (WHOLE // gap - PROMPT // gap) and all(x.shape[0] == layers for _, x, _, _ in later)
    for turn, (side, x, saliency, settled) in enumerate(later):
        for i, layer in enumerate(one.kv.layers):
            assert layer.blocks is not None and isinstance(layer.blocks.format, Classed)
            assert len(settled) == len(layer.blocks.settled[side].planes)
            for one_plane, kept in zip(settled, layer.blocks.settled[side].planes):
                assert torch.equal(one_plane[i : i + 1], kept)
            alone = sealed(layer.blocks.format, side, x[i], saliency[i], [plane[i : i + 1] for plane in settled])
            at = PROMPT // gap + turn // len(SIDES)
            for plane, new in zip(layer.blocks.buffers[side].planes, alone, strict=True):
                assert torch.equal(plane[:, at : at + 1], new)


@pytest.mark.parametrize("sizes", [[5, 1, 3], [8]], ids=str)
def test_drafts_read_bit_for_bit_what_single_rows_read(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a last row that is asked, too."""
    made, of, knobs = passes(monkeypatch), model(), EVERY["4 and 2"]
    want, one = fed(of, knobs)
    made.clear()
    got, other = fed(of, knobs, sizes)
    assert torch.equal(got, want)
    assert sum(each.rows for each in made) == WHOLE and all(each.whole for each in made[1:])
    here, there = one.request.state[BLOCK], other.request.state[BLOCK]
    assert all(torch.equal(here[layer], there[layer]) for layer in range(4))  # type: ignore[index]


def test_trees_read_bit_for_bit_what_their_paths_read() -> None:
    every, of, knobs = tiny.prompts(WHOLE)[0], model(), {"gap": 9, "important": 0.5}
    want, _ = fed(of, knobs)
    one = walk(of, knobs)
    one.feed(every[:PROMPT])
    right = every[PROMPT : PROMPT + 3]
    wrong = [3 + (token + 1) % 60 for token in right]
    tree = [right[0], wrong[1], right[1], wrong[2], right[2]]
    logits = one.try_(tree, [-1, 0, 0, 1, 2])
    assert torch.equal(logits[[0, 2, 4]], want[:3])
    one.commit(tree, [0, 2])
    assert torch.equal(one.feed(every[PROMPT + 2 : PROMPT + 3]), want[2:3]), "what was rejected leaves no trace"


def test_forks_and_dumps_in_between() -> None:
    of, knobs = model(), EVERY["4 and 2"]
    want, _ = fed(of, knobs)
    forks_and_dumps_change_nothing(lambda: walk(of, knobs), tiny.prompts(WHOLE)[0], PROMPT, want)


@pytest.mark.parametrize(("store", "draft"), [
    ("zipcache:gap=8,important=0.5", {"draft": "prompt_lookup:k=3"}), ("zipcache:gap=20,high=8,low=2", {}),
], ids=str)  # fmt: skip
def test_mates_change_no_token_and_share_the_call(
    store: str, draft: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given, prompts = {"schedule": "prefill_first", "store": store} | draft, tiny.prompts(33, 5, 64, 17, 50)
    engine, made = beside_mates(model(), given, prompts, monkeypatch)
    assert sum(each.rows for each in made) == engine.counters.rows and len(made) == engine.counters.forwards
    assert sum(each.whole for each in made) >= len(made) - len(prompts), "all but prompts"


def test_what_is_read_is_counted_packed() -> None:
    """By closed form, as tests/store/test_zipcache.py has it for the open path; a block's last row reads keys once."""
    prompt, new, high, low = 50, 30, 4, 2
    engine = tiny.engine({"store": f"zipcache:gap={GAP},important=0.5"}, of=model(), prefix_cache=False)
    assert isinstance(engine, Engine)
    request = Request(tiny.prompts(prompt)[0], tiny.greedy(new))
    engine.add(request)
    engine.step()
    before, want = engine.counters.kv_bytes_read, 0.0
    shape = request.kv.layers[0].shape  # type: ignore[union-attr]
    numbers = shape.heads * shape.dim
    while request.left is None:
        engine.step()
    for seen in range(prompt, prompt + new - 1):  # rows before a token's own
        sealed = seen // GAP * GAP
        row = 2 * (numbers * (high + low) / 2 + 1) / 8 + 32 / 8 + 2 * numbers * 32 / 8 / GAP  # of both sides
        want += 4 * (sealed * row + 2 * (seen + 1 - sealed) * numbers * 2 + numbers * 2)
    assert engine.counters.kv_bytes_read - before == want
