"""The tensors of one model in GGUF files, one or several, under the names of a Hugging Face checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phasewise.errors import UserError, WeightsError
from phasewise.gguf import families
from phasewise.gguf.container import BrokenFile, GGUFFile, Metadata, TensorInfo
from phasewise.gguf.families import Change, Found, Way

SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MOST_SHARDS = 1000
PIECE = 1 << 22  # values expanded at a time
# made from the rest of the file, or read for settings
ASIDE = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight|.*\.attn_rot_embd\.weight")


class GGUFModel:
    """A model's files: `settings` as in config.json, and its tensors, `where` they are by name.

    Quantised tensors are expanded when they are read. Raises UserError (BrokenFile, UnsupportedModel, WeightsError)
    naming the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        files = _files(path)
        self.meta = Metadata(files[0].metadata, path)
        self._tensors: dict[str, tuple[GGUFFile, TensorInfo]] = {}
        for file in files:
            for name, info in file.tensors.items():
                if name in self._tensors:
                    raise BrokenFile(f"{file.path} and {self._tensors[name][0].path} both have the tensor {name}.")
                self._tensors[name] = file, info
        embed = self._info("token_embd.weight")
        prefix = self.meta.text("general.architecture")
        found = Found(self.meta, prefix, frozenset(self._tensors), self._values)
        self.settings: dict[str, Any] = families.settings(found, embed.shape[0])
        layers = self.settings["num_hidden_layers"]
        if layers > len(self._tensors):
            raise UserError(f"{path}: {prefix}.block_count is {layers:,}, and there are {len(self._tensors)} tensors.")
        self._ways = families.ways(found, layers)
        used = {way.name for way in self._ways.values()}
        left = {name: name for name in self._tensors if name not in used and not ASIDE.fullmatch(name)}
        self.where = {name: self._tensors[way.name][0].path for name, way in self._ways.items()}
        self.where.update((name, self._tensors[name][0].path) for name in left)  # so that they are reported by name
        self._ways.update((name, Way(name)) for name in left)

    def _info(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            raise WeightsError(f"{self.path} has no tensor {name}; it is not a whole language model.")
        return self._tensors[name][1]

    def _values(self, name: str) -> list[float]:
        file, info = self._tensors[name]
        return [float(each) for each in info.type.expand(file.data(info)).reshape(-1)]

    # ---- what Weights asks of a checkpoint
    @property
    def directory(self) -> Path:
        """What names the model in errors: the file."""
        return self.path

    def dtype(self, name: str) -> torch.dtype:
        """What a tensor is expanded to unless another dtype is asked for."""
        return torch.float32 if self._info(self._ways[name].name).type.name == "F32" else torch.bfloat16

    def shape(self, name: str) -> tuple[int, ...]:
        way = self._ways[name]
        shape = self._info(way.name).shape
        return shape if way.entry is None else shape[1:]

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor, expanded a piece at a time; `dtype` None: as `dtype(name)` says."""
        way, shape = self._ways[name], self.shape(name)
        file, info = self._tensors[way.name]
        rows = file.data(info)
        if way.entry is not None:
            each = rows.shape[0] // info.shape[0]
            rows = rows[way.entry * each : (way.entry + 1) * each]
        if len(shape) == 1:  # one value a row, as pairs are undone by rows
            rows = rows.reshape(-1, info.type.size)
        width = rows.shape[1] // info.type.size * info.type.values
        out = torch.empty((rows.shape[0], width), dtype=dtype or self.dtype(name))
        heads = self._heads(way.change)
        step = rows.shape[0] // heads if heads else max(1, PIECE // width)
        for start in range(0, rows.shape[0], step):
            with np.errstate(all="ignore"):  # numbers that are none stay what they are
                values = info.type.expand(rows[start : start + step].reshape(-1, info.type.size))
            piece = families.undone(values.reshape(-1, width), way.change)
            out[start : start + step] = torch.from_numpy(np.require(piece, requirements=["C", "W"]))
        return out.reshape(shape)

    def _heads(self, change: Change) -> int:
        """How many heads' rows a tensor has, where each must be undone by itself."""
        key = {"pairs of queries": "num_attention_heads", "pairs of keys": "num_key_value_heads"}.get(change)
        return int(self.settings[key]) if key else 0

    def let_go(self, tensor: Tensor) -> None:
        """What was read is a copy already."""


def _files(path: Path) -> list[GGUFFile]:
    """All files of a model: the one, or the shards that belong to it."""
    match = SHARD.fullmatch(path.name)
    first = GGUFFile(path)
    count = first.metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count <= MOST_SHARDS:
        raise BrokenFile(f"{path}: split.count is {count!r}; 1 to {MOST_SHARDS} files can make a model.")
    if count <= 1:
        return [first]
    if match is None or int(match["count"]) != count:
        raise BrokenFile(
            f"{path} is one of {count} files, and its name must end in -00001-of-{count:05}.gguf, and so on."
        )
    paths = [path.with_name(f"{match['stem']}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]
    absent = [each.name for each in paths if not each.is_file()]
    if absent:
        raise WeightsError(
            f"{path} is one of {count} files, and {', '.join(absent[:3])} is not beside it. Fetch all of them."
        )
    files = [first if each == path else GGUFFile(each) for each in paths]
    for i, file in enumerate(files):
        if file.metadata.get("split.no", i) != i or file.metadata.get("split.count", count) != count:
            raise BrokenFile(f"{file.path} says that it is file {file.metadata.get('split.no')!r} of "
                             f"{file.metadata.get('split.count')!r}; its name says {i} of {count}.")  # fmt: skip
    promised, total = files[0].metadata.get("split.tensors.count"), sum(len(file.tensors) for file in files)
    if type(promised) is int and promised != total:
        raise BrokenFile(f"{path}: {promised} tensors are promised, and the files have {total}. Download them again.")
    return files
