"""gpt-oss: experts in MXFP4 as its checkpoints have them, sink scores through a whole engine, and files that lie."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from phasewise.errors import UnsupportedModel, UserError, WeightsError
from phasewise.model.mlp import MoE
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.train.heads.target import FrozenTarget
from tests import tiny
from tests.model.families import FAMILIES, make
from tests.model.reference import holds_near, prompt, run, save_random, theirs

Tensors = dict[str, torch.Tensor]
EXPERTS = "model.layers.0.mlp.experts"
BLOCKS, SCALES = f"{EXPERTS}.gate_up_proj_blocks", f"{EXPERTS}.gate_up_proj_scales"
make_wide = make("GptOssConfig", hidden_size=64, intermediate_size=96, head_dim=16, num_local_experts=5,
                 num_experts_per_tok=2, sliding_window=6, num_hidden_layers=2)  # fmt: skip


def rewrite(directory: Path, change: Callable[[Tensors], Any]) -> None:
    file = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def in_mxfp4(tensors: Tensors) -> None:
    """Random blocks take the experts' place, of ordinary size: the layout of openai's own checkpoints."""
    draw = torch.Generator().manual_seed(5)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        entries, inputs, outputs = tensors.pop(name).shape
        shape = (entries, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=draw, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(121, 125, shape, generator=draw, dtype=torch.uint8)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint in MXFP4, and transformers' model with the numbers that transformers itself makes of its blocks."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    directory = tmp_path_factory.mktemp("mxfp4")
    model = save_random(make_wide(), directory)
    rewrite(directory, in_mxfp4)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (directory / "config.json").write_text(json.dumps(config))
    state = load_file(directory / "model.safetensors")
    for name in [name for name in state if name.endswith("_blocks")]:
        blocks, scales = state.pop(name), state.pop(name.replace("_blocks", "_scales"))
        state[name.removesuffix("_blocks")] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    model.load_state_dict({**state, "lm_head.weight": state["lm_head.weight"]})
    return directory, model


def test_experts_in_mxfp4_are_what_transformers_makes_of_them(packed: tuple[Path, Any]) -> None:
    directory, other = packed
    tokens = prompt(2, 21)
    want = theirs(other, tokens)
    torch.testing.assert_close(run(Model.load(directory, dtype=torch.float32), tokens), want, atol=2e-4, rtol=2e-4)


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
def test_experts_stay_in_mxfp4(packed: tuple[Path, Any]) -> None:
    directory, other = packed
    model, tokens = Model.load(directory, dtype=torch.bfloat16), prompt(2, 21)
    assert model.stack is not None
    for layer, one in zip(model.layers, other.model.layers):
        assert isinstance(layer.mlp, MoE)
        for e, expert in enumerate(layer.mlp.experts):
            assert expert.gate_up.native is not None and expert.gate_up.native.forms == ("MXFP4/bfloat16",) * 2
            gate, up = one.mlp.experts.gate_up_proj[e].T[::2], one.mlp.experts.gate_up_proj[e].T[1::2]
            assert torch.equal(expert.gate_up.dense().float(), torch.cat((gate, up)))
            assert torch.equal(expert.down.dense().float(), one.mlp.experts.down_proj[e].T)
    holds_near(run(model, tokens), theirs(other, tokens), 0.06)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("plain")
    return directory, save_random(FAMILIES["gpt_oss"](), directory)


METHODS: list[dict[str, str]] = [
    {},
    {"decode": "speculative", "draft": "prompt_lookup"},
    {"decode": "speculative", "draft": "token_recycling"},  # a tree
    {"schedule": "sarathi:budget=8"},
    {"schedule": "layered:rows_per_group=8"},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("methods", METHODS, ids=[str([*each.values()]) for each in METHODS])
def test_greedy_texts_are_the_models_own(methods: dict[str, str], dtype: torch.dtype, plain: tuple[Path, Any]) -> None:
    """Of several requests at once, with prompts longer than a window: transformers' in float32, and in bfloat16 with
    kernels what plain decoding says there."""
    directory, other = plain
    model, prompts = (
        Model.load(directory, dtype=dtype),
        [prompt(3, 30), prompt(3, 30)[:20] + prompt(4, 15), prompt(5, 3)],
    )
    found = tiny.outs(tiny.run(tiny.engine(methods, of=model), prompts, tiny.greedy(24)))
    if dtype == torch.bfloat16:
        assert found == tiny.outs(tiny.run(tiny.engine(of=model), prompts, tiny.greedy(24)))
        return
    for tokens, got in zip(prompts, found):
        with torch.inference_mode():
            want = other.generate(torch.tensor([tokens]), max_new_tokens=24, do_sample=False, eos_token_id=-1)
        assert got == want[0, len(tokens) :].tolist()


def test_rows_may_be_evicted(plain: tuple[Path, Any]) -> None:
    """What an evicting method hides goes through the sink scores too: as in float32 by torch's operators."""
    directory, _ = plain
    given = {"evict": "streaming:sinks=2,window=40"}
    for dtype in (torch.float32, torch.bfloat16):
        model = Model.load(directory, dtype=dtype)
        evicting, whole = (tiny.outs(tiny.run(tiny.engine(by, of=model), [prompt(3, 30)], tiny.greedy(8)))
                           for by in (given, {}))  # fmt: skip
        assert evicting == whole, "nothing is far enough to be hidden yet"
        tiny.outs(tiny.run(tiny.engine(given, of=model), [prompt(3, 60)], tiny.greedy(30)))


def test_what_does_not_know_of_sink_scores_is_refused(plain: tuple[Path, Any]) -> None:
    model = Model.load(plain[0], dtype=torch.float32)
    with pytest.raises(UserError, match=r"quest.*sink scores"):
        tiny.engine({"attend": "quest"}, of=model)
    with pytest.raises(UnsupportedModel, match="sink scores"):
        FrozenTarget(str(plain[0]))


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda t: t.pop(SCALES), SCALES),
        (lambda t: t.update({SCALES: t[SCALES][:, :-1].contiguous()}), SCALES),
        (lambda t: t.update({SCALES: torch.full_like(t[SCALES], 255)}), "no number"),
        (lambda t: t.update({BLOCKS: t[BLOCKS][..., :8].contiguous()}), "blocks of 16"),
        (lambda t: t.update({BLOCKS: t[BLOCKS].int()}), "torch.int32"),
        (lambda t: t.update({BLOCKS: t[BLOCKS].flatten(2)}), "shape"),
        (lambda t: t.update({f"{EXPERTS}.gate_up_proj": torch.zeros(5, 64, 192)}), "in bfloat16 and in MXFP4"),
        (lambda t: t.update({BLOCKS: t[BLOCKS][:4].contiguous(), SCALES: t[SCALES][:4].contiguous()}), "experts.4"),
    ],
)
def test_lying_files(change: Callable[[Tensors], Any], said: str, packed: tuple[Path, Any], tmp_path: Path) -> None:
    directory, _ = packed
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    rewrite(tmp_path, change)
    with pytest.raises(WeightsError) as caught:
        Model.load(tmp_path)
    assert said in str(caught.value) and str(tmp_path) in str(caught.value)
