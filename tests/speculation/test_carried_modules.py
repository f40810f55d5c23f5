"""MTP modules in the checkpoint of their own model: the decoder loads without them, and `draft.mtp` takes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phasewise.errors import Untrained, UserError, WeightsError
from phasewise.model.model import Model
from phasewise.request.request import Request
from phasewise.speculation.heads.layouts import feature_heads
from phasewise.speculation.heads.mtp import MTP
from tests import tiny
from tests.speculation import eagle_files as files
from tests.speculation.lanes import lane, near, noted

D, LAYERS = 40, 8  # of this width, the model's MLP is as wide as the modules'
NAMES = ("qwen", "deepseek", "mimo")


def carrying(at: Path, names: str, more: dict[str, Tensor] | None = None, **settings: Any) -> tuple[Path, Path]:
    """A checkpoint that carries a module by these names, and a folder that has the module alone."""
    model = tiny.write_checkpoint(at / "model", layers=LAYERS, hidden=D)
    module = files.mtp(at / "module", D, names=names)
    config = json.loads((model / "config.json").read_text()) | {"rope_theta": 500.0} | settings
    (model / "config.json").write_text(json.dumps(config))
    weights = model / "model.safetensors"
    save_file(load_file(weights) | load_file(module / "model.safetensors") | (more or {}), weights)
    return model, module


@pytest.mark.parametrize("names", NAMES)
@torch.inference_mode()
def test_it_says_what_its_plain_forward_says(names: str, tmp_path: Path) -> None:
    path, module = carrying(tmp_path, names)
    companion, plain = lane("auto", Model.load(path)), files.Plain(module, path)
    request = Request(tiny.prompts(9)[0])
    noted(companion, request)
    near(companion.model.head(companion.root([request]))[0], plain.logits(request.tokens, ())[0])


def test_which_half_of_the_projection_reads_the_state_is_seen(tmp_path: Path) -> None:
    """The plain forward itself, with the halves of MiMo's projection as the others have them."""
    model, module = carrying(tmp_path, "mimo")
    plain, text = files.Plain(module, model), tiny.prompts(9)[0]
    right = plain.logits(text, ())
    plain.state_first = False
    assert float((right - plain.logits(text, ())).abs().max()) > 0.1


@pytest.mark.parametrize("names", NAMES)
def test_it_drafts_as_the_same_module_in_a_folder(names: str, tmp_path: Path) -> None:
    path, module = carrying(tmp_path, names)
    prompts, model, counts = tiny.prompts(20, 9), Model.load(path), []
    plain = tiny.outs(tiny.run(tiny.engine(of=model), prompts))
    config = json.loads((module / "config.json").read_text()) | {"rope_theta": 500.0}
    (module / "config.json").write_text(json.dumps(config))
    for heads in ("auto", module):
        placed = tiny.engine({"draft": f"mtp:heads={heads},depth=3"}, of=model)
        assert tiny.outs(tiny.run(placed, prompts)) == plain
        counts.append((placed.counters.drafted, placed.counters.accepted))
    assert counts[0] == counts[1] and counts[0][0] > 0


def test_its_tensors_stay_where_they_are(tmp_path: Path) -> None:
    """In float32 they are views of the mapped file; embeddings and output head are the model's own."""
    path, _ = carrying(tmp_path, "qwen")
    model = Model.load(path)
    heads, key = feature_heads(model, ("mtp",), "auto")
    assert isinstance(heads, MTP) and key.startswith("mtp ") and heads.embed_tokens is None and heads.lm_head is None
    mapped = str((path / "model.safetensors").resolve())
    ranges = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(mapped)]
    ends = [tuple(int(end, 16) for end in each.split("-")) for each in ranges]
    at = heads.get_parameter("mtp_layers.0.input_proj.weight").data_ptr()
    assert any(first <= at < last for first, last in ends)


def test_a_folder_beside_the_model_comes_first(tmp_path: Path) -> None:
    path, _ = carrying(tmp_path, "qwen")
    model = Model.load(path)
    _, carried = feature_heads(model, ("mtp",), "auto")
    files.mtp(path / "phasewise" / "heads" / "mtp", D, seed=7)
    _, beside = feature_heads(model, ("mtp",), "auto")
    assert carried != beside


EXPERT = {"mtp.layers.0.mlp.experts.0.up_proj.weight": torch.ones(2, 2)}


@pytest.mark.parametrize(
    ("names", "more", "said"),
    [
        ("qwen", EXPERT, "mlp.experts.0.up_proj.weight is left over"),
        ("mimo", {"model.mtp_layers.1.input_proj.weight": torch.ones(2, 2)}, "carries 2 MTP modules"),
        ("deepseek", {"model.layers.9.eh_proj.weight": torch.ones(2, 2)}, "carries 2 MTP modules"),
        ("qwen", {"mtp.fc.weight": torch.ones(2, 2)}, r"input_proj.weight has shape \[2, 2\]"),
    ],
)
def test_the_model_runs_where_its_module_cannot(names: str, more: dict[str, Tensor], said: str, tmp_path: Path) -> None:
    path, _ = carrying(tmp_path, names, more)
    model = Model.load(path)
    with pytest.raises(UserError, match=said):
        feature_heads(model, ("mtp",), "auto")


def test_without_a_module_there_is_none() -> None:
    with pytest.raises(Untrained):
        feature_heads(tiny.model(), ("mtp",), "auto")


def test_other_tensors_are_left_over_as_ever(tmp_path: Path) -> None:
    for name in ("model.layers.8.enorm.weight", "mtp_layers.0.input_proj.weight", "more"):
        path, _ = carrying(tmp_path / name, "mimo", {name: torch.ones(D)})
        with pytest.raises(WeightsError, match=f"left over in model.safetensors: {name}"):
            Model.load(path)


def test_mimo_is_a_qwen2_with_a_module(tmp_path: Path) -> None:
    biases = {
        f"model.layers.{i}.self_attn.{name}_proj.bias": torch.zeros(rows)
        for i in range(LAYERS)
        for name, rows in (("q", D), ("k", D // 2), ("v", D // 2))
    }
    own = {f"model.mtp_layers.0.self_attn.{name}_proj.bias": torch.zeros(rows)
           for name, rows in (("q", D), ("k", D // 2), ("v", D // 2))}  # fmt: skip
    settings = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    path, _ = carrying(tmp_path, "mimo", biases | own, **settings)
    model = Model.load(path)
    assert model.config.family == "mimo" and model.config.qkv_bias
    placed = tiny.engine({"draft": "mtp"}, of=model)
    prompts = tiny.prompts(12)
    assert tiny.outs(tiny.run(placed, prompts)) == tiny.outs(tiny.run(tiny.engine(of=model), prompts))
    assert placed.counters.drafted > 0
