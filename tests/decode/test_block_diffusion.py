"""Block diffusion against its slow twin: cache, schedule of passes, emission, memory."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
import torch

from phasewise import catalog
from phasewise.errors import UserError
from phasewise.methods.decode.block_diffusion import BlockDiffusion
from phasewise.model.model import Model
from phasewise.request.params import Params
from phasewise.request.request import Request
from tests import oracle, seeds, tiny
from tests.decode.slow import Diffusion, blockwise

N = 18


def engine(knobs: str = "", **options: Any) -> Any:
    verbs = {"decode": "block_diffusion" + (":" + knobs if knobs else "")}
    if "schedule" in options:
        verbs["schedule"] = options.pop("schedule")
    return tiny.engine(verbs, **options)


def alone(knobs: str, prompt: list[int], params: Params | None = None) -> list[int]:
    return tiny.outs(tiny.run(engine(knobs), [prompt], params or tiny.greedy(N)))[0]


def recorded(placed: Any) -> list[dict[int, torch.Tensor]]:
    """Filled, while `placed` runs, with {position: logits} of every call of the sampler."""
    calls: list[dict[int, torch.Tensor]] = []
    host = placed.parts.phases[-1].decode.host
    sample = host.sample

    def spy(logits: torch.Tensor, contexts: Any) -> Any:
        calls.append({c.position: row.clone() for c, row in zip(contexts, logits)})
        return sample(logits, contexts)

    host.sample = spy
    return calls


SETTINGS = {
    "static": {"selector": "static"},
    "two steps": {"selector": "static", "steps": 2},
    "sequential": {"selector": "sequential"},
    "dynamic": {"selector": "dynamic", "selector.threshold": 0.3},
    "entropy": {"selector": "entropy", "selector.threshold": 4.0},
    "block 5": {"block": 5, "selector": "static", "steps": 3},
    "block 1": {"block": 1},
    "shifted": {"shift": True, "selector": "static"},
    "shifted, dynamic, block 8": {"shift": True, "block": 8, "selector.threshold": 0.4},
    "block 1, shifted": {"block": 1, "shift": True, "mask": 2},
}


def text(knobs: dict[str, object]) -> str:
    return ",".join(f"{k}={v}" for k, v in knobs.items())


def twin(knobs: dict[str, object], model: Model | None = None) -> Diffusion:
    given: dict[str, Any] = {"selector": "dynamic"} | knobs
    given["denoising"] = given.pop("steps", None)
    given["threshold"] = given.pop("selector.threshold", 0.9)
    return Diffusion(model or tiny.model(), **given)


@pytest.mark.parametrize(("name", "fuse"), seeds.params(product(SETTINGS, [True, False]), 8, "block diffusion"))
def test_equals_the_uncached_twin_at_every_step(name: str, fuse: bool) -> None:
    """The block cache is exact: the same logits for every masked row of every step as without any cache."""
    for prompt in tiny.prompts(12, 3):
        slow = twin(SETTINGS[name])
        placed = engine(text(SETTINGS[name] | {"fuse": fuse}))
        calls = recorded(placed)
        want = slow.run(prompt, N)
        assert tiny.outs(tiny.run(placed, [prompt], tiny.greedy(N)))[0] == want
        assert len(slow.steps) - len(calls) in (0, 1), "the engine stores no last block"
        for mine, its in zip(calls, slow.steps):
            assert mine.keys() == its.keys()
            for position, row in mine.items():
                seen = its[position].isfinite()  # the twin never draws the mask, plain decoding may
                torch.testing.assert_close(row[seen], its[position][seen], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", ["static", "dynamic", "shifted"])
def test_sampled_candidates_are_drawn_afresh_at_every_step(name: str) -> None:
    params = Params(max_tokens=N, ignore_eos=True, temperature=0.9, seed=8)
    for prompt in tiny.prompts(9, 12, 3):
        slow = twin(SETTINGS[name])
        slow.temperature, slow.seed = params.temperature, params.seed
        assert alone(text(SETTINGS[name]), prompt, params) == slow.run(prompt, N)


def test_full_attention_has_no_exact_block_cache() -> None:
    """The check above must fail where earlier blocks see later ones."""
    prompt = tiny.prompts(16)[0]
    blocks = blockwise(tiny.model(), prompt, 4)[0]
    full = blockwise(tiny.model(), prompt, 16)[0]
    assert not torch.allclose(blocks, full, atol=1e-2)
    assert torch.allclose(blocks[:8], blockwise(tiny.model(), prompt[:8], 4)[0], atol=1e-4)
    assert not torch.allclose(full[:8], blockwise(tiny.model(), prompt[:8], 8)[0], atol=1e-2)


@pytest.mark.parametrize("fuse", [True, False])
def test_static_with_one_token_per_step_counts_its_passes(fuse: bool) -> None:
    """(masks of the first block) + B x (blocks - 1) denoising passes, and one for each stored block: all but the last.

    Fused, a block is stored together with the next one's first step, but for the block where the phase changes.
    """
    block, blocks = 4, 5
    head = 1
    prompt = tiny.prompts(2 * block + head)[0]
    masks = block - head + block * (blocks - 1)
    placed = engine(f"selector=static,block={block},fuse={fuse}")
    tiny.run(placed, [prompt], tiny.greedy(masks))
    stored, prefill = blocks - 1, 1
    assert placed.counters.forwards == masks + (1 if fuse else stored + prefill)
    assert placed.counters.rows == masks * block + stored * block + 2 * block
    assert placed.counters.head_rows == sum(range(1, block - head + 1)) + (blocks - 1) * sum(range(1, block + 1))


def test_block_of_one_aligned_is_autoregressive_on_a_mask_row() -> None:
    """The aligned model of the same weights: a mask at the next position, its own row read; two passes per token."""
    prompt, mask = tiny.prompts(11)[0], tiny.VOCAB - 1
    tokens = list(prompt)
    for _ in range(N):
        row = oracle.logits(tiny.checkpoint(), [*tokens, mask])[-1].clone()
        row[mask] = float("-inf")
        tokens.append(int(row.argmax()))
    placed = engine("block=1,fuse=no")
    assert tiny.outs(tiny.run(placed, [prompt], tiny.greedy(N)))[0] == tokens[len(prompt) :]
    assert placed.counters.forwards == 1 + 2 * N - 1  # the last token is not stored


@pytest.mark.parametrize("params", [tiny.greedy(N), Params(max_tokens=N, ignore_eos=True, temperature=0.9, seed=5)])
def test_block_of_one_shifted_is_plain_decoding(params: Params) -> None:
    prompts = tiny.prompts(41, 7, 90, 1)
    plain = tiny.engine()
    want = tiny.outs(tiny.run(plain, prompts, params))
    placed = engine("block=1,shift=true")
    assert tiny.outs(tiny.run(placed, prompts, params)) == want
    assert placed.counters.rows == plain.counters.rows


def test_cached_rows_are_those_of_clean_blocks_only() -> None:
    """After every step: as many rows as `computed` says, in every layer, and none that has ever seen a mask."""
    for knobs in ("", "fuse=no", "block=5", "shift=yes"):
        request = Request(tiny.prompts(14)[0], tiny.greedy(N))
        placed = engine(knobs)
        placed.add(request)
        unit = placed.parts.phases[-1].decode.unit
        while request.left is None:
            placed.step()
            if request.kv is None or not request.computed:
                continue
            assert request.computed % unit == 0
            clean = blockwise(tiny.model(), request.tokens[: request.computed], unit)[1]
            for mine, its in zip(request.kv.layers, clean.layers):
                assert mine.n == request.computed
                for a, b in zip(mine.slabs[0].buffer.planes, its.slabs[0].buffer.planes):
                    torch.testing.assert_close(a[:, : mine.n], b[:, : mine.n], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shift", [False, True])
def test_only_final_tokens_leave_and_whole_blocks_together(shift: bool) -> None:
    request = Request(tiny.prompts(14)[0], tiny.greedy(N))
    placed = engine(f"selector=static,shift={shift}")
    placed.add(request)
    seen: list[int] = []
    while request.left is None:
        placed.step()
        assert request.out[: len(seen)] == seen
        seen = request.out
        if seen and request.left is None:
            assert request.known % 4 in ((0, 1) if shift else (0,))


def test_siblings_that_part_within_the_prompts_last_block() -> None:
    """Each draws for itself from the first denoising step on, also where one finishes the block before the other."""
    knobs = "selector.threshold=0.05"
    for seed in range(4):
        params = Params(max_tokens=N, ignore_eos=True, temperature=1.0, seed=seed)
        first = Request(tiny.prompts(5, seed=seed)[0], params)
        family = [first, *(first.sibling(i) for i in range(1, 5))]
        placed = engine(knobs)
        for request in family:
            placed.add(request)
        tiny.finish(placed, family)
        for request in family:
            assert request.out == alone(knobs, request.prompt, request.params)


def test_cancelled_in_the_middle_of_a_block_it_leaves_no_byte() -> None:
    placed, request = engine(prefix_cache=False), Request(tiny.prompts(14)[0], tiny.greedy(N))
    placed.add(request)
    while "block_diffusion" not in request.state:
        placed.step()
    assert placed.kv_bytes > 0
    placed.cancel(request)
    assert placed.kv_bytes == 0 and not request.state


@pytest.mark.parametrize(("block", "unit"), [(4, 32), (3, 96), (64, 64)])
def test_prefixes_are_shared_in_whole_blocks(block: int, unit: int) -> None:
    """A cached row may depend on later tokens of its own block, so only whole blocks are found again."""
    first, other = tiny.prompts(200, 200)
    cases = [first, first[:100] + other[:60], first[:40] + other[:90], first]
    placed, cold = engine(f"block={block}"), engine(f"block={block}", prefix_cache=False)
    for prompt, hit in zip(cases, (0, 100 // unit * unit, 40 // unit * unit, 199 // unit * unit)):
        before = placed.counters.prefix_hits
        request = Request(prompt, tiny.greedy(N))
        placed.add(request)
        while request.left is None:
            placed.step()
        assert placed.counters.prefix_hits - before == hit
        assert request.out == tiny.outs(tiny.run(cold, [prompt], tiny.greedy(N)))[0]


def test_ends_inside_a_block() -> None:
    prompt = tiny.prompts(14)[0]
    free = alone("", prompt, tiny.greedy(30))
    for n in (1, 2, 3, 5, 10):
        assert alone("", prompt, tiny.greedy(n)) == free[:n]
    stop = free[8]
    stopped = alone("", prompt, Params(max_tokens=30, ignore_eos=True, stop_tokens=(stop,)))
    assert stopped == free[: free.index(stop) + 1]


def test_reaches_the_end_of_a_context_that_cuts_the_last_block() -> None:
    model = tiny.model(context=30)
    request = tiny.run(tiny.engine({"decode": "block_diffusion"}, of=model), tiny.prompts(18), tiny.greedy(50))[0]
    assert request.known == 30 and request.left is not None and request.left.reason == "length"


def test_a_budget_has_to_hold_a_whole_block() -> None:
    """A request that would find no room for the block it ends in is refused, and one that does is not."""
    model, prompt = tiny.model(), tiny.prompts(20)[0]
    row = 2 * 4 * model.config.layers * model.config.kv_heads * model.config.head_dim  # keys and values, float32
    with pytest.raises(UserError, match="lower max_tokens"):
        engine("block=200,steps=2", kv_bytes=128 * row).add(Request(prompt, tiny.greedy(N)))
    enough = engine("block=200,steps=2", kv_bytes=256 * row)
    assert tiny.outs(tiny.run(enough, [prompt], tiny.greedy(N)))[0] == alone("block=200,steps=2", prompt)


def test_the_models_own_mask_token_is_found_and_never_drawn(tmp_path: Any) -> None:
    path = tiny.write_checkpoint(tmp_path / "masked")
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | {"mask_token_id": 17}))
    model = Model.load(path)
    placed = tiny.engine({"decode": "block_diffusion:selector=static"}, of=model)
    prompt = [17, *tiny.prompts(12)[0], 17]  # in a prompt it is a token as any other
    out = tiny.outs(tiny.run(placed, [prompt], tiny.greedy(40)))[0]
    assert 17 not in out
    assert out == twin({"selector": "static", "mask": 17}, model).run(prompt, 40)
    assert 17 in tiny.outs(tiny.run(engine("selector=static"), [prompt], tiny.greedy(40)))[0]


@pytest.mark.parametrize("knobs", ["block=0", "steps=9", "steps=0", "selector=best", "selector.threshold=-1"])
def test_wrong_knobs_are_named(knobs: str) -> None:
    with pytest.raises(UserError, match=knobs.partition("=")[0].rpartition(".")[2]):
        catalog.build("decode", f"block_diffusion:{knobs}")


def test_a_mask_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match="mask=64 is outside the vocabulary"):
        engine("mask=64")
    with pytest.raises(UserError, match="selector"):
        BlockDiffusion(selector="best")
