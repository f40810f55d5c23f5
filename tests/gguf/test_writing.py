"""GGUF files that are written: read by the format's own package, and by the reader here, as the model that they are."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from phasewise.errors import UnsupportedModel
from phasewise.gguf.checkpoint import GGUFModel
from phasewise.load import load_model
from phasewise.model.model import Model
from phasewise.model.source import source
from phasewise.model.weights_form import Calibration, WeightsForm, parse_form
from phasewise.ops import native
from phasewise.train import few_bits
from phasewise.train.few_bits import FewBitsJob, convert
from tests.gguf.test_kept_forms import write
from tests.gguf.writer import Conversion
from tests.model.families import make
from tests.model.reference import holds_near, run, save_random
from tests.model.test_levels import MODELS, SIZES, TOKENS, rounded_linears
from tests.serve.tiny_chat import write_tokenizer
from tests.train.test_few_bits import silent

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
DIRECTORIES = {
    "llama": make("LlamaConfig", **SIZES, tie_word_embeddings=True),
    "llama 3": make("LlamaConfig", **SIZES, rope_parameters=LLAMA3),
    "qwen2": make("Qwen2Config", **SIZES),
    "qwen3": make("Qwen3Config", **SIZES, head_dim=16),
}
FORMS = {"int4:group=32": "Q4_0", "int4:group=64,zeros=true": "Q4_1", "int8:group=64": "Q8_0"}


@pytest.mark.parametrize("name", DIRECTORIES)
def test_a_directory_becomes_a_file(name: str, tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out.gguf"
    save_random(DIRECTORIES[name](), base)
    write_tokenizer(base)
    text = list(FORMS)[list(DIRECTORIES).index(name) % 3]
    form, kind = parse_form(text)[0], FORMS[text]
    convert(FewBitsJob(str(base), out, form), silent)
    types = {each.name: each.tensor_type.name for each in gguf.GGUFReader(out).tensors}
    assert {types[name] for name in types if "attn_q.weight" in name or "ffn_down" in name} == {kind}
    assert types["token_embd.weight"] == "BF16" and types["output_norm.weight"] == "F32"
    ours, theirs = Model.load(out), load_model(str(base), weights=text)
    assert {each for layer in ours.layers for each in layer.o.native.forms} == {f"{kind}/bfloat16"}  # type: ignore[union-attr]
    meant = load_model(str(base), dtype=torch.float32, weights=text)
    for a, b in zip(rounded_linears(Model.load(out, dtype=torch.float32)), rounded_linears(meant), strict=True):
        assert torch.equal(a, b)
    holds_near(run(ours, TOKENS), run(theirs, TOKENS), 0.03)
    one, other = source(out), source(base)
    for words in ("the quick brown fox 123", "<|im_start|>user\nthe dog<|im_end|>", "naïve  café\n\n你好"):
        assert one.tokenizer().encode(words).ids == other.tokenizer().encode(words).ids
    assert one.templates() == other.templates() and ours.config.eos == theirs.config.eos


@pytest.mark.parametrize("how", ["rtn", "awq"])
def test_a_file_becomes_another(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata, embeddings, head and norms stay as they are, but for norms that AWQ folds into."""
    base = write(tmp_path / "base.gguf", {"": "F32", "token_embd": "Q8_0", "output": "Q6_K"})
    out = tmp_path / "out.gguf"
    texts = [[3 + i * j % 90 for i in range(40)] for j in range(5)]
    monkeypatch.setattr(few_bits, "calibration_texts", lambda *told: texts)
    convert(FewBitsJob(str(base), out, WeightsForm("int4", 32), Calibration(how)), silent)  # type: ignore[arg-type]
    before, after = GGUFModel(base), GGUFModel(out)
    kept = {key for key in before.meta.values if not key.startswith("general.")}
    assert all(before.meta.values[key] == after.meta.values[key] for key in kept)
    for name, (file, info) in before.stored.items():
        theirs, now = after.stored[name]
        same = np.array_equal(file.data(info), theirs.data(now)) if info.type.name == now.type.name else None
        linear = any(
            part in name for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        )
        assert (now.type.name == "Q4_0" and same is None) if linear else same or (how == "awq" and "_norm" in name)
    want, got = (run(Model.load(each, dtype=torch.float32), TOKENS) for each in (base, out))
    assert 0 < float((got - want).norm() / want.norm()) < 0.35


def test_experts_stay_together(tmp_path: Path) -> None:
    save_random(MODELS["mixtral"](), tmp_path / "base")
    base = Conversion().write(tmp_path / "base", tmp_path / "base.gguf")
    convert(FewBitsJob(str(base), tmp_path / "out.gguf", WeightsForm("int4", 32, True)), silent)
    for a, b in zip(rounded_linears(Model.load(tmp_path / "out.gguf", dtype=torch.float32)),
                    rounded_linears(load_model(str(base), dtype=torch.float32, weights="int4:group=32,zeros=true")),
                    strict=True):  # fmt: skip
        assert torch.equal(a, b)


def test_what_a_file_cannot_say_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for name, says in (("phi3", "a .gguf file of a phi3 is written from another"), ("mixtral", "mixtral")):
        save_random(MODELS[name](), tmp_path / name)
        write_tokenizer(tmp_path / name)
        with pytest.raises(UnsupportedModel, match=says):
            convert(FewBitsJob(str(tmp_path / name), tmp_path / "out.gguf", WeightsForm("int4", 32)), silent)
    save_random(make("MistralConfig", **SIZES, sliding_window=5)(), tmp_path / "window")
    write_tokenizer(tmp_path / "window")
    with pytest.raises(UnsupportedModel, match="cannot say attention. Name a folder"):
        convert(FewBitsJob(str(tmp_path / "window"), tmp_path / "out.gguf", WeightsForm("int4", 32)), silent)
    assert not list(tmp_path.glob("out.gguf*"))
