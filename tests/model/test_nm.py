"""N:M sparse checkpoints: what they compute, in every path, what they hold, and which are refused."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phasewise.cli.app import main
from phasewise.errors import UserError, WeightsError
from phasewise.load import load_model, weight_bytes, weight_forms
from phasewise.model.levels import matrices
from phasewise.model.model import Model
from phasewise.model.nm import BITMASK, COMPRESSED, PATTERNS, NMMatrix, NMPattern, largest, parse_nm, settings
from phasewise.ops import native
from phasewise.ops.native.weights import PackedWeights, pack_blocks
from phasewise.train.prune import PruneJob, prune
from tests.model.families import make
from tests.model.reference import holds_near, run, save_random
from tests.serve.tiny_chat import write_tokenizer

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "vocab_size": 330}
MODELS = {
    "llama": make("LlamaConfig", **SIZES, attention_bias=True, tie_word_embeddings=True),
    "gemma2": make("Gemma2Config", **SIZES, head_dim=32, query_pre_attn_scalar=32),
    "mixtral": make("MixtralConfig", **SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
}
TOKENS = [3 + i * 37 % 60 for i in range(24)]
needs_kernels = pytest.mark.skipif(native.library() is None, reason="no native kernels here")


@contextmanager
def silent(title: str, total: int) -> Iterator[Any]:
    yield lambda done, note="": None


def whole(config: Any, path: Path) -> None:
    """A random model with a tokenizer."""
    save_random(config, path)
    write_tokenizer(path)


def write_sparse(name: str, path: Path, pattern: str) -> None:
    """A random model's matrices as sparse ones, in the place of what is at `path`."""
    with tempfile.TemporaryDirectory() as room:
        whole(MODELS[name](), Path(room))
        prune(PruneJob(room, path, PATTERNS[pattern]), silent)


def write(name: str, path: Path, pattern: str = "2:4") -> Path:
    """`path`/sparse, of a random model at `path`/base; beside it `path`/dense, with zeros written by hand."""
    whole(MODELS[name](), path / "base")
    wanted = PATTERNS[pattern]
    prune(PruneJob(str(path / "base"), path / "sparse", wanted), silent)
    stored = load_file(path / "base" / "model.safetensors")
    for each in matrices(Model.load(path / "base").config):
        for group in stored[each].view(-1, wanted.m):
            group[group.abs().argsort(descending=True, stable=True)[wanted.n :]] = 0
    stored = {each: value.bfloat16().float() for each, value in stored.items()}
    (path / "dense").mkdir()
    (path / "dense" / "config.json").write_text((path / "base" / "config.json").read_text())
    save_file(stored, path / "dense" / "model.safetensors")
    return path


# ---- masks
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=str)
def test_of_each_group_exactly_n_are_kept(pattern: NMPattern) -> None:
    """Those of the largest magnitudes; of equal ones the earlier, and of zeros as many as of any."""
    weight = torch.randn(70, 256).round(decimals=1)
    weight[3], weight[4, :64] = 0, -1.5
    mask = largest(weight, pattern)
    groups, kept = weight.view(-1, pattern.m), mask.view(-1, pattern.m)
    assert (kept.sum(1) == pattern.n).all()
    for group, its in zip(groups, kept):
        order = group.abs().argsort(descending=True, stable=True)
        assert sorted(its.nonzero()[:, 0].tolist()) == sorted(order[: pattern.n].tolist())


# ---- packed and not
@needs_kernels
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=str)
def test_packed_and_unpacked_agree(pattern: NMPattern) -> None:
    """Rows of the weight to the bit, and products with rows to the rounding of their sums."""
    weight = torch.randn(300, 192) * torch.logspace(-3, 2, 300)[:, None]
    found = NMMatrix.of("w", weight, pattern)
    dense = torch.where(largest(weight, pattern), weight, 0).bfloat16()
    assert torch.equal(found.expanded(torch.bfloat16), dense) and torch.equal(found.mask(), dense != 0)
    layer = PackedWeights.of([pack_blocks(found, f"{pattern.kind}/bfloat16")], None)
    assert torch.equal(layer.dense(), dense)
    assert layer.nbytes == found.nbytes == weight.numel() * pattern.bits / 8
    x = torch.randn(40, 192).bfloat16()
    want = x.double() @ dense.double().T
    for rows in (x[:1], x[:5], x):
        off = (layer(rows.float()).double() - want[: len(rows)]).abs()
        assert (off <= 1e-5 * (rows.double().abs() @ dense.double().abs().T)).all()


def test_bits_of_a_weight() -> None:
    assert {str(pattern): pattern.bits for pattern in PATTERNS.values()} == {"2:4": 9, "1:4": 4.5, "1:8": 2.5}


def test_masks_are_what_compressed_tensors_unpacks() -> None:
    """With its own functions, where they are installed: bits of `sparse-24-bitmask`."""
    helpers = pytest.importorskip("compressed_tensors.utils.helpers")
    weight = torch.randn(33, 128)
    found = NMMatrix.of("w", weight, PATTERNS["2:4"])
    mask = helpers.unpack_bitmasks(found.bits, [33, 128])
    assert torch.equal(mask, largest(weight, PATTERNS["2:4"])) and torch.equal(weight[mask], weight[found.mask()])
    assert torch.equal(helpers.pack_bitmasks(mask), found.bits)


@needs_kernels
@pytest.mark.parametrize("dtype", [None, "int8"])
@pytest.mark.parametrize(
    ("name", "pattern"), [("llama", "2:4"), ("llama", "1:8"), ("gemma2", "1:4"), ("mixtral", "2:4")]
)
def test_logits_are_those_of_the_model_with_zeros(name: str, pattern: str, dtype: str | None, tmp_path: Path) -> None:
    """Exactly in float32, where zeros are written out, and to rounding where they are not."""
    path = write(name, tmp_path, pattern)
    want = run(Model.load(path / "dense", dtype=torch.float32), TOKENS)
    assert torch.allclose(run(Model.load(path / "sparse", dtype=torch.float32), TOKENS), want, atol=1e-4)
    ours = load_model(str(path / "sparse"), dtype=torch.int8 if dtype else None)
    holds_near(run(ours, TOKENS), want, 0.06)
    assert float((run(Model.load(path / "base", dtype=torch.float32), TOKENS) - want).norm()) > 0.2 * float(want.norm())


@needs_kernels
def test_what_is_held_are_blocks(tmp_path: Path) -> None:
    """No dense matrix is: every part of a layer is of the kind, and bytes are 9/16 of those in bfloat16."""
    path = write("llama", tmp_path)
    model = Model.load(path / "sparse")
    held = {part for layer in model.layers for linear in (layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down)
            for part in linear.native.forms}  # fmt: skip
    assert held == {"NM_2_4/bfloat16"} and model.stack is not None
    dense = sum(outputs * inputs * 2 for outputs, inputs in matrices(model.config).values())
    forms = weight_forms(str(path / "sparse"), None)
    assert forms["NM_2_4"].nbytes * 16 == dense * 9
    assert model.weight_bytes == weight_bytes(str(path / "sparse"), None)
    assert Model.load(path / "base", dtype=torch.bfloat16).weight_bytes - model.weight_bytes == dense * 7 // 16


# ---- what is refused
def spoil(path: Path, change: dict[str, Tensor | None], pattern: Any = None) -> None:
    stored = load_file(path / "model.safetensors")
    for name, tensor in change.items():
        stored.pop(name)
        if tensor is not None:
            stored[name] = tensor
    save_file(stored, path / "model.safetensors")
    if pattern is not None:
        config = json.loads((path / "config.json").read_text())
        config["quantization_config"]["pattern"] = pattern
        (path / "config.json").write_text(json.dumps(config))


O = "model.layers.1.self_attn.o_proj.weight"
KEPT, BITS = O + COMPRESSED, O + BITMASK
THREE = torch.full((128, 16), 0b00110011, dtype=torch.uint8)
THREE[5, 3] = 0b01110011
WHERE = r"model\.layers\.1\.self_attn\.o_proj\.weight of the nm checkpoint: "
LIES: list[tuple[dict[str, Tensor | None], Any, str]] = [
    ({BITS: None}, None, WHERE + "_bitmask is missing"),
    ({KEPT: None}, None, r"left over in .*o_proj\.weight_bitmask"),
    ({BITS: THREE}, None, WHERE + "_bitmask keeps 3 of the 4 inputs from 28 on of output 5, not 2"),
    ({BITS: torch.zeros(128, 16, dtype=torch.uint8)}, None, "keeps 0 of the 4 inputs from 0 on of output 0, not 2"),
    ({BITS: torch.zeros(128, 17, dtype=torch.uint8)}, None, r"_compressed \[128, 64\] and _bitmask \[128, 17\] do not"),
    ({BITS: torch.zeros(64, 16, dtype=torch.uint8)}, None, "do not fit each other as 2:4"),
    ({BITS: torch.zeros(128, 16)}, None, r"_bitmask is torch.float32 \[128, 16\], wanted a matrix of torch.uint8"),
    ({KEPT: torch.zeros(128, 63).bfloat16()}, None, "do not fit each other as 2:4"),
    ({KEPT: torch.zeros(128, 0).bfloat16()}, None, "do not fit each other as 2:4"),
    ({KEPT: torch.zeros(128, 64)}, None, r"_compressed is torch.float32 \[128, 64\], wanted a matrix"),
    ({KEPT: torch.full((128, 64), torch.inf).bfloat16()}, None, "_compressed has numbers that are not finite"),
    ({KEPT: torch.zeros(128, 32).bfloat16(), BITS: torch.full((128, 8), 51, dtype=torch.uint8)}, None,
     r"o_proj\.weight in .* has shape \[128, 64\]"),
    ({}, "1:4", "do not fit each other as 1:4"),
    ({}, "3:4", "pattern='3:4': kernels have 2:4, 1:4, 1:8: choose one of them"),
    ({}, ["2:4"], r"pattern=\['2:4'\]"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "pattern", "says"), LIES)
def test_files_that_lie_are_refused_by_name(
    change: dict[str, Tensor | None], pattern: Any, says: str, tmp_path: Path
) -> None:
    path = write("llama", tmp_path) / "sparse"
    spoil(path, change, pattern)
    with pytest.raises((WeightsError, UserError), match=says):
        Model.load(path)


def test_a_checkpoint_without_sparse_matrices_is_refused(tmp_path: Path) -> None:
    path = write("llama", tmp_path) / "dense"
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": settings(PATTERNS["2:4"])}))
    with pytest.raises(WeightsError, match=r"no tensor is \(none is called \*_compressed\)"):
        Model.load(path)


@needs_kernels
def test_inputs_that_are_no_whole_blocks_are_expanded_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Other programs may write such files; here they are refused before they are written."""
    odd = make("LlamaConfig", **{**SIZES, "intermediate_size": 264}, tie_word_embeddings=True)
    whole(odd(), tmp_path / "base")
    with pytest.raises(UserError, match=r"down_proj\.weight has 264 inputs, which blocks of 64 do not divide"):
        prune(PruneJob(str(tmp_path / "base"), tmp_path / "sparse", PATTERNS["2:4"]), silent)
    assert not (tmp_path / "sparse").exists()
    path = tmp_path / "base"
    stored, config = load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())
    name = "model.layers.1.mlp.down_proj.weight"
    stored |= NMMatrix.of(name, stored.pop(name), PATTERNS["2:4"]).tensors()
    save_file(stored, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": settings(PATTERNS["2:4"])}))
    Model.load(path)
    assert "is expanded (others may be too): its 264 inputs are no whole blocks of 64" in caplog.text


# ---- the command
@needs_kernels
def test_the_command_tells_bits_and_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole(MODELS["llama"](), tmp_path / "base")
    with pytest.raises(SystemExit) as left:
        main(["convert", "weights", str(tmp_path / "base"), str(tmp_path / "out"), "--weights", "nm:pattern=1:4",
              "--windows", "0"])  # fmt: skip
    assert not left.value.code
    told = capsys.readouterr().out
    assert "1:4 in 4.5 bits a weight" in told and f"Use it with --model {tmp_path / 'out'}" in told
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["pattern"] == "1:4"


WRONG = [
    ("nm:pattern=2:3", "pattern='2:3': kernels have 2:4, 1:4, 1:8"),
    ("nm:patern=2:4", "nm has no knob 'patern'. Did you mean pattern"),
]


@pytest.mark.parametrize(("text", "says"), WRONG)
def test_what_is_written_wrong_is_named(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse_nm(text)


def test_other_forms_are_left_alone() -> None:
    assert parse_nm("int4:group=64") is None and parse_nm("nm") == PATTERNS["2:4"]


@pytest.mark.parametrize(("more", "says"), [(["--resume"], "leave --resume"), (["--text", "x"], "leave --resume and")])
def test_options_that_mean_nothing_here_are_refused(
    more: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["convert", "weights", "pocket", str(tmp_path / "out"), "--weights", "nm:pattern=2:4", *more])
    assert left.value.code == 2 and says in capsys.readouterr().err


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    whole(MODELS["llama"](), tmp_path / "base")
    stored = load_file(tmp_path / "base" / "model.safetensors")
    stored["model.layers.1.self_attn.k_proj.weight"][3, 4] = np.nan
    save_file(stored, tmp_path / "base" / "model.safetensors")
    with pytest.raises(UserError, match=r"layers\.1\.self_attn\.k_proj\.weight has weights that are not finite"):
        prune(PruneJob(str(tmp_path / "base"), tmp_path / "sparse", PATTERNS["2:4"]), silent)
    assert not (tmp_path / "sparse" / "config.json").exists(), "what is cut short is no checkpoint"
