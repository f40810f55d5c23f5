"""Every family read from a file is the family read from the directory that the file was made of."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from phasewise.errors import UnsupportedModel, UserError
from phasewise.model.config import ModelConfig
from phasewise.model.model import Model
from phasewise.model.parse import parse_config
from phasewise.model.source import source

from ..model.families import FAMILIES as OF_DIRECTORIES
from ..model.families import ROPES, SIZES, hf, make
from ..model.reference import prompt, run, save_random, theirs
from .writer import Conversion, Vocabulary


def _rope(**settings: Any) -> dict[str, Any]:
    return {"rope_theta": 10000.0, **settings}


GEMMA3 = {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 16, "num_hidden_layers": 7, "rope_parameters": {
    "full_attention": _rope(rope_type="linear", factor=8.0, rope_theta=50000.0),
    "sliding_attention": _rope(rope_type="default", rope_theta=5000.0)}}  # fmt: skip
# All that a file can say of each family: what it cannot is in the tests at the end.
FAMILIES: dict[str, Callable[[], Any]] = {
    **{name: OF_DIRECTORIES[name] for name in (
        "llama", "llama-biased-tied", "llama-mha-wide-heads", "mistral-full", "qwen2", "qwen3", "phi3",
        "phi3-partial-longrope", "olmo2", "olmo2-biased")},
    "mixtral": make("MixtralConfig", num_local_experts=5, num_experts_per_tok=2, sliding_window=None),
    "qwen3_moe": make("Qwen3MoeConfig", num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, head_dim=16,
                       norm_topk_prob=True),
    "gpt_oss": OF_DIRECTORIES["gpt_oss"],
    "smollm3": make("SmolLM3Config", num_hidden_layers=5, attention_bias=True),
    "smollm3-untied": make("SmolLM3Config", num_hidden_layers=5, tie_word_embeddings=False),
    "gemma2": make("Gemma2Config", head_dim=16, sliding_window=5, query_pre_attn_scalar=16,
                    attn_logit_softcapping=4.0, final_logit_softcapping=6.0),
    "gemma2-largest": make("Gemma2Config", head_dim=16, sliding_window=5, query_pre_attn_scalar=12, hidden_size=48,
                            num_hidden_layers=46),
    "gemma3": make("Gemma3TextConfig", **GEMMA3),
    "gemma3-largest": make("Gemma3TextConfig", **{**GEMMA3, "num_hidden_layers": 62, "query_pre_attn_scalar": 12}),
    "gemma3-capped": make("Gemma3TextConfig", **GEMMA3, final_logit_softcapping=8.0),
    "phi3-longrope": ROPES["longrope"],
    "linear": ROPES["linear"],
    "yarn": ROPES["yarn"],
    "yarn-betas": make("LlamaConfig", rope_parameters=_rope(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=8.0, beta_slow=2.0,
        attention_factor=1.25)),
    "yarn-qwen2": make("Qwen2Config", rope_parameters=_rope(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=64)),
}  # fmt: skip
# Their norms are stored plus one, which loses the last bits of weights far from it.
ROUNDED = [name for name in FAMILIES if name.startswith("gemma")]
TOKENS = prompt(1, 21)


@dataclass
class Pair:
    directory: Path
    file: Path
    name: str


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return _pair(request.param, FAMILIES[request.param](), tmp_path_factory.mktemp(request.param))


def _pair(name: str, config: Any, folder: Path, **conversion: Any) -> Pair:
    save_random(config, folder / "directory")
    return Pair(folder / "directory", Conversion(**conversion).write(folder / "directory", folder / "model.gguf"), name)


def config_of(path: Path, context: int | None = None) -> ModelConfig:
    return parse_config(source(path).settings(), context)


def single(config: ModelConfig) -> ModelConfig:
    """As a file has it: numbers in single precision, Mistral under Llama's name."""
    ropes = tuple(replace(rope, scale=float(np.float32(rope.scale))) for rope in config.ropes)
    family = "llama" if config.family == "mistral" else config.family
    return replace(config, eps=float(np.float32(config.eps)), ropes=ropes, family=family)


def test_settings(pair: Pair) -> None:
    assert single(config_of(pair.file)) == single(config_of(pair.directory))
    assert config_of(pair.file).family == single(config_of(pair.directory)).family


def test_logits(pair: Pair) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as torch's of memory that may not be written
        found = Model.load(pair.file, dtype=torch.float32)
    ours, wanted = run(found, TOKENS), run(Model.load(pair.directory, dtype=torch.float32), TOKENS)
    assert wanted.std() > 0.2, "the logits say nothing"
    if pair.name in ROUNDED:
        torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-4)
    else:
        assert torch.equal(ours, wanted)


def test_longer_contexts(tmp_path: Path) -> None:
    """Frequencies that depend on the length to serve: those of the directory for each."""
    pair = _pair("longrope", ROPES["longrope"](), tmp_path)
    for context in (64, 65, 256):
        assert single(config_of(pair.file, context)) == single(config_of(pair.directory, context))
    assert config_of(pair.file, 256).ropes != config_of(pair.file, 64).ropes


def test_llama3(tmp_path: Path) -> None:
    """A file has divisors for the frequencies instead of what they come from, each rounded by itself."""
    pair = _pair("llama3", ROPES["llama3"](), tmp_path)
    ours, wanted = config_of(pair.file), config_of(pair.directory)
    assert ours.ropes[0].inverse == pytest.approx(wanted.ropes[0].inverse, rel=1e-6)
    assert ours.ropes[0].inverse != pytest.approx(
        config_of(_pair("", ROPES["linear"](), tmp_path).file).ropes[0].inverse
    )
    found, reference = (run(Model.load(path, dtype=torch.float32), TOKENS) for path in (pair.file, pair.directory))
    torch.testing.assert_close(found, reference, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_of_older_files(name: str, tmp_path: Path) -> None:
    """A tensor for each expert."""
    pair = _pair(name, FAMILIES[name](), tmp_path, merged=False)
    found, wanted = (run(Model.load(path, dtype=torch.float32), TOKENS) for path in (pair.file, pair.directory))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_half_precision(kind: str, tmp_path: Path) -> None:
    pair = _pair("llama", FAMILIES["llama"](), tmp_path, quantise=GGMLQuantizationType[kind])
    found = Model.load(pair.file)
    assert found.dtype == torch.bfloat16
    dense = source(pair.file).tensors().read("model.layers.1.self_attn.k_proj.weight", torch.float32)
    wanted = source(pair.directory).tensors().read("model.layers.1.self_attn.k_proj.weight")
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}[kind]
    assert torch.equal(dense, wanted.to(dtype).float())


# ---- what transformers makes of the same file
WIDE = {"head_dim": 256, "query_pre_attn_scalar": 256}  # its import knows no other
IMPORTED: dict[str, Callable[[], Any]] = {
    "llama": FAMILIES["llama"],
    "llama-biased-tied": make("LlamaConfig", tie_word_embeddings=True),
    "qwen2": FAMILIES["qwen2"],
    "qwen3": make("Qwen3Config", head_dim=128),
    "qwen3_moe": make("Qwen3MoeConfig", num_experts=6, num_experts_per_tok=3, head_dim=16, norm_topk_prob=True),
    "phi3": make("Phi3Config", sliding_window=None),
    "gemma2": make("Gemma2Config", **WIDE, sliding_window=5),
    "gemma3": make("Gemma3TextConfig", **WIDE, sliding_window=5, num_hidden_layers=7),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(IMPORTED))
def test_transformers_import(name: str, tmp_path: Path) -> None:
    pair = _pair(name, IMPORTED[name](), tmp_path)
    reference = hf.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=pair.file.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ours = run(Model.load(pair.file, dtype=torch.float32), TOKENS)
    assert ours.std() > 0.2
    torch.testing.assert_close(ours, theirs(reference, TOKENS), atol=1e-4, rtol=1e-4)


# ---- what a file leaves out, or says in another way
def test_a_pattern_of_windows(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = hf.Gemma3TextConfig(**{**SIZES, **GEMMA3, "num_hidden_layers": 3, "layer_types": kinds})
    flags = [kind == "sliding_attention" for kind in kinds]
    pair = _pair("gemma3", config, tmp_path, extra={"attention.sliding_window_pattern": flags})
    assert single(config_of(pair.file)) == single(config_of(pair.directory))
    short = _pair("gemma3", config, tmp_path, extra={"attention.sliding_window_pattern": flags[:2]})
    with pytest.raises(UserError, match="sliding_window_pattern is for 2 blocks, and there are 3"):
        config_of(short.file)
    every = _pair("gemma3", config, tmp_path, extra={"attention.sliding_window_pattern": 2})
    assert [spec.window for spec in config_of(every.file).attention] == [5, None, 5]


def test_gemma3_without_a_window(tmp_path: Path) -> None:
    config = hf.Gemma3TextConfig(**{**SIZES, **GEMMA3, "layer_types": ["full_attention"] * 7})
    pair = _pair("gemma3", config, tmp_path, extra={"attention.sliding_window": None})
    ours, wanted = config_of(pair.file), config_of(pair.directory)
    assert {spec.window for spec in ours.attention} == {None}
    assert (ours.attention, ours.rope_of, ours.ropes[0]) == (wanted.attention, wanted.rope_of, wanted.ropes[0])


def test_gemma3_of_the_first_converters(tmp_path: Path) -> None:
    """They did not write the base of local layers, which was the same in all models."""
    pair = _pair("gemma3", make("Gemma3TextConfig", **GEMMA3)(), tmp_path, extra={"rope.freq_base_swa": None})
    assert config_of(pair.file).ropes[1].inverse[1] == pytest.approx(10_000.0 ** (-2 / 16))


def test_mistrals_window_is_in_no_file(tmp_path: Path) -> None:
    pair = _pair("mistral", OF_DIRECTORIES["mistral-sliding"](), tmp_path)
    assert {spec.window for spec in config_of(pair.directory).attention} == {5}
    assert {spec.window for spec in config_of(pair.file).attention} == {None}


def test_olmo3_is_no_olmo2(tmp_path: Path) -> None:
    """Its files bear the same name."""
    pair = _pair("olmo2", FAMILIES["olmo2"](), tmp_path, extra={"attention.sliding_window": 4096})
    with pytest.raises(UnsupportedModel, match="OLMo 3"):
        config_of(pair.file)


@pytest.mark.parametrize("extra", [{"rope.scaling.factor": 3.0}, {"rope.scale_linear": 3.0}])
def test_a_factor_without_a_type_is_linear(extra: dict[str, float], tmp_path: Path) -> None:
    pair = _pair("llama", FAMILIES["llama"](), tmp_path, extra=extra)
    wanted = _pair("linear", ROPES["linear"](), tmp_path / "linear")
    assert config_of(pair.file).ropes == config_of(wanted.file).ropes


def test_a_factor_of_none_or_zero_stretches_nothing(tmp_path: Path) -> None:
    plain = config_of(_pair("llama", FAMILIES["llama"](), tmp_path / "plain").file)
    for i, extra in enumerate([{"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {"rope.scale_linear": 0.0}]):
        assert config_of(_pair("llama", FAMILIES["llama"](), tmp_path / str(i), extra=extra).file) == plain


def test_unknown_scaling(tmp_path: Path) -> None:
    extra = {"rope.scaling.type": "ntk", "rope.scaling.factor": 4.0}
    pair = _pair("llama", FAMILIES["llama"](), tmp_path, extra=extra)
    with pytest.raises(UnsupportedModel, match="'ntk' cannot be read. Valid: linear, longrope, none, yarn"):
        config_of(pair.file)


def test_attention_in_both_directions(tmp_path: Path) -> None:
    pair = _pair("llama", FAMILIES["llama"](), tmp_path, extra={"attention.causal": False})
    with pytest.raises(UnsupportedModel, match="bidirectional"):
        config_of(pair.file)


@pytest.mark.parametrize("rotated", [2, 30, 44])
def test_any_share_of_a_head_may_rotate(rotated: int, tmp_path: Path) -> None:
    """Even one that times 44, in floating point, is a little less than it should be."""
    config = make("LlamaConfig", head_dim=44)()
    assert (
        config_of(_pair("llama", config, tmp_path, extra={"rope.dimension_count": rotated}).file).ropes[0].dim
        == rotated
    )


def test_sizes_of_each_layer_that_are_one(tmp_path: Path) -> None:
    plain = _pair("llama", FAMILIES["llama"](), tmp_path / "plain")
    same = {"attention.head_count_kv": [2, 2, 2], "feed_forward_length": [80, 80, 80]}
    listed = _pair("llama", FAMILIES["llama"](), tmp_path / "listed", extra=same)
    assert config_of(listed.file) == config_of(plain.file)
    other = _pair("llama", FAMILIES["llama"](), tmp_path / "other", extra={"attention.head_count_kv": [2, 4, 2]})
    with pytest.raises(UserError, match=r"llama.attention.head_count_kv must be a whole number .*\[2, 4, 2\]"):
        config_of(other.file)


def test_ends_of_answers(tmp_path: Path) -> None:
    """The ids of the metadata, and marks that end a turn in every vocabulary that has them; not text that looks so."""
    size = SIZES["vocab_size"]
    tokens = [f"t{i}" for i in range(size)]
    tokens[7], tokens[9], tokens[11] = "<|eot_id|>", "<end_of_turn>", "<|im_end|>"
    types = [1] * size
    types[7], types[9] = 3, 4
    ids = {"eos_token_id": 5, "eot_token_id": 6, "eom_token_id": 5, "bos_token_id": 4}
    vocabulary = Vocabulary("llama", tokens, types, [0.0] * size, extra=ids)
    pair = _pair("llama", FAMILIES["llama"](), tmp_path, vocabulary=vocabulary)
    config = config_of(pair.file)
    assert config.eos == (5, 6, 7, 9) and config.bos == 4


def test_an_unknown_architecture(tmp_path: Path) -> None:
    file = _pair("llama", FAMILIES["llama"](), tmp_path).file
    text = len(b"llama").to_bytes(8, "little")
    file.write_bytes(file.read_bytes().replace(text + b"llama", text + b"lamma", 1))
    with pytest.raises(UnsupportedModel, match=r"'lamma' is not supported. Did you mean llama.* Valid: gemma2, "):
        config_of(file)
