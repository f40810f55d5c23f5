"""`config.json` to ModelConfig: defaults of real checkpoints, and errors that name the file and the key."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from phasewise.errors import UnsupportedModel, UserError
from phasewise.model.config import ModelConfig
from phasewise.model.directory import Directory
from phasewise.model.families import FAMILIES
from phasewise.model.model import Model
from phasewise.model.parse import parse_config
from phasewise.model.raw import RawConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 1024,
}


def parse(context: int | None = None, **changes: Any) -> ModelConfig:
    return parse_config(RawConfig({**LLAMA, **changes}), context)


def family(name: str, **changes: Any) -> ModelConfig:
    return parse(model_type=name, architectures=None, **changes)


def fails(error: type[Exception], *words: str, **changes: Any) -> None:
    with pytest.raises(error) as raised:
        parse(**changes)
    for word in words:
        assert word in str(raised.value), str(raised.value)


def test_every_required_size_is_named_when_missing() -> None:
    for key, value in LLAMA.items():
        if isinstance(value, int) and key != "num_key_value_heads":
            fails(UserError, repr(key), **{key: None})
            fails(UserError, repr(key), "-1", **{key: -1})
            fails(UserError, repr(key), "'8'", **{key: "8"})


def test_sizes_and_numbers_that_no_model_has() -> None:
    """Told before a table of such a size is made."""
    for key in ("num_hidden_layers", "head_dim", "num_attention_heads"):
        fails(UserError, repr(key), "more than any model has", **{key: 10**9})
    for value in (float("nan"), float("inf")):
        fails(UserError, "'rms_norm_eps'", "finite", rms_norm_eps=value)


def test_no_key_value_heads_means_one_per_query_head() -> None:
    assert parse(num_key_value_heads=None).kv_heads == 4
    fails(UserError, "num_attention_heads 4", "num_key_value_heads 3", num_key_value_heads=3)


def test_end_tokens_from_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 2}))
    assert parse_config(Directory(tmp_path).settings()).eos == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert parse_config(Directory(tmp_path).settings()).eos == (7, 2)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").unlink()
    assert parse_config(Directory(tmp_path).settings()).eos == ()


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_a_broken_config_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"config\.json"):
        parse_config(Directory(tmp_path).settings())


def test_a_broken_generation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(UserError, match=r"generation_config\.json"):
        parse_config(Directory(tmp_path).settings())


def test_tied_by_default_only_where_the_family_is() -> None:
    tied = {name for name in FAMILIES if family(name).tied}
    assert tied == {"gemma2", "gemma3_text", "smollm3"}
    assert not family("gemma2", tie_word_embeddings=False).tied
    assert parse(tie_word_embeddings=True).tied


def test_windows() -> None:
    def windows(config: ModelConfig) -> list[int | None]:
        return [spec.window for spec in config.attention]

    assert windows(parse(sliding_window=8)) == [None] * 4
    assert windows(family("mistral")) == [4096] * 4
    assert windows(family("mistral", sliding_window=None)) == [None] * 4
    assert windows(family("qwen2", sliding_window=8, max_window_layers=2)) == [None] * 4
    assert windows(family("qwen2", sliding_window=8, max_window_layers=2, use_sliding_window=True)) == [
        None, None, 8, 8]  # fmt: skip
    assert windows(family("gemma2", sliding_window=8)) == [8, None, 8, None]
    assert windows(family("gemma3_text", sliding_window=8, sliding_window_pattern=3)) == [8, 8, None, 8]
    assert windows(family("qwen3_moe", sliding_window=8)) == [None] * 4
    fails(UserError, "layer_types", "1 entries for 4", model_type="gemma2", layer_types=["full_attention"])
    fails(UserError, "sliding_window", model_type="gemma2", sliding_window=None)


def test_gemma3_rotates_local_layers_by_their_own_base() -> None:
    config = family("gemma3_text", sliding_window_pattern=2, rope_theta=1e6, rope_local_base_freq=1e4, head_dim=16)
    assert config.rope_of == (1, 0, 1, 0)
    for base, rope in zip((1e6, 1e4), config.ropes):
        assert rope.inverse[1] == pytest.approx(base ** (-2 / 16))


def test_smollm3_leaves_every_fourth_layer_unrotated() -> None:
    assert family("smollm3").rope_of == (0, 0, 0, None)
    assert family("smollm3", no_rope_layers=[0, 1, 1, 0]).rope_of == (None, 0, 0, None)
    fails(UserError, "no_rope_layers", model_type="smollm3", architectures=None, no_rope_layers=[1])


def test_experts_only_where_they_are() -> None:
    config = family("qwen3_moe", mlp_only_layers=[0], decoder_sparse_step=2, num_experts=4)
    assert [spec is not None for spec in config.moe] == [False, True, False, True]
    assert all(family("mixtral").moe)


def test_scales() -> None:
    assert parse(head_dim=32).attention[0].scale == 32**-0.5
    gemma = family("gemma2", query_pre_attn_scalar=144)
    assert gemma.attention[0].scale == pytest.approx(1 / 12)
    assert gemma.embed_scale == math.sqrt(64)
    assert gemma.attention[0].softcap == 50.0 and gemma.logit_softcap == 30.0
    assert family("gemma2", attn_logit_softcapping=None).attention[0].softcap is None


def test_context() -> None:
    longrope = {"model_type": "phi3", "architectures": None, "original_max_position_embeddings": 256,
                "rope_scaling": {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}}  # fmt: skip
    assert parse().max_positions == 1024
    assert parse(context=512).max_positions == 512
    assert parse(**longrope).max_positions == 256, "beyond this length the frequencies are no longer the short ones"
    assert parse(context=1024, **longrope).max_positions == 1024
    ratio = parse(context=1024, **longrope).ropes[0].inverse[0] / parse(**longrope).ropes[0].inverse[0]
    assert ratio == pytest.approx(0.5)
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    assert parse(rope_scaling=yarn).max_positions == 4096
    dynamic = {"type": "dynamic", "factor": 2.0}
    assert parse(rope_scaling=dynamic).ropes == parse().ropes
    assert parse(context=2048, rope_scaling=dynamic).ropes != parse().ropes
    for bad in (0, -3, 1025):
        fails(UserError, f"context={bad}", "1024", context=bad)
    fails(UserError, "context=2049", "2048", context=2049, rope_scaling=dynamic)


def test_what_is_not_supported_says_so() -> None:
    fails(UnsupportedModel, "'gpt2'", "llama", "gemma3_text", model_type="gpt2")
    fails(UnsupportedModel, "''", model_type=None)
    fails(UnsupportedModel, "LlamaForSequenceClassification", architectures=["LlamaForSequenceClassification"])
    fails(UnsupportedModel, "awq", quantization_config={"quant_method": "awq"})
    fails(UnsupportedModel, "'swish'", "silu", hidden_act="swish")
    fails(UnsupportedModel, "'yam'", "yarn", rope_scaling={"rope_type": "yam"})
    fails(UnsupportedModel, "bidirectional", model_type="gemma3_text", use_bidirectional_attention=True)
    fails(UserError, "factor", rope_scaling={"rope_type": "linear"})
    fails(UserError, "'rope_scaling'", "[4.0]", rope_scaling=[4.0])
    fails(UserError, "short_factor", "8", model_type="phi3", rope_scaling={"type": "longrope", "short_factor": [1.0],
                                                                          "long_factor": [1.0]})  # fmt: skip


def test_load_names_a_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json"):
        Model.load(tmp_path, dtype=torch.float32)
