"""A model's files as one checkpoint: shards, what is shared between openings, and how little is read at a time."""

from __future__ import annotations

import math
import os
import shutil
import struct
import tracemalloc
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray

from phasewise.errors import UserError, WeightsError
from phasewise.gguf.checkpoint import GGUFModel
from phasewise.gguf.container import BrokenFile
from phasewise.model.layout import layout
from phasewise.model.model import Model
from phasewise.model.parse import parse_config
from phasewise.model.source import source
from phasewise.model.tokenizer import Tokenizer
from phasewise.model.weights import Weights

from ..model.families import FAMILIES, make
from ..model.reference import prompt, run, save_random
from .raw import ARRAY, STRING, U64, File, array, entry
from .raw import Tensor as Header
from .vocabularies import byte_level
from .writer import Conversion, add, finish, tiny

Raw = NDArray[np.uint8]
TOKENS = prompt(1, 9)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("directory")
    save_random(FAMILIES["llama"](), path)
    return path


@pytest.fixture
def parts(directory: Path, tmp_path: Path) -> list[Path]:
    """One model in three files."""
    Conversion(shards=10).write(directory, tmp_path / "model.gguf")
    found = sorted(tmp_path.glob("*.gguf"))
    assert [path.name for path in found] == [f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    return found


def refused(path: Path, *words: str, error: type[UserError] = BrokenFile) -> None:
    with pytest.raises(error) as raised:
        GGUFModel(path)
    assert type(raised.value) is error
    for word in words:
        assert word in str(raised.value), str(raised.value)


# ---- shards
def test_tensors_lie_in_all_shards(parts: list[Path], directory: Path, tmp_path: Path) -> None:
    whole = Conversion().write(directory, tmp_path / "whole.gguf")
    model = GGUFModel(parts[0])
    assert set(model.where) == set(GGUFModel(whole).where)
    assert set(model.where.values()) == set(parts)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_any_of_the_shards_may_be_named(number: int, parts: list[Path], directory: Path, tmp_path: Path) -> None:
    whole = Conversion().write(directory, tmp_path / "whole.gguf")
    assert source(parts[number]).settings().values == source(whole).settings().values
    found, wanted = (run(Model.load(path, dtype=torch.float32), TOKENS) for path in (parts[number], whole))
    assert torch.equal(found, wanted)
    assert Tokenizer.load(parts[number]).size == Tokenizer.load(whole).size


def test_a_missing_shard(parts: list[Path]) -> None:
    parts[1].unlink()
    refused(parts[0], str(parts[0]), "is one of 3 files", parts[1].name, "Fetch all of them", error=WeightsError)
    parts[2].unlink()
    refused(parts[0], f"{parts[1].name}, {parts[2].name} is not beside it", error=WeightsError)


def test_swapped_shards(parts: list[Path]) -> None:
    shutil.move(parts[1], parts[1].with_suffix(".aside"))
    shutil.move(parts[2], parts[1])
    shutil.move(parts[1].with_suffix(".aside"), parts[2])
    refused(parts[0], str(parts[1]), "says that it is file 2 of 3", "its name says 1 of 3")


def test_another_name(parts: list[Path]) -> None:
    odd = shutil.copy(parts[0], parts[0].with_name("first.gguf"))
    refused(Path(odd), "is one of 3 files, and its name must end in -00001-of-00003.gguf")
    odd = shutil.copy(parts[0], parts[0].with_name("model-00001-of-00004.gguf"))
    refused(Path(odd), "its name must end in -00001-of-00003.gguf")


def test_the_same_tensors_twice(parts: list[Path]) -> None:
    raw = parts[2].read_bytes()
    number = b"split.no" + struct.pack("<I", 2)
    for path in parts[1:]:  # both now hold what the third does, each under its own number
        at = raw.index(number) + len(number)
        path.write_bytes(raw[:at] + struct.pack("<H", parts.index(path)) + raw[at + 2 :])
    refused(parts[0], str(parts[1]), str(parts[2]), "both have the tensor")


@pytest.mark.parametrize("shard", [0, 1])
@pytest.mark.parametrize("count", [2, 4, 65_535])
def test_another_count(shard: int, count: int, parts: list[Path]) -> None:
    raw = parts[shard].read_bytes()
    key = b"split.count" + struct.pack("<I", 2)
    at = raw.index(key) + len(key)
    parts[shard].write_bytes(raw[:at] + struct.pack("<H", count) + raw[at + 2 :])
    with pytest.raises(BrokenFile, match=r"must end in|says that it is file|1 to 1000 files"):
        GGUFModel(parts[0])


def test_fewer_tensors_than_promised(parts: list[Path]) -> None:
    raw = parts[0].read_bytes()
    key = b"split.tensors.count" + struct.pack("<I", 5)
    at = raw.index(key) + len(key)
    promised = struct.unpack_from("<i", raw, at)[0]
    parts[0].write_bytes(raw[:at] + struct.pack("<i", promised + 1) + raw[at + 4 :])
    refused(parts[0], f"{promised + 1} tensors are promised, and the files have {promised}")


# ---- what a whole model needs
def test_no_embeddings(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("output_norm.weight", np.zeros(8, dtype=np.float32))
    refused(finish(writer, tmp_path / "model.gguf"), "has no tensor token_embd.weight", error=WeightsError)


def test_an_architecture_that_is_no_name(tmp_path: Path) -> None:
    embeddings = Header("token_embd.weight", (8, 2))
    for entries, words in (
        ([], "has no general.architecture"),
        ([entry("general.architecture", U64, 7)], "general.architecture must be a text, got 7"),
        ([entry("general.architecture", ARRAY, array(U64, 1, bytes(8)))], "general.architecture must be a text"),
        ([entry("general.architecture", STRING, "")], "the architecture '' is not supported"),
    ):
        (tmp_path / "model.gguf").write_bytes(File(entries, [embeddings], bytes(64)).raw())
        with pytest.raises(UserError, match=words):
            GGUFModel(tmp_path / "model.gguf")


def test_tensors_that_nobody_knows(directory: Path, tmp_path: Path) -> None:
    path = Conversion().write(directory, tmp_path / "model.gguf")
    raw = path.read_bytes()
    name, other = b"blk.1.ffn_gate.weight", b"blk.1.ffn_date.weight"
    assert raw.count(name) == 1
    path.write_bytes(raw.replace(name, other))
    with pytest.raises(WeightsError) as raised:
        Model.load(path)
    for word in ("missing: model.layers.1.mlp.gate_proj.weight", "left over in model.gguf: blk.1.ffn_date.weight"):
        assert word in str(raised.value)


MIXTRAL = make("MixtralConfig", num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2)
QWEN3 = make("Qwen3MoeConfig", num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, head_dim=16,
             moe_intermediate_size=24, norm_topk_prob=True)  # fmt: skip


@pytest.mark.parametrize("config", [MIXTRAL, QWEN3], ids=["mixtral", "qwen3_moe"])
@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"expert_count": 10**9}, "expert_count is 1,000,000,000, and blk.0.ffn_gate_inp.weight has the shape [4, 48]"),
        ({"expert_count": 3}, "expert_count is 3, and blk.0.ffn_gate_inp.weight has the shape [4, 48]"),
        ({"expert_count": None}, "has no"),
        ({"expert_count": 0}, "expert_count must be a whole number"),
        ({"expert_used_count": 5}, "expert_used_count must be a whole number from 1 to 4, got 5"),
        ({"expert_used_count": 0}, "expert_used_count must be a whole number from 1 to 4"),
    ],
)
def test_absurd_experts(config: Any, extra: dict[str, Any], words: str, tmp_path: Path) -> None:
    save_random(config(), tmp_path / "directory")
    refused(Conversion(extra=extra).write(tmp_path / "directory", tmp_path / "model.gguf"), words, error=UserError)


def test_fewer_experts_in_one_layer(tmp_path: Path) -> None:
    save_random(MIXTRAL(), tmp_path / "directory")
    path = Conversion().write(tmp_path / "directory", tmp_path / "model.gguf")
    raw = path.read_bytes()
    for name, shape in ((b"blk.1.ffn_up_exps.weight", (48, 80, 4)), (b"blk.1.ffn_gate_inp.weight", (48, 4))):
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        assert raw.count(name + sizes) == 1
        fewer = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[:-1], 3)
        path.write_bytes(raw.replace(name + sizes, name + fewer))
        refused(path, name.decode(), "3", "4", error=UserError)


def test_factors_that_belong_to_no_rope(tmp_path: Path) -> None:
    """A tensor that is read for settings is held against what they need before it is made a list of."""

    def file(name: str, size: int) -> Path:
        writer = GGUFWriter(tmp_path / f"{name}{size}.gguf", "llama")
        keys = {"block_count": 1, "context_length": 64, "embedding_length": 8, "feed_forward_length": 12,
                "attention.head_count": 2, "attention.layer_norm_rms_epsilon": 2.0**-20}  # fmt: skip
        for key, value in keys.items():
            add(writer, f"llama.{key}", value)
        for tensor, shape in {"token_embd.weight": (4, 8), "blk.0.attn_norm.weight": (8,), name: (size,)}.items():
            writer.add_tensor(tensor, np.ones(shape, dtype=np.float32))
        return finish(writer, tmp_path / f"{name}{size}.gguf")

    refused(
        file("rope_freqs.weight", 70_000), "rope_freqs.weight has the shape [70000], and 65,536 values are the most"
    )
    refused(file("rope_factors_long.weight", 2), "has no tensor rope_factors_short.weight", error=WeightsError)


# ---- opened once
def test_openings_are_shared_until_a_file_changes(parts: list[Path]) -> None:
    first = source(parts[0]).tensors()
    assert source(parts[0]).tensors() is first and source(str(parts[0])).tensors() is first
    for path in parts:  # any of them
        before, stamp = source(parts[0]).tensors(), source(parts[0]).stamp()
        later = path.stat().st_mtime_ns + 1_000_000
        os.utime(path, ns=(later, later))
        assert source(parts[0]).stamp() != stamp
        assert source(parts[0]).tensors() is not before


def test_a_file_replaced_in_place_is_read_again(directory: Path, tmp_path: Path) -> None:
    path = Conversion().write(directory, tmp_path / "model.gguf")
    first = run(Model.load(path, dtype=torch.float32), TOKENS)
    other = Conversion(extra={"rope.freq_base": 500.0}).write(directory, tmp_path / "other.gguf")
    shutil.copystat(path, other)
    assert path.stat().st_size == other.stat().st_size
    os.replace(other, path)  # of the same size and time
    assert not torch.equal(run(Model.load(path, dtype=torch.float32), TOKENS), first)


def test_no_warning_of_memory_that_may_not_be_written(tmp_path: Path) -> None:
    path = tiny(tmp_path / "model.gguf", byte_level("gpt-2")[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensors = source(path).tensors()
        for name in tensors.where:
            found = tensors.read(name, torch.float32)
            found.add_(1.0)  # the file is not written to
    again = GGUFModel(path)
    assert all(torch.equal(again.read(name, torch.float32), tensors.read(name, torch.float32)) for name in again.where)


# ---- little at a time
ROWS, WIDTH = 4096, 4096  # 64 MB in single precision


@contextmanager
def large(
    folder: Path, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType
) -> Iterator[tuple[GGUFModel, Raw]]:
    """A model with one large tensor of random blocks, and their bytes."""
    path = folder / "model.gguf"
    writer = GGUFWriter(path, "llama")
    keys = {"block_count": 1, "context_length": 64, "embedding_length": WIDTH, "feed_forward_length": shape[-2],
            "attention.head_count": 32, "expert_count": shape[0], "expert_used_count": 2,
            "attention.layer_norm_rms_epsilon": 2.0**-20}  # fmt: skip
    for key, value in keys.items():
        add(writer, f"llama.{key}", value)
    tensors = {"token_embd.weight": (2, WIDTH), "blk.0.attn_norm.weight": (WIDTH,)}
    if len(shape) == 3:
        tensors["blk.0.ffn_gate_inp.weight"] = (shape[0], WIDTH)
    for tensor, size in tensors.items():
        writer.add_tensor(tensor, np.ones(size, dtype=np.float32))
    width = {GGMLQuantizationType.Q4_0: 18, GGMLQuantizationType.Q8_0: 34}[kind] * shape[-1] // 32
    raw = np.random.default_rng(0).integers(0, 60, (*shape[:-1], width), dtype=np.uint8)  # scales are small numbers
    writer.add_tensor(name, raw, raw_dtype=kind)
    yield GGUFModel(finish(writer, path)), raw
    path.unlink()


def peak(model: GGUFModel, name: str) -> tuple[torch.Tensor, int]:
    """A tensor, and the most bytes that reading it took in numpy's hands, beside the result in torch's."""
    tracemalloc.start()
    try:
        tensor = model.read(name, torch.bfloat16)
        return tensor, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_piece_is_expanded_at_a_time(tmp_path: Path) -> None:
    with large(tmp_path, "blk.0.ffn_up.weight", (ROWS, WIDTH), GGMLQuantizationType.Q4_0) as (model, _):
        tensor, most = peak(model, "model.layers.0.mlp.up_proj.weight")
    assert tensor.shape == (ROWS, WIDTH)
    assert most < 4 * ROWS * WIDTH, "more than the whole of it in single precision"


def test_a_heads_rows_are_expanded_at_a_time(tmp_path: Path) -> None:
    with large(tmp_path, "blk.0.attn_q.weight", (ROWS, WIDTH), GGMLQuantizationType.Q8_0) as (model, _):
        tensor, most = peak(model, "model.layers.0.self_attn.q_proj.weight")
    assert tensor.shape == (ROWS, WIDTH)
    assert most < 4 * ROWS * WIDTH / 8


def test_an_expert_is_read_alone(tmp_path: Path) -> None:
    shape = (32, 128, WIDTH)
    with large(tmp_path, "blk.0.ffn_up_exps.weight", shape, GGMLQuantizationType.Q8_0) as (model, raw):
        tensor, most = peak(model, "model.layers.0.block_sparse_moe.experts.7.w3.weight")
    wanted = torch.from_numpy(gguf.quants.dequantize(raw[7], GGMLQuantizationType.Q8_0)).bfloat16()
    assert torch.equal(tensor, wanted)
    assert most < 4 * math.prod(shape) / 6, "rows of other experts"


class Watched:
    """A checkpoint that notes how many of the tensors it gave are still held when it gives another."""

    def __init__(self, model: GGUFModel) -> None:
        self.model, self.where, self.directory = model, model.where, model.directory
        self.shape, self.dtype, self.let_go = model.shape, model.dtype, model.let_go
        self.given: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        self.most = max(self.most, sum(each() is not None for each in self.given))
        tensor = self.model.read(name, dtype)
        self.given.append(weakref.ref(tensor))
        return tensor


def test_parts_of_a_tensor_are_held_one_at_a_time(directory: Path, tmp_path: Path) -> None:
    files = source(Conversion().write(directory, tmp_path / "model.gguf"))
    watched = Watched(GGUFModel(tmp_path / "model.gguf"))
    weights = Weights(watched, layout(parse_config(files.settings())), torch.bfloat16, torch.device("cpu"))
    taken = [weights.take(key) for key in ("0.qkv", "0.gate_up", "1.qkv")]
    assert len(watched.given) == 8 and watched.most == 0
    assert sum(tensor.numel() for tensor in taken) == 48 * (2 * (48 + 2 * 24) + 2 * 80)
