"""Checkpoints on disk: every layout that is right loads, every one that is wrong says which file and tensor."""

from __future__ import annotations

import json
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from phasewise.errors import UnsupportedModel, UserError, WeightsError
from phasewise.model.directory import Directory
from phasewise.model.layout import layout
from phasewise.model.model import Model
from phasewise.model.parse import parse_config
from phasewise.model.weights import Checkpoint, FusedRows, Weights
from tests.mapped import resident

from .families import FAMILIES
from .reference import prompt, run, save_random, theirs

TOKENS = prompt(1, 9)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("untied")
    save_random(FAMILIES["llama"](), directory)
    return directory


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tied")
    save_random(FAMILIES["llama-biased-tied"](), directory)
    return directory


@pytest.fixture
def checkpoint(untied: Path, tmp_path: Path) -> Path:
    """A copy that may be spoilt."""
    return Path(shutil.copytree(untied, tmp_path / "model"))


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def configure(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def fails(directory: Path, *words: str, error: type[UserError] = WeightsError, **options: Any) -> None:
    with pytest.raises(error) as raised:
        Model.load(directory, **options)
    assert type(raised.value) is error
    for word in words:
        assert word in str(raised.value), str(raised.value)


def test_shards_equal_one_file(untied: Path, tmp_path: Path) -> None:
    save_random(FAMILIES["llama"](), tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 5
    assert torch.equal(run(Model.load(tmp_path), TOKENS), run(Model.load(untied), TOKENS))


def test_any_name_for_a_single_file(checkpoint: Path, untied: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "weights.safetensors")
    assert torch.equal(run(Model.load(checkpoint), TOKENS), run(Model.load(untied), TOKENS))


def test_tied_embeddings_are_counted_once(tied: Path) -> None:
    model = Model.load(tied)
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    assert model.weight_bytes == sum(t.nbytes for t in load_file(tied / "model.safetensors").values())
    assert model.unembed.dense() is model.table


def test_a_tied_model_may_keep_a_copy_of_its_head(tied: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tied, tmp_path / "model"))
    rewrite(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert torch.equal(run(Model.load(directory), TOKENS), run(Model.load(tied), TOKENS))


def test_old_rotary_buffers_are_ignored(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    Model.load(checkpoint)
    rewrite(checkpoint, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq_scaled": torch.zeros(4)}))
    fails(checkpoint, "inv_freq_scaled")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_checkpoints_dtype_is_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    reference = save_random(FAMILIES["llama"](), tmp_path)
    reference.to(dtype).save_pretrained(tmp_path)
    model = Model.load(tmp_path)
    assert model.dtype == dtype
    assert model.embed(torch.tensor([1, 2])).dtype == dtype
    assert model.weight_bytes == sum(p.numel() * dtype.itemsize for p in reference.parameters())


def test_cast_at_load(untied: Path) -> None:
    model = Model.load(untied, dtype=torch.bfloat16)
    assert model.table.dtype == model.norm.weight.dtype == model.layers[0].qkv.dense().dtype == torch.bfloat16


def test_nothing_is_copied_that_need_not_be(untied: Path) -> None:
    """Tensors that are used as they are stay in the mapped file; a fused one is a copy of its own."""
    checkpoint = Checkpoint(untied)
    weights = Weights(checkpoint, layout(parse_config(Directory(untied).settings())), None, torch.device("cpu"))
    kept = {key: weights.take(key) for key in ("embed", "norm", "0.o", "0.down")}
    stored = {"embed": "model.embed_tokens", "norm": "model.norm", "0.o": "model.layers.0.self_attn.o_proj",
              "0.down": "model.layers.0.mlp.down_proj"}  # fmt: skip
    for key, name in stored.items():
        assert kept[key].data_ptr() == checkpoint.read(f"{name}.weight").data_ptr(), key
    q = checkpoint.read("model.layers.0.self_attn.q_proj.weight")
    qkv = weights.take("0.qkv")
    assert torch.equal(qkv[: len(q)], q) and qkv.data_ptr() != q.data_ptr()
    assert qkv.untyped_storage().nbytes() == qkv.nbytes
    with pytest.raises(KeyError):
        weights.take("0.qkv")  # once: nobody else holds it


def test_missing_tensors(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda t: (t.pop("model.norm.weight"), t.pop("model.layers.1.mlp.up_proj.weight")))
    fails(checkpoint, "missing", "model.norm.weight", "model.layers.1.mlp.up_proj.weight", str(checkpoint))


def test_left_over_tensors(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda t: t.update({"model.layers.7.extra": torch.zeros(2)}))
    fails(checkpoint, "left over in model.safetensors", "model.layers.7.extra")


def test_fewer_layers_in_the_config_are_left_overs(checkpoint: Path) -> None:
    configure(checkpoint, num_hidden_layers=2)
    fails(checkpoint, "left over", "model.layers.2.", "and 4 more")


def test_misshapen_tensors(checkpoint: Path) -> None:
    configure(checkpoint, intermediate_size=81)
    fails(checkpoint, "model.layers.0.mlp.down_proj.weight", "[48, 80]", "[48, 81]", "model.safetensors")


def test_a_truncated_file(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    fails(checkpoint, str(file), "truncated or corrupt")


def test_a_corrupt_header(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(b"\xff" * 64 + file.read_bytes()[64:])
    fails(checkpoint, str(file), "truncated or corrupt")


@pytest.mark.parametrize(
    "lie",
    [
        {"data_offsets": [10**15, 10**15 + 4]},
        {"data_offsets": [-8, 4]},
        {"data_offsets": [0, 4]},
        {"shape": [1 << 40, 1 << 40]},
        {"dtype": "X9"},
    ],
)
def test_a_lying_header(checkpoint: Path, lie: dict[str, Any]) -> None:
    file = checkpoint / "model.safetensors"
    raw = file.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    header["model.norm.weight"] |= lie
    said = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(said)) + said + raw[8 + size :])
    fails(checkpoint, str(file), "truncated or corrupt")
    file.write_bytes(struct.pack("<Q", 10**18) + raw[8:])
    fails(checkpoint, str(file), "truncated or corrupt")


def test_an_empty_file(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"")
    fails(checkpoint, "model.safetensors", "truncated or corrupt")


def test_an_absent_shard(tmp_path: Path) -> None:
    save_random(FAMILIES["llama"](), tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[2]
    shard.unlink()
    fails(tmp_path, "model.safetensors.index.json", shard.name, "incomplete")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_broken_index(checkpoint: Path, text: str) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "model-00001-of-00001.safetensors")
    (checkpoint / "model.safetensors.index.json").write_text(text)
    fails(checkpoint, "model.safetensors.index.json", "not a valid index")


def as_transformers(directory: Path) -> None:
    """The weights in `directory` are those that transformers loads from there."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(directory).eval()
    torch.testing.assert_close(run(Model.load(directory), TOKENS), theirs(reference, TOKENS), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kept", [False, True])
def test_an_index_of_an_earlier_save_is_not_followed(kept: bool, tmp_path: Path, checkpoint: Path) -> None:
    """Whether its shards are still there or not: the single file was saved last."""
    save_random(FAMILIES["llama"](), tmp_path / "shards", max_shard_size="20KB")
    for file in (tmp_path / "shards").glob("*.safetensors*" if kept else "*.index.json"):
        shutil.copy(file, checkpoint)
    rewrite(checkpoint, lambda t: t["model.norm.weight"].mul_(1.5))
    as_transformers(checkpoint)


def test_shards_of_another_save_beside_those_of_the_index(tmp_path: Path) -> None:
    save_random(FAMILIES["llama"](), tmp_path, max_shard_size="20KB")
    for file in tmp_path.glob("model-*.safetensors"):
        changed = {name: tensor * 2 for name, tensor in load_file(file).items()}
        save_file(changed, tmp_path / file.name.replace("-of-", "-of-1"), {"format": "pt"})
    as_transformers(tmp_path)


def test_the_file_that_the_config_names(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    save_file({name: tensor * 1.1 for name, tensor in load_file(file).items()}, checkpoint / "best.safetensors",
              {"format": "pt"})  # fmt: skip
    configure(checkpoint, transformers_weights="best.safetensors")
    as_transformers(checkpoint)
    configure(checkpoint, transformers_weights="gone.safetensors")
    fails(checkpoint, "gone.safetensors", "transformers_weights")
    configure(checkpoint, transformers_weights="../best.safetensors")
    fails(checkpoint, "../best.safetensors", "transformers_weights")


def test_a_head_of_its_own_is_not_tied(tied: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tied, tmp_path / "model"))
    rewrite(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].flip(0).contiguous()}))
    as_transformers(directory)
    assert not torch.equal(run(Model.load(directory), TOKENS), run(Model.load(tied), TOKENS))


def test_an_adapter_beside_the_weights_is_refused(checkpoint: Path) -> None:
    (checkpoint / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    fails(checkpoint, "adapter_config.json", "Merge")


def test_no_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    fails(checkpoint, str(checkpoint), "model.safetensors")


def test_pickled_weights_are_never_read(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    fails(checkpoint, "pytorch_model.bin", "safetensors")


def test_several_files_without_an_index(checkpoint: Path) -> None:
    shutil.copy(checkpoint / "model.safetensors", checkpoint / "a.safetensors")
    (checkpoint / "model.safetensors").rename(checkpoint / "b.safetensors")
    fails(checkpoint, "2 safetensors files", "index")


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux alone")
def test_what_was_read_leaves_memory_and_can_be_read_again(tmp_path: Path) -> None:
    """Of each of the files; what is no view of a file is left alone."""
    given = {name: torch.randn(1 << 18) for name in "ab"}
    for name, tensor in given.items():
        save_file({name: tensor}, tmp_path / f"{name}.safetensors")
    names = {"weight_map": {name: f"{name}.safetensors" for name in given}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(names))
    checkpoint = Checkpoint(tmp_path)
    for name, tensor in given.items():
        read = checkpoint.read(name)
        copy = read.clone()  # of all pages
        assert resident(read.data_ptr()) >= read.nbytes
        checkpoint.let_go(read)
        assert resident(read.data_ptr()) < read.nbytes // 4
        checkpoint.let_go(copy)
        assert torch.equal(copy, tensor) and torch.equal(read, tensor)


def test_rows_of_fused_matrices_are_read_slice_by_slice(tmp_path: Path) -> None:
    """Each slice is that of the whole, and what was read leaves memory."""
    shapes, kinds = ((24_000, 64), (1, 64), (16_000, 64)), (torch.bfloat16, torch.float32, torch.float16)
    parts = {f"t{i}": torch.randn(*shape).to(kind) for i, (shape, kind) in enumerate(zip(shapes, kinds))}
    save_file(parts, tmp_path / "model.safetensors")
    whole = torch.cat([part.bfloat16() for part in parts.values()])
    checkpoint = Checkpoint(tmp_path)
    rows = FusedRows(checkpoint, [(name, tuple(part.shape)) for name, part in parts.items()], torch.bfloat16)
    assert rows.shape == tuple(whole.shape)
    for start in range(0, len(whole), 1100):
        some = rows[start : start + 1100]
        assert torch.equal(some, whole[start : start + 1100])
        checkpoint.let_go(some)
    if sys.platform == "linux":
        assert resident(checkpoint.read("t0").data_ptr()) < whole.nbytes // 4


def test_quantised_tensors(checkpoint: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    rewrite(checkpoint, lambda t: t.update({name: t[name].to(torch.int8)}))
    fails(checkpoint, name, "torch.int8")


def test_an_unsupported_dtype(checkpoint: Path) -> None:
    fails(checkpoint, "torch.float64", "torch.bfloat16", dtype=torch.float64)


def test_no_config(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    fails(checkpoint, str(checkpoint), "config.json", error=UserError)


def test_unknown_family(checkpoint: Path) -> None:
    configure(checkpoint, model_type="lama")
    fails(checkpoint, "'lama'", "Did you mean llama", "qwen3_moe", error=UnsupportedModel)


def test_the_untied_checkpoint_is_right(untied: Path) -> None:
    """The failures above come from what each test spoilt."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(untied).eval()
    torch.testing.assert_close(run(Model.load(untied), TOKENS), theirs(reference, TOKENS), atol=1e-4, rtol=1e-4)
