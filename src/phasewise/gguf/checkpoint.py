"""The tensors of one model in GGUF files, one or several, under the names of a Hugging Face checkpoint."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phasewise.errors import WeightsError
from phasewise.gguf import families
from phasewise.gguf.blocks import BlockMatrix, BlockType, Bytes, Floats
from phasewise.gguf.container import BrokenFile, GGUFFile, Metadata, TensorInfo
from phasewise.gguf.families import Change, GGUFFields, TensorSource
from phasewise.ops.native.weights import DenseRows

SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MOST_SHARDS = 1000
MOST_LISTED = 1 << 16  # values of a tensor that is read for settings
PIECE = 1 << 18  # values expanded at a time
# made from the rest of the file, or read for settings
ASIDE = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight|.*\.attn_rot_embd\.weight")


class GGUFModel:
    """A model's files: `settings` as in config.json, and its tensors, `where` they are by name.

    Tensors in blocks are expanded when they are read, or given as they lie (`blocks`). A matrix in bfloat16 is a view
    of the mapped file. Raises UserError (BrokenFile, UnsupportedModel, WeightsError) naming the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        files = self._files = _files(path)
        self.meta = Metadata(files[0].metadata, path)
        self._tensors: dict[str, tuple[GGUFFile, TensorInfo]] = {}
        for file in files:
            for name, info in file.tensors.items():
                if name in self._tensors:
                    raise BrokenFile(f"{file.path} and {self._tensors[name][0].path} both have the tensor {name}.")
                self._tensors[name] = file, info
        embed = self._info("token_embd.weight")
        prefix = self.meta.text("general.architecture")
        shapes = {name: info.shape for name, (_, info) in self._tensors.items()}
        found = GGUFFields(self.meta, prefix, shapes, self._values)
        self.settings: dict[str, Any] = families.settings(found, embed.shape[0])
        self._ways = families.ways(found, self.settings["num_hidden_layers"])
        used = {way.name for way in self._ways.values()}
        left = {name: name for name in self._tensors if name not in used and not ASIDE.fullmatch(name)}
        self.where = {name: self._tensors[way.name][0].path for name, way in self._ways.items()}
        self.where.update((name, self._tensors[name][0].path) for name in left)  # so that they are reported by name
        self._ways.update((name, TensorSource(name)) for name in left)

    @property
    def stored(self) -> Mapping[str, tuple[GGUFFile, TensorInfo]]:
        """Every tensor of the files by its name there."""
        return self._tensors

    @property
    def sources(self) -> Mapping[str, TensorSource]:
        """Where the files have each tensor, by its name in a checkpoint."""
        return self._ways

    def _info(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            raise WeightsError(f"{self.path} has no tensor {name}; it is not a whole language model.")
        return self._tensors[name][1]

    def _values(self, name: str) -> list[float]:
        info = self._info(name)
        if math.prod(info.shape) > MOST_LISTED:
            raise BrokenFile(f"{self.path}: the tensor {name} has the shape {list(info.shape)}, and {MOST_LISTED:,} "
                             "values are the most. Download or export it again.")  # fmt: skip
        return [float(each) for each in _expanded(info.type, self._tensors[name][0].data(info)).reshape(-1)]

    # ---- what Weights asks of a checkpoint
    @property
    def directory(self) -> Path:
        """The file, which names the model in errors."""
        return self.path

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that a tensor is expanded to unless another one is asked for."""
        return torch.float32 if self._info(self._ways[name].name).type.name == "F32" else torch.bfloat16

    def shape(self, name: str) -> tuple[int, ...]:
        way = self._ways[name]
        shape = self._info(way.name).shape
        return shape if way.entry is None else shape[1:]

    def blocks(self, name: str) -> BlockMatrix | None:
        """A matrix as the file has it; None of one whose values are changed when they are read, and of a vector."""
        change = self._ways[name].change
        if len(self.shape(name)) != 2 or change == "raised":
            return None
        info, raw, done = self._rows(name)
        heads, order = self._heads(change), None
        if heads:
            places = np.arange(len(raw)).reshape(heads, -1)
            order = np.concatenate([families.undone(each, change) for each in places])
        return BlockMatrix(info.type.name, raw, order, done)

    def _rows(self, name: str) -> tuple[TensorInfo, Bytes, Callable[[int, int], None]]:
        """Where a tensor lies, the rows that are its own, and what gives back the memory of some of them."""
        way = self._ways[name]
        file, info = self._tensors[way.name]
        rows, start = file.data(info), info.start
        if way.entry is not None:
            each = rows.shape[0] // info.shape[0]
            rows = rows[way.entry * each : (way.entry + 1) * each]
            start += way.entry * each * rows.shape[1]

        def done(first: int, end: int) -> None:
            file.let_go(start + first * rows.shape[1], start + end * rows.shape[1])

        return info, rows, done

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor, expanded a piece at a time; `dtype` None: as `dtype(name)` says."""
        change, shape = self._ways[name].change, self.shape(name)
        info, rows, done = self._rows(name)
        if self._is_view(name, dtype):
            return torch.from_numpy(rows.reshape(-1)).view(torch.bfloat16).view(shape)
        heads = self._heads(change)
        if len(shape) == 1:  # one value a row, as pairs are undone by rows
            values = _expanded(info.type, rows).reshape(-1, 1)
            step = len(values) // heads if heads else len(values)
            parts = [families.undone(values[i : i + step], change) for i in range(0, len(values), step)]
            return _tensor(np.concatenate(parts).reshape(-1), dtype or self.dtype(name))
        out = torch.empty((rows.shape[0], shape[-1]), dtype=dtype or self.dtype(name))
        step = rows.shape[0] // heads if heads else max(1, PIECE // shape[-1])
        for start in range(0, rows.shape[0], step):
            values = _expanded(info.type, rows[start : start + step]).reshape(-1, shape[-1])
            out[start : start + step] = _tensor(families.undone(values, change))
            done(start, min(start + step, rows.shape[0]))
        return out.reshape(shape)

    def rows(self, name: str, dtype: torch.dtype) -> DenseRows:
        """A matrix in the dtype, expanded slice by slice."""
        found = self.blocks(name)
        if found is None or self._is_view(name, dtype):
            return self.read(name, dtype)
        return ExpandedRows(self._info(self._ways[name].name).type, found, self.shape(name), dtype)

    def _is_view(self, name: str, dtype: torch.dtype | None) -> bool:
        """True if a tensor is read as a view of the mapped file."""
        way = self._ways[name]
        bfloats = self._info(way.name).type.name == "BF16" and dtype in (None, torch.bfloat16)
        return bfloats and not way.change and len(self.shape(name)) > 1

    def _heads(self, change: Change) -> int:
        """The number of heads whose rows a tensor has, where each must be undone by itself."""
        key = {"pairs of queries": "num_attention_heads", "pairs of keys": "num_key_value_heads"}.get(change)
        return int(self.settings[key]) if key else 0

    def let_go(self, tensor: Tensor) -> None:
        """Gives back the memory of the file in which rows of a view lie; that of a copy was given back in making it."""
        for file in self._files:
            start = tensor.data_ptr() - file.address
            if start >= 0 and start + tensor.nbytes <= file.bytes:
                file.let_go(start, start + tensor.nbytes)


class ExpandedRows:
    """A matrix [out, in] of a file's blocks, whose rows are expanded to the dtype when they are asked for."""

    def __init__(self, kind: BlockType, blocks: BlockMatrix, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self._kind, self._blocks = kind, blocks

    def __getitem__(self, rows: slice, /) -> Tensor:
        start, end, _ = rows.indices(self.shape[0])
        out = torch.empty((end - start, self.shape[1]), dtype=self.dtype)
        raw, order, step = self._blocks.raw, self._blocks.order, max(1, PIECE // self.shape[1])
        for first in range(start, end, step):
            some = slice(first, min(first + step, end))
            found = _expanded(self._kind, raw[some] if order is None else raw[order[some]])
            out[first - start : some.stop - start] = _tensor(found.reshape(-1, self.shape[1]))
            self._blocks.done(some.start, some.stop)
        return out


def _expanded(kind: BlockType, raw: Bytes) -> Floats:
    with np.errstate(all="ignore"):  # numbers that are none stay what they are
        return kind.expand(raw.reshape(-1, kind.size))


def _tensor(values: Floats, dtype: torch.dtype = torch.float32) -> Tensor:
    """A copy where values lie in the file or in another order: torch wants them writable."""
    return torch.from_numpy(np.require(values, requirements=["C", "W"])).to(dtype)


def shards(path: Path) -> list[Path]:
    """The files that belong together with one by its name; it alone where that does not say that there are more."""
    match = SHARD.fullmatch(path.name)
    if match is None or not 0 < int(match["number"]) <= int(match["count"]) <= MOST_SHARDS:
        return [path]
    count = int(match["count"])
    return [path.with_name(f"{match['stem']}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]


def _files(path: Path) -> list[GGUFFile]:
    """All files of a model: the one, or the shards that belong to it."""
    first = GGUFFile(path)
    count = first.metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count <= MOST_SHARDS:
        raise BrokenFile(f"{path}: split.count is {count!r:.60}; 1 to {MOST_SHARDS} files can make a model.")
    if count <= 1:
        return [first]
    paths = shards(path)
    if len(paths) != count:
        raise BrokenFile(
            f"{path} is one of {count} files, and its name must end in -00001-of-{count:05}.gguf, and so on."
        )
    absent = [each.name for each in paths if not each.is_file()]
    if absent:
        raise WeightsError(
            f"{path} is one of {count} files, and {', '.join(absent[:3])} is not beside it. Fetch all of them."
        )
    files = [first if each == path else GGUFFile(each) for each in paths]
    _check_numbers(files)
    promised, total = files[0].metadata.get("split.tensors.count"), sum(len(file.tensors) for file in files)
    if type(promised) is int and promised != total:
        raise BrokenFile(f"{path}: {promised} tensors are promised, and the files have {total}. Download them again.")
    return files


def _check_numbers(files: list[GGUFFile]) -> None:
    """Raise BrokenFile for a shard that says to be another one than its name does."""
    for i, file in enumerate(files):
        number, of = file.metadata.get("split.no"), file.metadata.get("split.count")
        if type(number) is not int or type(of) is not int or (number, of) != (i, len(files)):
            raise BrokenFile(f"{file.path} says that it is file {number!r:.60} of {of!r:.60}, counted from 0; its name "
                             f"says {i} of {len(files)}. Download it again.")  # fmt: skip
