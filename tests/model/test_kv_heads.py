"""Fewer KV heads: exact where they share what is kept, an ordinary checkpoint, and refused by name elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phasewise.errors import UserError
from phasewise.load import files_of
from phasewise.model import kv_heads, shards
from phasewise.model.config import ModelConfig
from phasewise.model.layout import layout
from phasewise.model.model import Model
from phasewise.model.parse import parse_config
from tests import seeds, tiny, uncached
from tests.model.families import FAMILIES, hf
from tests.model.reference import VOCAB, save_random

CONVERTED = sorted(name for name in FAMILIES if name.partition("-")[0] in kv_heads.FAMILIES)


def texts(count: int = 6, length: int = 40) -> list[list[int]]:
    return [[Random(f"{i} {j}").randrange(3, VOCAB) for j in range(length)] for i in range(count)]


def calibrated(path: Path, heads: int) -> list[kv_heads.Basis]:
    model = Model.load(path, dtype=torch.float32)
    return kv_heads.bases(model.config, kv_heads.calibrate(model, texts(), heads, lambda done: None))


def converted(path: Path, heads: int, target: Path, basis: list[kv_heads.Basis] | None = None) -> Model:
    kv_heads.convert(files_of(str(path)), heads, calibrated(path, heads) if basis is None else basis, target)
    return Model.load(target, dtype=torch.float32)


def plant(path: Path, joined: int) -> None:
    """Make every `joined` neighbouring heads share what they cache: values by any matrix, keys by one complex number
    per rotary pair, or by any matrix where nothing is rotated."""
    gen = torch.Generator().manual_seed(7)
    tensors, config = load_file(path / "model.safetensors"), parse_config(files_of(str(path)).settings())
    d, names = config.head_dim, layout(config)
    for layer in range(config.layers):
        for group in range(config.kv_heads // joined):
            for other in range(1, joined):
                by = {"v": torch.randn(d, d, generator=gen) / d**0.5, "k": torch.randn(d, d, generator=gen) / d**0.5}
                if config.rope_of[layer] is not None:
                    re, im = torch.randn(2, d // 2, generator=gen)
                    by["k"] = torch.cat((torch.cat((re.diag(), -im.diag()), 1), torch.cat((im.diag(), re.diag()), 1)))
                for key in ("qkv", "qkv.bias"):
                    for (name, _), kind in list(zip(names.get(f"{layer}.{key}", ()), "qkv"))[1:]:
                        rows = tensors[name].view(config.kv_heads, d, -1)
                        rows[group * joined + other] = by[kind] @ rows[group * joined]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def logits(model: Model) -> Tensor:
    return torch.cat([uncached.logits(model, text) for text in texts(2, 30)])


@pytest.mark.parametrize("name", seeds.params(CONVERTED, 3, "KV heads"))
def test_heads_that_share_their_directions_lose_nothing(name: str, tmp_path: Path) -> None:
    """Biases, windows, experts and layers without rotary positions included; another implementation reads it so too."""
    small = tmp_path / "small"
    save_random(FAMILIES[name](), small)
    heads = parse_config(files_of(str(small)).settings()).kv_heads
    plant(small, heads)
    one = converted(small, 1, tmp_path / "one")
    assert one.config.kv_heads == 1
    want = logits(Model.load(small, dtype=torch.float32))
    torch.testing.assert_close(logits(one), want, atol=2e-4, rtol=1e-4)
    with torch.no_grad():
        ids = torch.tensor(texts(2, 20))
        models = [hf.AutoModelForCausalLM.from_pretrained(at, dtype=torch.float32).eval()
                  for at in (small, tmp_path / "one")]  # fmt: skip
        torch.testing.assert_close(models[1](ids).logits, models[0](ids).logits, atol=2e-4, rtol=1e-4)


def test_directions_that_differ_do_lose_and_averages_lose_what_is_planted(tmp_path: Path) -> None:
    save_random(FAMILIES["llama"](), tmp_path / "small")
    free = converted(tmp_path / "small", 1, tmp_path / "free")
    assert (logits(free) - logits(Model.load(tmp_path / "small"))).abs().max() > 0.05
    plant(tmp_path / "small", 2)
    config = kv_heads.check(files_of(str(tmp_path / "small")), 1)
    mean = converted(tmp_path / "small", 1, tmp_path / "mean", kv_heads.means(config, 1))
    assert (logits(mean) - logits(Model.load(tmp_path / "small"))).abs().max() > 0.05


def test_as_many_heads_is_the_same_model_to_the_bit(tmp_path: Path) -> None:
    save_random(FAMILIES["qwen2"](), tmp_path / "small")
    converted(tmp_path / "small", 2, tmp_path / "same")
    before, after = (load_file(tmp_path / at / "model.safetensors") for at in ("small", "same"))
    assert before.keys() - {"lm_head.weight"} == after.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())


def test_two_heads_of_four_and_a_quarter(tmp_path: Path) -> None:
    save_random(FAMILIES["llama-mha-wide-heads"](), tmp_path / "small")
    plant(tmp_path / "small", 2)
    want = logits(Model.load(tmp_path / "small"))
    two, one = (converted(tmp_path / "small", heads, tmp_path / str(heads)) for heads in (2, 1))
    torch.testing.assert_close(logits(two), want, atol=2e-4, rtol=1e-4)
    assert (logits(one) - want).abs().max() > 0.01, "the pairs share nothing with one another"


@pytest.mark.parametrize("heads", [2, 1])
def test_kv_bytes_fall_by_exactly_as_many(heads: int, tmp_path: Path) -> None:
    save_random(FAMILIES["llama-mha-wide-heads"](), tmp_path / "small")
    fewer = converted(tmp_path / "small", heads, tmp_path / "fewer")
    held = []
    for model in (Model.load(tmp_path / "small"), fewer):
        engine = tiny.engine(of=model)
        held.append(engine.store.row_bytes)
        assert len(tiny.outs(tiny.run(engine, texts(3), tiny.greedy(6)))) == 3
    assert held[0] == held[1] * (4 // heads)


def test_what_is_seen_is_what_is_cached(tmp_path: Path) -> None:
    """Moments against outer products of the engine's own KV, and pairs that are read at any angle."""
    save_random(FAMILIES["llama"](), tmp_path / "small")
    model = Model.load(tmp_path / "small")
    told: list[int] = []
    seen = kv_heads.calibrate(model, texts(2), 1, told.append)
    assert told == [1, 2]
    wanted = [torch.zeros(24, 24, dtype=torch.float64) for _ in range(6)]
    for text in texts(2):
        engine, (request,) = tiny.engine(of=model), [tiny.Request(text, tiny.greedy(2))]
        engine.add(request)
        while request.prefilling:
            engine.step()
        assert request.kv is not None
        for i, layer in enumerate(request.kv.layers):
            (part,) = layer.read()
            for j, rows in enumerate((part.k, part.v)):
                rows = rows[:, : len(text)].transpose(0, 1).flatten(1).double()
                wanted[2 * i + j] += rows.T @ rows
    for i, moments in enumerate(seen):
        torch.testing.assert_close(moments.keys[0], wanted[2 * i], atol=1e-3, rtol=1e-4)
        torch.testing.assert_close(moments.values[0], wanted[2 * i + 1], atol=1e-3, rtol=1e-4)
    for basis in kv_heads.bases(model.config, seen):
        for blocks in (basis.keys, basis.values):
            both = torch.einsum("ntde,ntdf->nef", blocks, blocks)
            torch.testing.assert_close(both, torch.eye(12, dtype=torch.float64)[None], atol=1e-9, rtol=0)


def test_the_directions_of_the_caches_carry_most(tmp_path: Path) -> None:
    """No other basis of the same kind leaves less of what was seen: not the weights', not averages, not random ones."""
    save_random(FAMILIES["llama"](), tmp_path / "small")
    files = files_of(str(tmp_path / "small"))
    model = Model.load(tmp_path / "small")
    config = kv_heads.check(files, 1)
    seen = kv_heads.calibrate(model, texts(), 1, lambda done: None)
    others = [kv_heads.means(config, 1), kv_heads.bases(config, kv_heads.of_weights(files, config, 1))]
    for layer, best in enumerate(kv_heads.bases(config, seen)):
        for other in others:
            for kind in ("keys", "values"):
                moments = getattr(seen[layer], kind)
                assert carried(moments, getattr(best, kind)) > carried(moments, getattr(other[layer], kind)) * 1.001


def carried(moments: Tensor, blocks: Tensor) -> float:
    basis = blocks.flatten(1, 2)  # [new, t * D, D]
    return float((basis.transpose(1, 2) @ moments @ basis).diagonal(dim1=1, dim2=2).sum())


def test_large_results_lie_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_random(FAMILIES["llama"](), tmp_path / "small")
    basis = calibrated(tmp_path / "small", 1)
    whole = converted(tmp_path / "small", 1, tmp_path / "whole", basis)
    monkeypatch.setattr(shards, "SHARD_BYTES", 50_000)
    split = converted(tmp_path / "small", 1, tmp_path / "split", basis)
    files = list((tmp_path / "split").glob("model-*.safetensors"))
    assert len(files) > 2 and sum(path.stat().st_size for path in files) > split.weight_bytes
    assert torch.equal(logits(whole), logits(split))


@pytest.mark.parametrize(
    ("name", "heads", "says"),
    [
        ("llama-mha-wide-heads", 3, "heads=3 does not divide the 4 KV heads .*choose one of 1, 2, 4"),
        ("llama", 4, "heads=4 does not divide the 2 KV heads .*choose one of 1, 2"),
        ("qwen3", 1, "KV heads of a qwen3 cannot be joined: a norm of each head"),
        ("gemma2", 1, "a gemma2 cannot be joined: converting this family is not supported"),
        ("phi3", 1, "in one tensor"),
    ],
)
def test_what_cannot_be_joined_is_refused_by_name(name: str, heads: int, says: str, tmp_path: Path) -> None:
    save_random(FAMILIES[name](), tmp_path / "small")
    with pytest.raises(UserError, match=says):
        kv_heads.check(files_of(str(tmp_path / "small")), heads)


def test_rounded_weights_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"model\.gguf: the numbers of a \.gguf file are rounded"):
        kv_heads.check(files_of(str(tmp_path / "model.gguf")), 1)
    save_random(FAMILIES["llama"](), tmp_path / "small")
    edit(tmp_path / "small", quantization_config={"quant_method": "gptq"})
    with pytest.raises(UserError, match="the checkpoint is quantised .gptq."):
        kv_heads.check(files_of(str(tmp_path / "small")), 1)
    half = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
    edit(tmp_path / "small", quantization_config=None, rope_parameters=half)
    with pytest.raises(UserError, match="only a part of each head is rotated"):
        kv_heads.check(files_of(str(tmp_path / "small")), 1)


def edit(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    save_random(FAMILIES["llama"](), tmp_path / "small")
    basis = calibrated(tmp_path / "small", 1)
    with pytest.raises(UserError, match="is not empty"):
        kv_heads.convert(files_of(str(tmp_path / "small")), 1, basis, tmp_path)


def test_the_config_says_how_many(tmp_path: Path) -> None:
    save_random(FAMILIES["mixtral"](), tmp_path / "small")
    made = converted(tmp_path / "small", 1, tmp_path / "one").config
    before = Model.load(tmp_path / "small").config
    assert isinstance(made, ModelConfig) and (made.kv_heads, before.kv_heads) == (1, 2)
    assert (made.heads, made.head_dim, made.attention, made.eos) == (before.heads, 12, before.attention, before.eos)
