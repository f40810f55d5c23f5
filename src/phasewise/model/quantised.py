"""Checkpoints that others have quantised: their matrices become blocks of a kernel's kind, and nothing is expanded.

A weight is `scale * (level - zero)`: levels of 4 bits (or 8), a scale and a zero for each output and group of inputs.
Layouts differ in what lies beside what. Words are int32 of eight levels, the first in the lowest bits:

    gptq             qweight [in / 8, out]   qzeros [groups, out / 8]               scales [groups, out]
    awq              qweight [in, out / 8]   qzeros [groups, out / 8]               scales [groups, out]
    pack-quantized   weight_packed [out, in / 8]   weight_zero_point [out / 8, groups]   weight_scale [out, groups]
    .. of 8 bits     weight_packed [out, in / 4], of four levels a word              weight_scale [out, groups]
    int-quantized    weight int8 [out, in]                                          weight_scale [out, groups]
    float-quantized  weight fp8 [out, in]             a scale per output or per block of outputs, or one in weight_scale
    fp8              weight fp8 [out, in]             a scale per block of outputs and inputs in weight_scale_inv

FP8 (e4m3) is kept where the scales of 32 inputs are one, else expanded, and the log says so.
Words run along the divided dimension. AWQ has the eight outputs of a word in the order `INTERLEAVED`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phasewise.errors import WeightsError
from phasewise.gguf.blocks import BlockMatrix
from phasewise.model.quantisation import PACKED_BYTES, READ, Quantisation
from phasewise.model.quantised_tensors import QuantisedTensors
from phasewise.model.weights import DTYPES, Checkpoint
from phasewise.ops.native.levels import KINDS

Bytes = NDArray[np.uint8]
log = logging.getLogger(__name__)

INTERLEAVED = (0, 2, 4, 6, 1, 3, 5, 7)  # outputs of a word of AWQ's, from the lowest bits up
BLOCKS = (128, 64, 32)  # inputs of a block of 4 bits
FLOAT_BLOCKS = (128, 32)  # of FP8
OUTPUTS = 256  # of which blocks are made at a time
MIDDLE = 8  # the level of 4 bits that stands for 0 where nothing says otherwise
Shape = tuple[int, ...]


@lru_cache(maxsize=64)
def _in_order(inputs: int, size: int) -> NDArray[np.int64]:
    """The group of each input where groups lie one after the other: shared by all matrices of a size."""
    return np.arange(inputs) // size


# ---- words and levels
def _bytes(words: Tensor) -> Bytes:
    """int32 [..., n] -> uint8 [..., 4 n], each of two levels, the first in the low bits."""
    return words.contiguous().numpy().view(np.uint8)


def _apart(pairs: Bytes) -> Bytes:
    """uint8 [..., n] of two levels each -> the levels, uint8 [..., 2 n]."""
    return np.stack((pairs & 15, pairs >> 4), -1).reshape(*pairs.shape[:-1], -1)


def _interleaved(words: Tensor) -> Bytes:
    """int32 [..., n] in AWQ's order -> the eight levels of each word, uint8 [..., 8 n]."""
    found = _apart(_bytes(words)).reshape(*words.shape, 8)[..., np.argsort(INTERLEAVED)]
    return found.reshape(*words.shape[:-1], -1)


def _turned(words: Tensor) -> Bytes:
    """int32 [in, n] in AWQ's order -> of each of 8 n outputs pairs of inputs, uint8 [8 n, in / 2]."""
    raw = _bytes(words).reshape(len(words), -1, 4)
    one, other = raw[::2], raw[1::2]
    out = np.empty((raw.shape[1], 8, len(one)), np.uint8)
    out[:, INTERLEAVED[::2]] = ((one & 15) | other << 4).transpose(1, 2, 0)
    out[:, INTERLEAVED[1::2]] = ((one >> 4) | (other & 240)).transpose(1, 2, 0)
    return out.reshape(-1, len(one))


class FileLayout(NamedTuple):
    """The names of a module's tensors, how large they are, and how its rows and zeros are had from them."""

    levels: str
    scales: str
    zeros: str | None
    order: str | None  # the group of each input
    bits: int
    dtype: torch.dtype  # of levels
    scales_turned: bool  # whether scales are [groups, out]
    size: Callable[[Shape], tuple[int, int]]  # (out, in) of levels of a shape
    zeros_shape: Callable[[int, int], Shape]  # of so many outputs and groups
    rows: Callable[[Tensor, int, int], Bytes]  # outputs from start to end, uint8 [end - start, in * bits / 8]
    zero_levels: Callable[[Tensor], Bytes]  # zeros uint8 [out, groups]

    @property
    def floats(self) -> bool:
        """Whether levels are floats."""
        return self.dtype == torch.float8_e4m3fn


LAYOUTS = {
    "gptq": FileLayout(
        "qweight", "scales", "qzeros", "g_idx", 4, torch.int32, True,
        size=lambda shape: (shape[1], shape[0] * 8),
        zeros_shape=lambda outputs, groups: (groups, -(-outputs // 8)),
        rows=lambda words, start, end: _bytes(words[:, start:end].T),
        zero_levels=lambda words: _apart(_bytes(words)).T,
    ),
    "awq": FileLayout(
        "qweight", "scales", "qzeros", None, 4, torch.int32, True,
        size=lambda shape: (shape[1] * 8, shape[0]),
        zeros_shape=lambda outputs, groups: (groups, outputs // 8),
        rows=lambda words, start, end: _turned(words[:, start // 8 : end // 8]),
        zero_levels=lambda words: _interleaved(words).T,
    ),
    "pack-quantized": FileLayout(
        "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", 4, torch.int32, False,
        size=lambda shape: (shape[0], shape[1] * 8),
        zeros_shape=lambda outputs, groups: (-(-outputs // 8), groups),
        rows=lambda words, start, end: _bytes(words[start:end]),
        zero_levels=lambda words: _apart(_bytes(words.T)).T,
    ),
    "int-quantized": FileLayout(
        "weight", "weight_scale", None, None, 8, torch.int8, False,
        size=lambda shape: (shape[0], shape[1]),
        zeros_shape=lambda outputs, groups: (outputs, groups),
        rows=lambda levels, start, end: levels[start:end].view(torch.uint8).numpy(),
        zero_levels=lambda words: words.numpy().view(np.uint8),
    ),
}  # fmt: skip
LAYOUTS[PACKED_BYTES] = LAYOUTS["pack-quantized"]._replace(
    zeros=None, order=None, bits=8,
    size=lambda shape: (shape[0], shape[1] * 4),
    rows=lambda words, start, end: _bytes(words[start:end]) ^ np.uint8(128),  # signed
)  # fmt: skip
FP8 = LAYOUTS["int-quantized"]._replace(dtype=torch.float8_e4m3fn)
LAYOUTS |= {"float-quantized": FP8, "fp8": FP8._replace(scales="weight_scale_inv")}
SHAPE = "weight_shape"  # of compressed-tensors: what words were padded from


@dataclass
class QuantisedMatrix:
    """One matrix of a quantised checkpoint, whose tensors have the shapes that they must have. It is what pack_blocks
    takes: a slice of its rows is blocks, uint8 [rows, bytes of a row], made when it is asked for."""

    name: str
    layout: FileLayout
    levels: Tensor
    scales: Tensor
    zeros: Tensor | None
    less_one: bool
    group_of: NDArray[np.int64]  # the group of each input
    tall: int = 1  # outputs that share scales

    def __post_init__(self) -> None:
        self.outputs, self.inputs = self.layout.size(tuple(self.levels.shape))
        if self.layout.scales_turned:
            self.scales = self.scales.T
        ordered = bool((np.diff(self.group_of) >= 0).all())
        # inputs whose groups are mixed (GPTQ's desc_act) are brought together
        self.columns = None if ordered else np.argsort(self.group_of, kind="stable")
        self.block = KINDS["Q8_0"].inputs if self.layout.bits == 8 and not self.layout.floats else self._block()

    def _block(self) -> int:
        """Inputs of a block: the most that lie within one group wherever they do. 0: floats that none of them fits."""
        counts = np.bincount(self.group_of)
        for size in FLOAT_BLOCKS if self.layout.floats else BLOCKS:
            if not (counts % size).any():
                return size
        if self.layout.floats:
            return 0
        raise WeightsError(f"{self.name} has groups of {counts.min()} to {counts.max()} inputs, of {self.inputs} in "
                           "all; groups of a multiple of 32 inputs can be read.")  # fmt: skip

    @cached_property
    def zero_levels(self) -> Bytes | None:
        """Those that stand for 0, uint8 [out, groups]; None where all are the middle one."""
        if self.zeros is None:
            return None
        # whole words, as they were stored: a level of 0 less one has borrowed from its neighbour
        words = self.zeros + 0x11111111 if self.less_one else self.zeros
        found = self.layout.zero_levels(words)[: self.outputs]
        return None if (found == MIDDLE).all() else found

    @cached_property
    def kind(self) -> str | None:
        """The kind of blocks that hold exactly these numbers. None: there is none, since groups of fp8 are of other
        sizes, or since float16 does not hold all scales."""
        if self.layout.floats:
            return f"E4M3_{self.block}" if self.block else None
        exact = self.scales.dtype == torch.float16 or bool((self.scales.half().float() == self.scales.float()).all())
        if not exact:
            return None
        if self.layout.bits == 8:
            return "Q8_0"
        return f"INT4_{self.block}" + ("" if self.zero_levels is None else "_ZEROS")

    # ---- as blocks
    @property
    def shape(self) -> tuple[int, int]:
        assert self.kind is not None
        return self.outputs, self.inputs // self.block * KINDS[self.kind].size

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape)

    def __getitem__(self, rows: slice | NDArray[np.int64], /) -> Bytes:
        assert isinstance(rows, slice)
        start, end, _ = rows.indices(self.outputs)
        out = np.empty((end - start, self.shape[1]), np.uint8)
        for first in range(start, end, OUTPUTS):
            last = min(first + OUTPUTS, end)
            self._fill(out[first - start : last - start], first, last)
        return out

    def _fill(self, out: Bytes, start: int, end: int) -> None:
        rows, groups = self.layout.rows(self.levels, start, end), self.group_of
        if self.columns is not None:
            levels, groups = _apart(rows)[:, self.columns], groups[self.columns]
            rows = levels[:, ::2] | levels[:, 1::2] << np.uint8(4)
        groups = groups[:: self.block]
        blocks = out.reshape(end - start, len(groups), -1)
        scales = self._scales(slice(start, end)).to(torch.float32 if self.layout.floats else torch.float16)
        heads = np.ascontiguousarray(scales.numpy()[:, groups])[..., None].view(np.uint8)
        blocks[:, :, : heads.shape[-1]] = heads
        if self.zero_levels is not None:
            blocks[:, :, 2] = self.zero_levels[start:end, groups]
        blocks[:, :, -self.block * self.layout.bits // 8 :] = rows.reshape(*blocks.shape[:2], -1)

    def _scales(self, some: slice) -> Tensor:
        """Of some outputs, [outputs, groups]."""
        return self.scales[some] if self.tall == 1 else self.scales[torch.arange(self.outputs)[some] // self.tall]

    # ---- as numbers
    def expanded(self, dtype: torch.dtype) -> Tensor:
        """The matrix [out, in], worked out in float32."""
        out = torch.empty((self.outputs, self.inputs), dtype=dtype)
        for start in range(0, self.outputs, OUTPUTS):
            some = slice(start, min(start + OUTPUTS, self.outputs))
            out[some] = self._values(some) * self._scales(some).float()[:, self.group_of]
        return out

    def _values(self, some: slice) -> Tensor:
        """Levels less zeros of some outputs, float32."""
        if self.layout.floats:
            return self.levels[some].float()
        if self.layout.bits == 8:
            return torch.from_numpy(self.layout.rows(self.levels, some.start, some.stop).view(np.int8)).float()
        levels = torch.from_numpy(_apart(self.layout.rows(self.levels, some.start, some.stop)).astype(np.float32))
        if self.zero_levels is None:
            return levels - MIDDLE
        return levels - torch.from_numpy(self.zero_levels[some][:, self.group_of].astype(np.float32))


class Quantised(QuantisedTensors[QuantisedMatrix]):
    """A quantised checkpoint's tensors by the names that they have in one that is not: `X.weight` for `X.qweight`.

    Construction compares all that belongs to a matrix, and raises WeightsError naming it. What is not kept as it lies
    is bfloat16 unless told otherwise, whatever the files have, since few bits have kernels for that.
    """

    def __init__(self, checkpoint: Checkpoint, said: Quantisation) -> None:
        self.checkpoint, self._said, self._layout = checkpoint, said, LAYOUTS[said.layout]
        self.where: dict[str, Path] = dict(checkpoint.where)
        self._matrices: dict[str, QuantisedMatrix] = {}
        self._told = False
        ending = f".{self._layout.scales}"
        for module in sorted(name.removesuffix(ending) for name in checkpoint.where if name.endswith(ending)):
            name, parts = f"{module}.weight", self._parts(module)
            if name in self.where and self._layout.levels != "weight":
                raise self._wrong(module, f"has both {self._layout.levels} and weight")
            self._matrices[name] = self._matrix(module, parts)
            where = self.where[f"{module}.{self._layout.levels}"]
            for part in parts:
                del self.where[f"{module}.{part}"]
            self.where[name] = where
        self._check_any(ending)

    def blocks(self, name: str) -> BlockMatrix | None:
        """A quantised matrix, its inputs in the order of its groups; None of all others."""
        found = self._matrices.get(name)
        if found is None:
            return None
        if found.kind is None:
            inexact = "float16 does not hold all of its scales"
            uneven = f"groups of fp8 are kept where they are a multiple of {FLOAT_BLOCKS[-1]} inputs"
            self._tell(found, "expanded", uneven if self._layout.floats else inexact)
            return None
        if found.columns is not None:
            self._tell(
                found, "multiplied after its inputs are gathered, which is slower", "desc_act has mixed its groups"
            )

        def done(_: int, end: int) -> None:
            if end == found.outputs:
                self._let_go(found)

        return BlockMatrix(found.kind, found, None, done, found.columns)

    def let_go(self, tensor: Tensor) -> None:
        self.checkpoint.let_go(tensor)

    def _tell(self, matrix: QuantisedMatrix, what: str, why: str) -> None:
        """Warn, once a checkpoint, of a matrix that is not as small or as fast as others."""
        if not self._told:
            log.warning("%s is %s (others may be too): %s", matrix.name, what, why)
        self._told = True

    def _let_go(self, matrix: QuantisedMatrix) -> None:
        for tensor in (matrix.levels, matrix.scales, matrix.zeros):
            if tensor is not None:
                self.checkpoint.let_go(tensor)
        matrix.__dict__.pop("zero_levels", None)  # made again where it is asked for again

    # ---- what is checked
    def _parts(self, module: str) -> dict[str, Tensor]:
        """The tensors of a module by the ends of their names; one that must be there is, and has the right dtype."""
        layout = self._layout
        must = {layout.levels: (layout.dtype,), layout.scales: DTYPES}
        may: dict[str, tuple[torch.dtype, ...]] = {}
        if layout.zeros is not None:
            (must if self._said.zeros else may)[layout.zeros] = (torch.int32,)
        if layout.order is not None:
            may[layout.order] = (torch.int32, torch.int64)
        if self._layout.levels == "weight_packed":
            may[SHAPE] = (torch.int32, torch.int64)
        parts: dict[str, Tensor] = {}
        for part, dtypes in (must | may).items():
            if f"{module}.{part}" in self.checkpoint.where:
                parts[part] = self.checkpoint.read(f"{module}.{part}")
                if parts[part].dtype not in dtypes:
                    wanted = " or ".join(map(str, dtypes))
                    raise self._wrong(module, f"has {part} of {parts[part].dtype}, and {wanted} is read")
            elif part in must:
                raise self._wrong(module, f"has no {part}")
        return parts

    def _matrix(self, module: str, parts: dict[str, Tensor]) -> QuantisedMatrix:
        layout, levels, scales = self._layout, parts[self._layout.levels], parts[self._layout.scales]
        if levels.ndim != 2 or not levels.numel():
            raise self._wrong(module, f"has {layout.levels} of shape {list(levels.shape)}, and a matrix is read")
        outputs, inputs = layout.size(tuple(levels.shape))
        if SHAPE in parts and parts[SHAPE].tolist() != [outputs, inputs]:
            raise self._wrong(module, f"has {SHAPE} {parts[SHAPE].tolist()!s:.60}, and {layout.levels} is of "
                                      f"{[outputs, inputs]}")  # fmt: skip
        tall, size, groups = self._group(module, tuple(scales.shape), outputs, inputs)
        if scales.ndim < 2:
            scales = scales.reshape(1, 1)
        zeros = parts.get(layout.zeros or "")
        if zeros is not None and tuple(zeros.shape) != layout.zeros_shape(outputs, groups):
            raise self._wrong(module, f"has {layout.zeros} of shape {list(zeros.shape)}, and its other tensors ask for "
                                      f"{list(layout.zeros_shape(outputs, groups))}")  # fmt: skip
        group_of = _in_order(inputs, size)
        if layout.order in parts:
            said = self._order(module, parts[layout.order], inputs, groups)
            group_of = group_of if np.array_equal(said, group_of) else said
        if layout.bits == 8 and not layout.floats and inputs % KINDS["Q8_0"].inputs:
            raise self._wrong(module, f"has {inputs} inputs, and a multiple of {KINDS['Q8_0'].inputs} is read")
        name = f"{self.directory}: {module}"
        return QuantisedMatrix(name, layout, levels, scales, zeros, self._said.less_one, group_of, tall)

    def _group(self, module: str, shape: Shape, outputs: int, inputs: int) -> tuple[int, int, int]:
        """Outputs and inputs that share a scale, and how many groups of inputs that makes, by the shape of scales."""
        found: dict[Shape, tuple[int, int, int]] = {}
        for tall, size in self._said.groups:
            rows, groups = -(-outputs // (tall or outputs)), -(-inputs // (size or inputs))
            one = tall or outputs, size or inputs, groups
            found[(groups, rows) if self._layout.scales_turned else (rows, groups)] = one
            if tall is None:
                found[(1,)] = found[()] = one
        if shape not in found:
            asked = " or ".join(str(list(each)) for each in found)
            raise self._wrong(module, f"has {self._layout.scales} of shape {list(shape)}, and {outputs} outputs of "
                                      f"{inputs} inputs ask for {asked}")  # fmt: skip
        return found[shape]

    def _order(self, module: str, order: Tensor, inputs: int, groups: int) -> NDArray[np.int64]:
        """The group of each input as a file says."""
        if tuple(order.shape) != (inputs,):
            raise self._wrong(module, f"has {self._layout.order} of shape {list(order.shape)}, not {[inputs]}")
        if order.min() < 0 or order.max() >= groups:
            raise self._wrong(module, f"has groups {order.min()} to {order.max()} in {self._layout.order}, and there "
                                      f"are {groups}, counted from 0")  # fmt: skip
        return order.numpy().astype(np.int64)

    def _wrong(self, module: str, what: str) -> WeightsError:
        return WeightsError(f"{self.directory}: {module} {what}. Download or export it again. Read are {READ}.")
