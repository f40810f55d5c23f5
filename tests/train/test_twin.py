"""The training decoder is the engine's twin: the same logits (float32) for whatever a method does when it serves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from phasewise.methods.skip.unified import Unified, kept
from phasewise.model import artefacts
from phasewise.model.lowrank import Delta
from phasewise.model.model import Model
from phasewise.request.counters import Counters
from phasewise.step.forward import forward
from phasewise.step.phase import Phase
from phasewise.step.span import Span, ancestors, depths
from phasewise.train import dense
from phasewise.train.artefacts.skip_unified import replying
from phasewise.train.dense import DenseDecoder, DenseShape, TokenBlock
from phasewise.train.exchanges import exchange
from phasewise.train.lowrank import LowRank
from phasewise.train.passes import Pass
from phasewise.verbs.host import Host
from tests import oracle, tiny, uncached
from tests.kv.harness import Walk

SHAPE = DenseShape(300, 48, 6, 4, 2, 80, head_dim=16, max_position_embeddings=512)
LAYERS = kept(SHAPE.num_hidden_layers, 2)
CLOSE = {"atol": 1e-4, "rtol": 1e-4}
PROMPTS, REPLIES = tiny.prompts(40, 7, 29, vocab=300), tiny.prompts(12, 9, 1, seed=1, vocab=300)


@cache
def folder() -> Path:
    """A checkpoint in which every layer does something."""
    torch.manual_seed(0)
    model = DenseDecoder(SHAPE)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.normal_(parameter, std=0.15)
        elif parameter.ndim == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    path = Path(mkdtemp(prefix="phasewise-twin-"))
    dense.save(model, path, [1])
    return path


@cache
def twin() -> DenseDecoder:
    return dense.load(folder()).requires_grad_(False)


@cache
def engine(dtype: torch.dtype = torch.float32) -> Model:
    return Model.load(folder(), dtype=dtype)


def skipping(weights: str, of: Model | None = None) -> Any:
    """What an engine binds for skip.unified."""
    host = Host(of or engine(), None, Counters(), None, None)  # type: ignore[arg-type]
    return Unified(2, weights).bind(host)


def tuned(seed: int) -> LowRank:
    """The low-rank weights that `random:seed` stands for, as training holds them."""
    wanted = Unified(2).artefact(engine().config)
    delta = LowRank(wanted.shapes).requires_grad_(False)
    for name, value in artefacts.random(wanted, str(seed)).items():
        delta[name].copy_(value)
    return delta


def logits(hidden: Tensor) -> Tensor:
    return F.linear(hidden, twin().embed_tokens.weight)


def served(skip: Any, prompt: Sequence[int], reply: Sequence[int], of: Model | None = None) -> Tensor:
    """Logits of a reply's rows in the engine: the prompt as a prompt, then the reply in pieces."""
    walk = Walk(of or engine(), prompt, skip=skip)
    walk.feed(prompt)
    pieces = [reply[:1], reply[1:4], reply[4:]]
    return torch.cat([walk.feed(piece) for piece in pieces if piece])


def test_plain() -> None:
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        torch.testing.assert_close(twin()(ids)[0], oracle.logits(folder(), prompt), **CLOSE)


@pytest.mark.parametrize("seed", [None, 3], ids=["untuned", "low-rank"])
def test_shallow_replies_over_the_kv_of_full_depth_prompts(seed: int | None) -> None:
    """As skip.unified serves; prompts and replies of several lengths in one padded block."""
    delta = None if seed is None else tuned(seed)
    skip = skipping("none" if seed is None else f"random:{seed}")
    both = exchange([(p, [*r, 0]) for p, r in zip(PROMPTS, REPLIES)], 0)
    how = replying(twin(), delta, LAYERS, [both])
    found = logits(twin().hidden([both.replies], how)).view(*both.replies.ids.shape, -1)
    for row, prompt, reply in zip(found, PROMPTS, REPLIES):
        torch.testing.assert_close(row[: len(reply)], served(skip, prompt, reply), **CLOSE)
        plain = oracle.logits(folder(), prompt + reply)[len(prompt) :]
        assert (row[: len(reply)] - plain).abs().max() > 0.1, "skipping matters, or the test tests little"


def test_low_rank_weights_matter_and_zero_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    want = served(skipping("none"), PROMPTS[0], REPLIES[0])
    assert (served(skipping("random:3"), PROMPTS[0], REPLIES[0]) - want).abs().max() > 0.1
    shapes = Unified(2).artefact(engine().config).shapes
    for dtype in (torch.float32, torch.bfloat16):
        model = engine(dtype)
        monkeypatch.setattr(model, "stack", None)  # low-rank weights are for the open path
        nothing = skipping("none", model)
        want = served(nothing, PROMPTS[0], REPLIES[0], model)
        nothing.delta = Delta({name: torch.zeros(shape) for name, shape in shapes.items()}, dtype, model.device)
        assert torch.equal(served(nothing, PROMPTS[0], REPLIES[0], model), want), "not a bit"
    both = exchange([(PROMPTS[0], REPLIES[0])], 0)
    fresh, none = (replying(twin(), delta, LAYERS, [both]) for delta in (LowRank(shapes), None))
    assert torch.equal(twin().hidden([both.replies], fresh), twin().hidden([both.replies], none)), (
        "training starts here"
    )


@pytest.mark.parametrize("length", [dense.SHORT - 20, dense.SHORT + 20], ids=["plain", "fused"])
def test_one_pass_with_gates_and_tuned_rows_is_the_same(length: int) -> None:
    """A prompt and its reply in one row: who skips a layer leaves no keys there, and only replies are tuned."""
    prompt, reply = tiny.prompts(length - 9, vocab=300)[0], REPLIES[1]
    replies = torch.arange(length) >= len(prompt)
    gates = [True if layer in LAYERS else ~replies for layer in range(SHAPE.num_hidden_layers)]
    how = Pass(gates=gates, delta=tuned(3), tuned=replies)
    ids = torch.tensor([prompt + reply])
    found = logits(twin().hidden([TokenBlock.of(ids, ids)], how))[len(prompt) :]
    torch.testing.assert_close(found, served(skipping("random:3"), prompt, reply), **CLOSE)


def test_masks() -> None:
    """A tree of guesses over a prompt: rows see their ancestors alone."""
    parents, prompt, tokens = [-1, 0, 0, 2, 1], PROMPTS[2], [5, 9, 4, 4, 7]
    walk = Walk(engine(), prompt)
    walk.feed(prompt)
    want = walk.try_(tokens, parents)
    sees = ancestors(parents)[None]
    (past,) = twin().prefill(
        [TokenBlock.of(torch.tensor([prompt]), torch.tensor([prompt]))], [torch.ones(1, 29, dtype=torch.bool)]
    )
    ids, positions = torch.tensor([tokens]), torch.tensor([depths(parents)]) + len(prompt)
    found = logits(twin().hidden([TokenBlock(ids, ids, positions)], Pass(past=[past], sees=lambda layer, block: sees)))
    torch.testing.assert_close(found, want, **CLOSE)
    chain = logits(twin().hidden([TokenBlock(ids, ids, positions)], Pass(past=[past])))
    assert (chain - want).abs().max() > 1e-2


@torch.inference_mode()
def test_taps() -> None:
    """Outputs of chosen layers, as a host's taps see them."""
    prompt = PROMPTS[0]
    walk = Walk(engine(), prompt)
    span = Span(walk.request, walk.kv, Phase("plain", None, uncached.PLAIN.attend), prompt, range(len(prompt)))  # type: ignore[arg-type]
    want = forward(engine(), [span], Counters(), {1, 5})
    how = Pass(taps=dict.fromkeys((1, 5), torch.empty(0)))
    twin().hidden([TokenBlock.of(torch.tensor([prompt]), torch.tensor([prompt]))], how)
    assert want.taps.keys() == how.taps.keys() == {1, 5}
    for layer, seen in how.taps.items():
        torch.testing.assert_close(seen, want.taps[layer], **CLOSE)
