"""Reading safetensors checkpoints: memory-mapped, checked whole before the first byte is used, fused on the way."""

from __future__ import annotations

import ctypes
import json
import logging
import mmap
import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phasewise.errors import UserError, WeightsError
from phasewise.gguf.blocks import BlockMatrix, LowRankPair
from phasewise.model.layout import Layout, Part
from phasewise.model.modules import module_tensors
from phasewise.model.raw import read_json
from phasewise.ops import native
from phasewise.ops.linear import Linear
from phasewise.ops.native.weights import DenseRows, PackedPart, PackedWeights, form_of_blocks, pack, pack_blocks

INDEXED = "safetensors.index.json"
INDEX, SINGLE, CONFIG, ADAPTER = f"model.{INDEXED}", "model.safetensors", "config.json", "adapter_config.json"
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
log = logging.getLogger(__name__)
# told of the part of a model's weights that is read, while one is loaded in this context
LOADING: ContextVar[Callable[[float], object] | None] = ContextVar("loading", default=None)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Buffers that old exports wrote although they follow from the configuration.
HARMLESS = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


class Tensors(Protocol):
    """A checkpoint's tensors by their names in Hugging Face layout, whatever files they lie in."""

    where: dict[str, Path]  # every tensor, and its file

    @property
    def directory(self) -> Path:
        """Names the checkpoint in errors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that `read` gives unless told otherwise."""
        ...

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor. `dtype` is a hint: one that has to be expanded anyway is expanded to that."""
        ...

    def rows(self, name: str, dtype: torch.dtype) -> DenseRows:
        """A matrix whose rows are to be read slice by slice, first to last: what `read` gives, or read by and by."""
        ...

    def blocks(self, name: str) -> BlockMatrix | None:
        """A matrix as its file has it, if it lies there in blocks."""
        ...

    def let_go(self, tensor: Tensor) -> None:
        """Tells that what `read` gave is not needed again."""
        ...


class Checkpoint:
    """The tensors of a directory's safetensors files; a read is a view of the mapped file, not a copy."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.where: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        self._mapped: dict[str, list[tuple[int, int]]] = {}  # where they lie in memory
        for path in _files(directory):
            for name in self._file(path).keys():  # noqa: SIM118 (not a dict)
                self.where[name] = path

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"{path} is not a readable safetensors file ({error}). It is truncated or corrupt: "
                                   "download or export it again.") from error  # fmt: skip
        return self._open[path]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file(self.where[name]).get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        return self.read(name).dtype

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        tensor: Tensor = self._file(self.where[name]).get_tensor(name)
        return tensor

    def rows(self, name: str, dtype: torch.dtype) -> DenseRows:
        return self.read(name)

    def blocks(self, name: str) -> BlockMatrix | None:
        """None: they do not lie in blocks."""
        return None

    def let_go(self, tensor: Tensor) -> None:
        """Gives back pages of a mapped file that was copied; they are read again if they must be."""
        if sys.platform != "linux":
            return
        page = mmap.PAGESIZE
        start, end = -(-tensor.data_ptr() // page) * page, (tensor.data_ptr() + tensor.nbytes) // page * page
        if start < end and any(first <= start and end <= last for first, last in self._ranges()):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)

    def _ranges(self) -> list[tuple[int, int]]:
        """The address ranges of the open files. They stay: the long list is read until all are found."""
        if len(self._mapped) < len(self._open):
            self._mapped, files = {}, {str(path.resolve()) for path in self._open}
            for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
                if (file := line.split(maxsplit=5)[-1]) in files:
                    first, _, last = line.partition(" ")[0].partition("-")
                    self._mapped.setdefault(file, []).append((int(first, 16), int(last, 16)))
        return [each for ranges in self._mapped.values() for each in ranges]


def _files(directory: Path) -> list[Path]:
    """The safetensors files to read, as transformers chooses among several sets: what config.json names, else the
    single file, else those of the index. An index beside the single file is left over from an earlier save."""
    if (directory / ADAPTER).is_file():
        raise WeightsError(f"{directory} holds an adapter ({ADAPTER}), which is added to other weights. Merge it into "
                           f"its base model and save that, or remove {ADAPTER} if it is merged.")  # fmt: skip
    named, index = _named(directory), directory / INDEX
    if named is not None and not named.is_file():
        raise WeightsError(f"{directory / CONFIG} names {named.name} (transformers_weights), which is not there.")
    if named is not None:
        return _indexed(named) if named.suffix == ".json" else [named]
    if (directory / SINGLE).is_file():
        if index.is_file():
            _tell_unread(index)
        return [directory / SINGLE]
    if index.is_file():
        return _indexed(index)
    return [_only(directory)]


def _only(directory: Path) -> Path:
    """The one safetensors file of a folder. Raises WeightsError that tells what else there is."""
    found = sorted(directory.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        raise WeightsError(f"{directory} has {len(found)} safetensors files but no {INDEX} that says which to read.")
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
    if pickled:
        raise WeightsError(f"{directory} has only pickled weights ({_some(pickled)}), which can run code when read. "
                           "Convert them to safetensors first.")  # fmt: skip
    raise WeightsError(f"{directory} has no {SINGLE} and no {INDEX}. Pass a directory that holds the weights.")


@cache
def _tell_unread(index: Path) -> None:
    """Warn, once a process, of an index that is not followed."""
    log.warning("%s is not followed: %s beside it holds the weights", index, SINGLE)


def _named(directory: Path) -> Path | None:
    """The file of weights, or the index, that config.json names (`transformers_weights`)."""
    config = directory / CONFIG
    name = read_json(config).get("transformers_weights") if config.is_file() else None
    if name is None:
        return None
    if not isinstance(name, str) or Path(name).name != name or not name.endswith((".safetensors", f".{INDEXED}")):
        raise WeightsError(f"{config}: transformers_weights must be a .safetensors file beside it or an index of such, "
                           f"not {name!r}.")  # fmt: skip
    return directory / name


def _indexed(index: Path) -> list[Path]:
    """The files that an index lists."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightsError(f"{index} is not a valid index ({error!r}). Download or export it again.") from error
    absent = [name for name in names if not (index.parent / name).is_file()]
    if absent:
        raise WeightsError(f"{index} lists files that are not there: {_some(absent)}. The download is incomplete.")
    return [index.parent / name for name in names]


def head_of_its_own(directory: Path) -> bool:
    """True if the weights have an output head that is no copy of the embeddings: then the two are not tied, whatever
    config.json says. False where there are no weights to look at."""
    try:
        files = _files(directory)
        stamps = tuple((str(file), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files)
        return _heads_differ(directory, stamps)
    except (UserError, OSError):
        return False


@lru_cache(maxsize=8)
def _heads_differ(directory: Path, stamps: tuple[tuple[str, int, int], ...]) -> bool:
    checkpoint = Checkpoint(directory)
    if not {HEAD, EMBEDDINGS} <= checkpoint.where.keys():
        return False
    head, table = checkpoint.read(HEAD), checkpoint.read(EMBEDDINGS)
    same = head.shape == table.shape and head.dtype == table.dtype and torch.equal(head, table)
    if not same:
        log.warning("%s: the output head is no copy of the embeddings, so they are not tied", directory)
    return not same


class Weights:
    """The decoder's tensors, each taken once: read, fused, cast and moved one at a time, sources let go in between.

    Construction compares the whole layout with the files and raises WeightsError naming missing, left-over and
    misshapen tensors, so a load never fails half-way. `dtype` None keeps the checkpoint's (that of its embeddings).
    """

    def __init__(self, checkpoint: Tensors, layout: Layout, dtype: torch.dtype | None, device: torch.device) -> None:
        self.checkpoint = checkpoint
        self.layout = dict(layout)
        self.device = device
        self.taken_bytes = 0
        self._told, self._count = LOADING.get(), len(layout)
        _compare(checkpoint, layout)
        self.int8 = dtype == torch.int8
        dtype = torch.bfloat16 if self.int8 else dtype
        self.dtype = dtype or checkpoint.dtype(layout["embed"][0][0])
        if self.dtype not in DTYPES:
            raise WeightsError(f"dtype {self.dtype} is not supported (checkpoint {checkpoint.directory}); "
                               f"choose one of {', '.join(map(str, (*DTYPES, torch.int8)))}.")  # fmt: skip

    def __contains__(self, key: str) -> bool:
        return key in self.layout

    def take(self, key: str) -> Tensor:
        """The tensor under `key`, once. A single part that needs no change stays a view of the mapped file."""
        tensor = self._fuse(self._parts_of(key))
        self.taken_bytes += tensor.nbytes
        return tensor

    def _parts_of(self, key: str) -> tuple[Part, ...]:
        parts = self.layout.pop(key)
        if self._told is not None:
            self._told(1 - len(self.layout) / self._count)
        return parts

    def _fuse(self, parts: tuple[Part, ...]) -> Tensor:
        if len(parts) == 1:
            return self._read(parts[0][0]).to(self.device, self.dtype)
        rows = sum(shape[0] for _, shape in parts)
        out = torch.empty((rows, *parts[0][1][1:]), dtype=self.dtype, device=self.device)
        start = 0
        for name, shape in parts:
            part = self._read(name)
            out[start : start + shape[0]].copy_(part)
            self.checkpoint.let_go(part)
            del part  # before the next one is read
            start += shape[0]
        return out

    def _read(self, name: str) -> Tensor:
        tensor = self.checkpoint.read(name, self.dtype)
        check_plain(self.checkpoint, name, tensor.dtype)
        return tensor

    def linear(self, key: str) -> Linear:
        """The linear layer under `key`, once; in the form of its file, where that has a kernel."""
        bias = self.take(f"{key}.bias") if f"{key}.bias" in self else None
        exact = key.endswith("router")
        if not exact and self._in_blocks(key):
            return self._as_stored(key, bias)
        if exact or not self._packs:
            return self.packed(self.take(key), bias, exact=exact)
        rows = FusedRows(self.checkpoint, self._parts_of(key), self.dtype)
        weights = PackedWeights(rows, bias, "int8" if self.int8 else "bfloat16", self.checkpoint.let_go)
        self.taken_bytes += weights.nbytes - (0 if bias is None else bias.nbytes)
        return Linear.of(weights)

    @property
    def _packs(self) -> bool:
        """True if linear layers are packed for the native kernels, slice by slice."""
        return self.device.type == "cpu" and self.dtype == torch.bfloat16 and native.library() is not None

    def table(self, key: str) -> Tensor | Linear:
        """The tensor under `key`, once; rows of one that stays in the form of its file, or that had to be expanded, are
        had from a layer."""
        if self._in_blocks(key):
            return self._as_stored(key, None)
        expands = not isinstance(self.checkpoint.rows(self.layout[key][0][0], self.dtype), Tensor)
        return self.linear(key) if expands and self._packs and not self.int8 else self.take(key)

    def _in_blocks(self, key: str) -> bool:
        return any(self._form(name) is not None for name, _ in self.layout[key])

    def _form(self, name: str) -> tuple[str, BlockMatrix] | None:
        """The form of weights in which a tensor stays as its file has it; None where there is none."""
        if self.device.type != "cpu" or self.dtype != torch.bfloat16:
            return None
        return kept_form(self.checkpoint, name, int8=self.int8)

    def _as_stored(self, key: str, bias: Tensor | None) -> Linear:
        """Packed tensor by tensor, slice by slice, straight from the mapped file."""
        names = [name for name, _ in self._parts_of(key)]
        columns = self._columns(names)
        weights = PackedWeights.of([self._part(name, columns) for name in names], bias)
        self.taken_bytes += weights.nbytes - (0 if bias is None else bias.nbytes)
        linear, pair = Linear.of(weights, columns), self._beside(names)
        if pair is None:
            return linear
        self.taken_bytes += pair.down.nbytes + pair.up.nbytes
        return linear.with_pair(pair.down, pair.up)

    def _beside(self, names: Sequence[str]) -> LowRankPair | None:
        """The low-rank weights beside the parts of one layer, as one pair for all its outputs in the layer's dtype."""
        forms = [self._form(name) for name in names]
        pairs = [None if form is None else form[1].beside for form in forms]
        downs = list({id(pair.down): pair.down for pair in pairs if pair is not None}.values())
        if not downs:
            return None
        starts = dict(zip(map(id, downs), accumulate(map(len, downs), initial=0)))
        up = torch.zeros(sum(self.checkpoint.shape(name)[0] for name in names), sum(map(len, downs)), dtype=self.dtype)
        row = 0
        for name, pair in zip(names, pairs):
            rows = self.checkpoint.shape(name)[0]
            if pair is not None:
                start = starts[id(pair.down)]
                up[row : row + rows, start : start + len(pair.down)] = pair.up
            row += rows
        return LowRankPair(torch.cat(downs).to(self.dtype), up)

    def _columns(self, names: Sequence[str]) -> Tensor | None:
        """The order in which parts of one layer have their inputs, int64 [in]; None: that of the layer."""
        found = {name: form[1].columns for name in names if (form := self._form(name)) is not None}
        first = next(iter(found.values()))
        for name, each in found.items():
            if not np.array_equal([] if each is None else each, [] if first is None else first):
                raise WeightsError(f"{self.checkpoint.directory}: the inputs of {names[0]} and {name} are in unlike "
                                   "orders (desc_act), and one layer has both. --dtype float32 expands.")  # fmt: skip
        return None if first is None else torch.from_numpy(first)

    def _part(self, name: str, columns: Tensor | None) -> PackedPart:
        found = self._form(name)
        if found is None:
            rows = FusedRows(self.checkpoint, [(name, self.checkpoint.shape(name))], self.dtype)
            dense = rows if columns is None else rows[:][:, columns]
            return pack(dense, "int8" if self.int8 else "bfloat16", self.checkpoint.let_go)
        form, stored = found
        return pack_blocks(stored.raw, form, stored.order, stored.done, stored.whole)

    def packed(self, weight: Tensor, bias: Tensor | None = None, *, exact: bool = False) -> Linear:
        """A linear layer in the precision asked for; `exact` leaves the weight as it is."""
        before = weight.nbytes + (0 if bias is None else bias.nbytes)
        precision = "int8" if self.int8 and not exact else "as stored"
        linear = Linear(weight, bias, precision=precision, done=self.checkpoint.let_go)
        self.taken_bytes += linear.nbytes - before
        return linear


class FusedRows:
    """The rows of matrices one below another in one dtype, each of them opened when its first row is asked for.

    A slice within one matrix that needs no change is a view of the mapped file. Of others the file's pages are given
    back at once.
    """

    def __init__(self, checkpoint: Tensors, parts: Sequence[Part], dtype: torch.dtype) -> None:
        self.shape = (sum(shape[0] for _, shape in parts), *parts[0][1][1:])
        self.dtype = dtype
        self._checkpoint, self._names = checkpoint, [name for name, _ in parts]
        self._starts = list(accumulate((shape[0] for _, shape in parts), initial=0))
        self._open: tuple[int, DenseRows] | None = None

    def __getitem__(self, rows: slice, /) -> Tensor:
        start, end, _ = rows.indices(self.shape[0])
        first = bisect_right(self._starts, start) - 1
        found = self._part(first)[start - self._starts[first] : end - self._starts[first]]
        if len(found) == end - start and found.dtype == self.dtype:
            return found
        out = torch.empty((end - start, *self.shape[1:]), dtype=self.dtype)
        at = start
        while True:
            out[at - start : at - start + len(found)] = found
            self._checkpoint.let_go(found)
            at += len(found)
            if at == end:
                return out
            first += 1
            found = self._part(first)[: end - at]

    def _part(self, index: int) -> DenseRows:
        if self._open is None or self._open[0] != index:
            self._open = None  # before the next one is read
            name = self._names[index]
            rows = self._checkpoint.rows(name, self.dtype)
            check_plain(self._checkpoint, name, rows.dtype)
            self._open = index, rows
        return self._open[1]


def check_plain(checkpoint: Tensors, name: str, dtype: torch.dtype) -> None:
    """Raise WeightsError for a tensor whose numbers are not of a dtype that is read."""
    if dtype not in DTYPES:
        raise WeightsError(f"{checkpoint.where[name]}: tensor {name} is {dtype}; only unquantised weights are "
                           f"supported ({', '.join(map(str, DTYPES))}).")  # fmt: skip


def kept_form(checkpoint: Tensors, name: str, *, int8: bool) -> tuple[str, BlockMatrix] | None:
    """The form of weights in which a tensor stays as its file has it, and the tensor; None if it is expanded."""
    stored = checkpoint.blocks(name) if native.library() is not None else None
    form = None if stored is None else form_of_blocks(stored.kind, int8=int8)
    return None if stored is None or form is None else (form, stored)


def _compare(checkpoint: Tensors, layout: Layout) -> None:
    expected: dict[str, Part] = {part[0]: part for parts in layout.values() for part in parts}
    present = {name for name in checkpoint.where if not HARMLESS.fullmatch(name)}
    present -= set(module_tensors(present)) - expected.keys()  # for drafting, beside the decoder
    if "head" not in layout:
        present.discard(HEAD)  # a copy of the embeddings that some exports of tied models keep
    missing = sorted(expected.keys() - present)
    extra = sorted(name for name in present - expected.keys() if not _no_bias(checkpoint, name))
    problems = []
    if missing:
        problems.append(f"missing: {_some(missing)}")
    if extra:
        files = sorted({checkpoint.where[name].name for name in extra})
        problems.append(f"left over in {_some(files)}: {_some(extra)}")
    for name in sorted(expected.keys() & present):
        actual, wanted = checkpoint.shape(name), expected[name][1]
        if actual != wanted:
            where = checkpoint.where[name].name
            problems.append(f"{name} in {where} has shape {list(actual)}, its settings ask for {list(wanted)}")
    if problems:
        shown = "; ".join(problems[:6]) + (f"; and {len(problems) - 6} more" if len(problems) > 6 else "")
        raise WeightsError(f"The weights in {checkpoint.directory} do not fit its settings: {shown}.")


def _no_bias(checkpoint: Tensors, name: str) -> bool:
    """True of a bias of zeros, which files in GPTQ's layout have for every layer: it changes nothing."""
    plain = name.endswith(".bias") and len(checkpoint.shape(name)) == 1 and checkpoint.dtype(name) in DTYPES
    return plain and not checkpoint.read(name).any()


def _some(names: Iterable[str], most: int = 5) -> str:
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")
