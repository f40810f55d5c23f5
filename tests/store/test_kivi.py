"""store.kivi: bytes and tails by closed form from real tensors, and keys by channel for a reason."""

from __future__ import annotations

import pytest
import torch

from phasewise.engine.engine import Engine
from phasewise.errors import UserError
from phasewise.kv.format import KEYS, VALUES, BlockCut, KVShape, Raw, block_bytes
from phasewise.methods.store._grouped import Grouped
from phasewise.methods.store.kivi import Kivi
from phasewise.model.model import Model
from phasewise.request.request import Request
from tests import oracle, tiny
from tests.kv.harness import Walk
from tests.kv.sealing import by_hand, through


def grouped(bits: int, group: int, residual: int, by_channel: tuple[bool, bool] = (True, False)) -> Grouped:
    cuts = BlockCut(residual), BlockCut(1, residual)
    return Grouped(bits, group, cuts if by_channel[0] else cuts[::-1], by_channel)


def outlying(rows: int = 128, dim: int = 64) -> torch.Tensor:
    """Keys as models have them: a channel that is far from zero, and one with a wide spread."""
    x = torch.randn(rows, dim, generator=torch.Generator().manual_seed(0))
    x[:, 3] += 20
    x[:, 40] *= 10
    return x


def error(format: Grouped, side: int, x: torch.Tensor) -> float:
    shape = KVShape(1, x.shape[1], x.dtype)
    return float((format.open(side, format.seal(side, x[None]), shape)[0] - x).norm())


def test_keys_by_token_are_several_times_worse() -> None:
    x = outlying()
    by_channel = error(grouped(2, 32, 128), KEYS, x)
    by_token = error(grouped(2, 32, 128, (False, True)), KEYS, x)
    assert by_token > 2.5 * by_channel
    assert error(grouped(4, 32, 128), KEYS, x) < by_channel / 4


@pytest.mark.parametrize("bits", [2, 4])
def test_blocks_are_rounded_number_by_number_as_the_paper_says(bits: int) -> None:
    format, slow = grouped(bits, 4, 8), by_hand(bits, 4)
    x = torch.randn(8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(through(format)(KEYS, x), slow(KEYS, x), atol=1e-12)
    for row in x:
        assert torch.allclose(through(format)(VALUES, row[None]), slow(VALUES, row[None]), atol=1e-12)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("group", [8, 32])
def test_bits_per_number(bits: int, group: int) -> None:
    shape, residual = KVShape(2, 64, torch.bfloat16), 4 * group
    format = Kivi(bits=bits, group=group, residual=residual).format()  # type: ignore[arg-type]
    assert isinstance(format, Grouped)
    for side, rows in ((KEYS, residual), (VALUES, 1)):
        planes = format.seal(side, torch.randn(2, 3 * rows, 64))
        kinds = format.kinds(side, shape)
        assert [(tuple(p.shape[2:]), p.dtype) for p in planes] == [(tuple(tail), dtype) for tail, dtype in kinds]
        taken = 8 * sum(plane.nbytes for plane in planes) / (2 * 3 * rows * 64)
        assert taken == bits + 32 / group == 8 * block_bytes(format, shape, side) / (rows * 64)


@pytest.mark.parametrize("prompt", [5, 16, 40, 100])
def test_tails_and_bytes_after_every_token(prompt: int) -> None:
    """Keys: (L + n) mod R as they are; values: min(R, L + n)."""
    bits, group, residual = 2, 4, 16
    model = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16)
    one = Walk(model, tiny.prompts(prompt)[0], format=Kivi(bits=bits, group=group, residual=residual).format())
    one.feed(one.request.prompt)
    for n in range(40):
        rows = prompt + n
        for layer in one.kv.layers:
            assert layer.blocks is not None and layer.shape.dim == 16
            keys, values = (rows - layer.blocks.rows(side) for side in (KEYS, VALUES))
            assert keys == rows % residual and values == min(residual, rows)
            sealed = (2 * rows - keys - values) * 16 * (bits + 32 / group) / 8
            assert layer.live_bytes == layer.shape.heads * (sealed + (keys + values) * 16 * 2)
        one.feed([7])


def test_what_is_read_is_counted_packed() -> None:
    """A token reads its sealed rows in the bytes they take, and the others in theirs."""
    bits, group, residual, prompt, new = 2, 4, 8, 50, 30
    engine = tiny.engine({"store": f"kivi:bits={bits},group={group},residual={residual}"}, prefix_cache=False)
    assert isinstance(engine, Engine)
    request = Request(tiny.prompts(prompt)[0], tiny.greedy(new))
    engine.add(request)
    engine.step()
    before, want = engine.counters.kv_bytes_read, 0.0
    while request.left is None:
        engine.step()
    for seen in range(prompt, prompt + new - 1):  # rows before a token's own
        keys, values = seen // residual * residual, max(0, seen - residual)
        tail = (seen + 1 - keys) + (seen + 1 - values)
        want += 4 * 2 * 12 * ((keys + values) * (bits + 32 / group) / 8 + tail * 4)
    assert engine.counters.kv_bytes_read - before == want


def test_sixteen_bits_are_as_is() -> None:
    assert type(Kivi(bits=16).format()) is Raw
    prompts = tiny.prompts(41, 70)
    got = tiny.outs(tiny.run(tiny.engine({"store": "kivi:bits=16"}), prompts))
    assert got == [oracle.greedy(tiny.checkpoint(), prompt, 16)[0] for prompt in prompts]


def test_finer_levels_come_nearer() -> None:
    tokens = tiny.prompts(120)[0]
    want, off = oracle.logits(tiny.checkpoint(), tokens)[60:], []
    for bits in (2, 4, 8):
        one = Walk(tiny.model(), tokens[:60], format=grouped(bits, 4, 8))
        one.feed(tokens[:60])
        got = torch.cat([one.feed([token]) for token in tokens[60:]])
        off.append(float(((got - want).norm(dim=-1) / want.norm(dim=-1)).mean()))
    assert off[0] > 2.5 * off[1] > 25 * off[2] > 0
    assert float((got.argmax(-1) == want.argmax(-1)).float().mean()) > 0.95, "at eight bits"


def test_prefix_blocks_hold_rows_as_they_were_made() -> None:
    engine = tiny.engine({"store": "kivi:group=4,residual=8"})
    assert isinstance(engine, Engine) and engine.store.tree is not None
    outs = []
    for _ in range(2):
        request = Request(tiny.prompts(100)[0], tiny.greedy(20))
        engine.add(request)
        while request.left is None:
            engine.step()
        outs.append(request.out)
    assert outs[0] == outs[1] and engine.counters.prefix_hits == 96
    planes = [plane for node in engine.store.tree.nodes() for layer in node.planes for plane in layer]
    assert planes and {plane.dtype for plane in planes} == {torch.float32}


@pytest.mark.parametrize(
    ("knobs", "fix"),
    [
        ("bits=3", "choose one of 2, 4, 16"),
        ("group=0", "at least 1"),
        ("group=32,residual=100", "choose 128"),
        ("residual=0", "choose 32"),
    ],
)
def test_bad_knobs_name_value_and_fix(knobs: str, fix: str) -> None:
    with pytest.raises(UserError, match=fix):
        tiny.engine({"store": f"kivi:{knobs}"})


@pytest.mark.parametrize(("text", "fixes"), [
    ("kivi:group=48,residual=144", [16]), ("kivi:group=48,residual=192", [32, 64]),
    ("kivi:group=5,residual=40", [4, 8]), ("gear:group=48", [32, 64]),
    ("gear:group=48,block=48", [16]), ("gear:group=3,block=8", [2, 4]),
])  # fmt: skip
def test_a_group_that_does_not_divide_a_line_is_refused_with_some_that_do(text: str, fixes: list[int]) -> None:
    model = tiny.model(hidden=128, heads=2, kv_heads=1)
    assert model.config.head_dim == 64
    with pytest.raises(UserError, match=f"does not divide the .* of a line: choose {' or '.join(map(str, fixes))}$"):
        tiny.engine({"store": text}, of=model)
    name, _, knobs = text.partition(":")
    for fix in fixes:
        others = [knob for knob in knobs.split(",") if not knob.startswith("group=")]
        tiny.engine({"store": f"{name}:{','.join([f'group={fix}', *others])}"}, of=model)
