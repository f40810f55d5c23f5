"""Low-rank weights: what they add, for whom, and that nobody else in the batch notices."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from phasewise.engine.assembly import kv_shapes
from phasewise.kv.buffer import Ledger
from phasewise.kv.format import Raw
from phasewise.kv.store import Store
from phasewise.methods.attend.dense import Dense
from phasewise.model import artefacts
from phasewise.model.artefacts import Artefact
from phasewise.model.lowrank import Delta, Deltas, shapes
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.request.counters import Counters
from phasewise.request.request import Request
from phasewise.step.forward import forward
from phasewise.step.phase import Phase
from phasewise.step.span import Span
from phasewise.verbs.skip import Skip
from tests import tiny


class Everything(Skip):
    """A skip method that skips nothing, but whose rows run with low-rank weights."""

    def __init__(self, delta: Delta) -> None:
        self.delta = delta

    def rows(self, layer: int, span: Span, x: Tensor) -> Tensor | None:
        return None


def delta(model: Model, seed: int, layers: Sequence[int] = range(4)) -> Delta:
    wanted = Artefact("test.delta", shapes(model.config, layers, 4))
    return Delta(artefacts.random(wanted, str(seed)), model.dtype, model.device)


def phase(of: Delta | None) -> Phase:
    return Phase("test", None, Dense(), skip=None if of is None else Everything(of))  # type: ignore[arg-type]


@torch.inference_mode()
def run(model: Model, mates: Sequence[tuple[list[int], Phase]]) -> list[Tensor]:
    """The hidden rows of prompts that share one forward, all on the open path (a tap sees to that)."""
    store = Store(kv_shapes(model), Raw(), ledger=Ledger(1 << 40), counters=Counters())
    spans = []
    for prompt, its in mates:
        request = Request(prompt)
        spans.append(Span(request, store.open(request, len(prompt)), its, prompt, range(len(prompt))))
    x = forward(model, spans, Counters(), {0}).x
    return [x[span.slice].clone() for span in spans]


@pytest.mark.parametrize("experts", [0, 4], ids=["dense", "experts"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_only_the_rows_of_their_phase_run_with_them(dtype: torch.dtype, experts: int) -> None:
    model = Model.load(tiny.checkpoint(hidden=64, experts=experts), dtype=dtype)
    exact = dtype == torch.bfloat16 and native.library() is not None
    close = {"atol": 0, "rtol": 0} if exact else {"atol": 1e-2 if dtype == torch.bfloat16 else 1e-4, "rtol": 1e-2}
    prompts = tiny.prompts(9, 5, 12)
    phases = [phase(delta(model, 1)), phase(None), phase(delta(model, 2, [0, 2]))]
    alone = [run(model, [mate])[0] for mate in zip(prompts, phases)]
    together = run(model, list(zip(prompts, phases)))
    for mine, theirs in zip(together, alone):
        torch.testing.assert_close(mine, theirs, **close)
    plain = [run(model, [(prompt, phases[1])])[0] for prompt in prompts]
    assert torch.equal(plain[1], alone[1])
    assert all((alone[i] - plain[i]).abs().max() > 0.1 for i in (0, 2)), "they are at work"


def test_they_add_the_product_of_two_small_matrices() -> None:
    a, b, x = torch.randn(3, 20), torch.randn(7, 3), torch.randn(5, 20)
    one = Delta({"2.o.a": a, "2.o.b": b}, torch.float32, torch.device("cpu"))
    assert one(1, "o", x) is None and one(2, "down", x) is None
    y = torch.randn(5, 7)
    want = y.double() + x.double() @ a.double().T @ b.double().T
    got = y.clone()
    Deltas([(one, None)]).add(2, "o", x, got)
    torch.testing.assert_close(got, want.float(), atol=1e-5, rtol=1e-5)
    some = y.clone()
    Deltas([(one, torch.tensor([3, 1]))]).add(2, "o", x, some)
    torch.testing.assert_close(some[[1, 3]], want.float()[[1, 3]], atol=1e-5, rtol=1e-5)
    assert torch.equal(some[[0, 2, 4]], y[[0, 2, 4]])


def test_shapes_are_those_of_the_linear_layers() -> None:
    config = Model.load(tiny.checkpoint()).config  # 48 wide, 4 heads of 12, 2 KV heads, 96 inside
    assert shapes(config, [1], 8) == {
        "1.qkv.a": (8, 48), "1.qkv.b": (96, 8), "1.o.a": (8, 48), "1.o.b": (48, 8),
        "1.gate_up.a": (8, 48), "1.gate_up.b": (192, 8), "1.down.a": (8, 96), "1.down.b": (48, 8),
    }  # fmt: skip
    routed = Model.load(tiny.checkpoint(experts=4)).config
    assert {name.split(".")[1] for name in shapes(routed, range(4), 8)} == {"qkv", "o"}
