"""Block diffusion in bfloat16: its prompts and its denoising are whole native steps, and no law bends for that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise.bench.drive import Bench
from phasewise.engine.limits import Limits
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.request.request import Request
from tests import tiny
from tests.engine.test_native_steps import Follows
from tests.watched import passes

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

BLOCKS = [4, 32, 100, 512]  # few rows; many blocks of a slice; a slice per block; full attention over all there is


def load(dtype: torch.dtype) -> Model:
    return Model.load(tiny.checkpoint(hidden=64), dtype=dtype)


@pytest.mark.parametrize("store", ["slab", "int8"])
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("block", BLOCKS)
def test_every_step_is_one_native_call(block: int, fuse: bool, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = passes(monkeypatch)
    verbs = {"decode": f"block_diffusion:block={block},steps=3,selector=static,fuse={fuse}", "store": store}
    engine = tiny.engine(verbs, of=load(torch.bfloat16), prefix_cache=False)
    tiny.run(engine, tiny.prompts(150, 210), tiny.greedy(40))
    assert engine.counters.forwards == len(made) and all(each.whole for each in made)
    assert sum(each.rows for each in made) == engine.counters.rows


@pytest.mark.parametrize("evict", ["none", "streaming:sinks=3,window=40"])
@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("block", BLOCKS)
def test_no_further_from_float32_than_the_open_path(block: int, shift: bool, evict: str) -> None:
    """Every masked row of every step, from left to right over one text."""
    text = tiny.prompts(700)[0]
    verbs: dict[str, str | None] = {
        "decode": f"block_diffusion:block={block},steps={min(block, 8)},selector=sequential,shift={shift}",
        "evict": evict, "schedule": "prefill_first",
    }  # fmt: skip

    def logits(model: Model) -> Tensor:
        follows = Follows(text)
        engine = Bench(model).engine(verbs, Limits(prefix_cache=False), sample=follows)
        tiny.run(engine, [text[:150]], tiny.greedy(30))
        found = torch.cat(follows.seen)
        return found.where(found.isfinite(), torch.zeros(()))  # the mask is never drawn

    half, exact = load(torch.bfloat16), logits(load(torch.float32))
    fused = logits(half)
    half.stack = None
    opened = logits(half)
    assert fused.shape == opened.shape == exact.shape
    far = [float((each - exact).norm() / exact.norm()) for each in (fused, opened)]
    assert far[0] < 1.5 * far[1] + 1e-3 < 0.2


SHORT = tiny.prompts(19, 24, 7, 16)  # with their answers, no span of theirs is a slice: one kernel reads them all


@pytest.mark.parametrize("block", [4, 24])
@pytest.mark.parametrize("how", ["mates", "prefixes", "preemption", "hand-off"])
def test_not_a_bit_depends_on_anything_else(how: str, block: int) -> None:
    model, verbs = load(torch.bfloat16), {"decode": f"block_diffusion:block={block},steps=4,selector=static"}

    def run(engine: Any, *prompts: list[int]) -> list[list[int]]:
        return tiny.outs(tiny.run(engine, list(prompts), tiny.greedy(24)))

    want = [run(tiny.engine(verbs, of=model), prompt)[0] for prompt in SHORT]
    if how == "hand-off":
        assert run(tiny.engine({**verbs, "place": "disaggregated"}, of=model), *SHORT) == want
        return
    if how == "preemption":
        for moment in (1, 2, 4):
            engine: Any = tiny.engine(verbs, of=model)
            requests = [Request(prompt, tiny.greedy(24)) for prompt in SHORT]
            for request in requests:
                engine.add(request)
            for _ in range(moment):
                engine.step()
            running = [request for request in requests if request.left is None]
            assert running, "nobody was left to be preempted"
            for request in running[::2]:
                engine.room.preempt(request)
            tiny.finish(engine, requests)
            assert tiny.outs(requests) == want
        return
    engine = tiny.engine(verbs, of=model)
    assert run(engine, *SHORT) == want
    if how == "prefixes":
        longer = [prompt + tiny.prompts(9, seed=3)[0] for prompt in SHORT]
        assert run(engine, *SHORT, *longer) == want + [run(tiny.engine(verbs, of=model), each)[0] for each in longer]
