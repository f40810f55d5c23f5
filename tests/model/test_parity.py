"""Every family gives the logits of transformers, however the rows of a request are spread over steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from phasewise.model.model import Model
from phasewise.model.rope import Rotary

from .families import FAMILIES, ROPES
from .reference import Runner, prompt, run, save_random, theirs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOLERANCE = 1e-4


@dataclass
class Pair:
    theirs: PreTrainedModel
    ours: Model
    directory: Path


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp(request.param)
    reference = save_random(FAMILIES[request.param](), directory)
    yield Pair(reference, Model.load(directory), directory)


def close(ours: torch.Tensor, reference: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert ours.shape == reference.shape
    assert ours.dtype == torch.float32
    assert reference.std() > 0.2, "the reference's logits say nothing"
    torch.testing.assert_close(ours, reference, atol=tolerance, rtol=tolerance)


def test_whole_prompt(pair: Pair) -> None:
    tokens = prompt(1, 23)
    close(run(pair.ours, tokens), theirs(pair.theirs, tokens))


def test_chunks_and_decode(pair: Pair) -> None:
    """A chunk of one is decoding from the first token on."""
    tokens, want = prompt(2, 19), theirs(pair.theirs, prompt(2, 19))
    for chunk in (1, 9):
        close(run(pair.ours, tokens, chunk), want)


def test_mixed_batches(pair: Pair) -> None:
    """Three requests of different lengths: prefill whole, prefill in chunks and decode share their steps."""
    prompts = [prompt(3, 17), prompt(4, 9), prompt(5, 12)]
    runner = Runner(pair.ours, 3)
    left = [list(tokens) for tokens in prompts]
    for sizes in [(5, 0, 1), (1, 7, 1), (6, 1, 0), (0, 1, 8), (5, 0, 2)]:
        parts = [tokens[:n] for tokens, n in zip(left, sizes)]
        left = [tokens[n:] for tokens, n in zip(left, sizes)]
        runner.step(parts)
    assert not any(left)
    for r, tokens in enumerate(prompts):
        close(runner.result(r), theirs(pair.theirs, tokens))


def test_layers_matter(pair: Pair) -> None:
    """Otherwise the comparisons above would compare embeddings: each layer must move the logits by far more than
    the tolerance."""
    tokens = prompt(6, 12)
    whole = run(pair.ours, tokens)
    for i, layer in enumerate(pair.ours.layers):
        layers = pair.ours.layers
        pair.ours.layers = (*layers[:i], lambda x, ctx, deltas: x, *layers[i + 1 :])  # type: ignore[assignment]
        try:
            assert (run(pair.ours, tokens) - whole).abs().max() > 0.05, layer
        finally:
            pair.ours.layers = layers


def test_weight_bytes(pair: Pair) -> None:
    assert pair.ours.weight_bytes == sum(p.nbytes for p in pair.theirs.parameters())


def test_any_subset_of_rows(pair: Pair) -> None:
    """Tables of some rows are those rows of the tables, and a layer gives a row the same without its mates."""
    positions = torch.tensor([3, 0, 9, 4, 200])
    index = torch.tensor([4, 1, 2])
    part, direct = pair.ours.rotary(positions).take(index), pair.ours.rotary(positions[index])
    for kind in range(len(part.tables)):
        taken, wanted = part.rows(kind), direct.rows(kind)
        assert all(torch.equal(a, b) for a, b in zip(taken, wanted))

    class Alone:
        def __init__(self, rotary: Rotary) -> None:
            self.rotary = rotary

        def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return q + k.repeat_interleave(q.shape[1] // k.shape[1], 1)

        def count(self, counter: str, n: int) -> None: ...

    with torch.inference_mode():
        x = pair.ours.embed(torch.tensor(prompt(1, 5)))
        for i in range(pair.ours.config.layers):
            whole = pair.ours.layer(i, x, Alone(pair.ours.rotary(positions)))
            some = pair.ours.layer(i, x[index], Alone(part))
            torch.testing.assert_close(some, whole[index], atol=1e-4, rtol=1e-4)
            none = pair.ours.layer(i, x[:0], Alone(part.take(index[:0])))
            assert none.shape == (0, x.shape[1])


def test_inputs_stay(pair: Pair) -> None:
    """Rows handed in may be tapped by others, so no layer may write into them."""
    tokens = prompt(7, 8)
    runner = Runner(pair.ours)
    original = pair.ours.layer

    def guarded(i: int, x: torch.Tensor, ctx: object) -> torch.Tensor:
        before = x.clone()
        y = original(i, x, ctx)  # type: ignore[arg-type]
        assert torch.equal(x, before), f"layer {i} changed its input"
        assert y.data_ptr() != x.data_ptr()
        return y

    pair.ours.layer = guarded  # type: ignore[method-assign]
    try:
        runner.step([tokens])
    finally:
        del pair.ours.layer


def test_keys_move_as_one(pair: Pair) -> None:
    """`rotate` by delta gives the keys of a request that began delta positions later; NoPE keys stay."""
    tokens = torch.tensor(prompt(8, 6))
    delta = 11

    class Keys:
        def __init__(self, start: int) -> None:
            self.rotary = pair.ours.rotary(torch.arange(start, start + 6))
            self.k: torch.Tensor | None = None

        def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self.k = k.clone()
            return torch.zeros_like(q)

        def count(self, counter: str, n: int) -> None: ...

    with torch.inference_mode():
        x = pair.ours.embed(tokens)
        for i in range(pair.ours.config.layers):
            here, later = Keys(0), Keys(delta)
            pair.ours.layer(i, x, here)
            pair.ours.layer(i, x, later)
            moved = pair.ours.rotate(i, here.k, delta)
            torch.testing.assert_close(moved, later.k, atol=1e-4, rtol=1e-4)
            each = pair.ours.rotate(i, here.k, torch.full((6, 1), delta))
            torch.testing.assert_close(each, moved)
            if pair.ours.config.rope_of[i] is None:
                assert torch.equal(moved, here.k)
            else:
                assert (moved - here.k).abs().max() > 0.1


@pytest.mark.parametrize("name", sorted(ROPES))
def test_rope_scaling(name: str, tmp_path: Path) -> None:
    reference = save_random(ROPES[name](), tmp_path)
    ours = Model.load(tmp_path)
    tokens = prompt(1, 60)
    close(run(ours, tokens), theirs(reference, tokens))
    close(run(ours, tokens, 7), theirs(reference, tokens))


@pytest.mark.parametrize(("name", "context"), [("longrope", 90), ("dynamic", 300)])
def test_rope_beyond_the_trained_length(name: str, context: int, tmp_path: Path) -> None:
    """Frequencies that follow the length are those of the context asked for, for every row of every request."""
    reference = save_random(ROPES[name](), tmp_path)
    tokens = prompt(2, context)
    close(run(Model.load(tmp_path, context=context), tokens), theirs(reference, tokens))
    assert (run(Model.load(tmp_path), tokens) - theirs(reference, tokens)).abs().max() > 0.01


def test_old_config_keys(tmp_path: Path) -> None:
    """Checkpoints from before `rope_parameters` have rope_theta and rope_scaling at the top, with `type` inside."""
    reference = save_random(ROPES["llama3"](), tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    settings = values.pop("rope_parameters")
    values["rope_theta"] = settings.pop("rope_theta")
    settings["type"] = settings.pop("rope_type")
    values["rope_scaling"] = settings
    values["torch_dtype"] = values.pop("dtype")
    path.write_text(json.dumps(values))
    tokens = prompt(1, 30)
    close(run(Model.load(tmp_path), tokens), theirs(reference, tokens))


def test_old_gemma3_keys(tmp_path: Path) -> None:
    reference = save_random(FAMILIES["gemma3"](), tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    settings = values.pop("rope_parameters")
    values["rope_theta"] = settings["full_attention"]["rope_theta"]
    values["rope_scaling"] = {"rope_type": "linear", "factor": settings["full_attention"]["factor"]}
    values["rope_local_base_freq"] = settings["sliding_attention"]["rope_theta"]
    path.write_text(json.dumps(values))
    tokens = prompt(1, 30)
    close(run(Model.load(tmp_path), tokens), theirs(reference, tokens))


@pytest.mark.parametrize(("name", "dtype"), [
    ("llama", torch.bfloat16), ("gemma2", torch.float16), ("gemma3", torch.bfloat16), ("mixtral", torch.bfloat16),
    ("phi3", torch.float16),
])  # fmt: skip
def test_half_precision(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Loaded in 16 bits the logits stay as near to float32's as transformers' own 16-bit run does."""
    reference = save_random(FAMILIES[name](), tmp_path)
    tokens = prompt(1, 16)
    exact = theirs(reference, tokens)
    ours = Model.load(tmp_path, dtype=dtype)
    assert ours.dtype == dtype
    got = run(ours, tokens)
    assert got.dtype == torch.float32
    error = (got - exact).norm() / exact.norm()
    their_error = (theirs(reference.to(dtype), tokens) - exact).norm() / exact.norm()
    assert 0 < error < max(1.5 * their_error, 0.01)
