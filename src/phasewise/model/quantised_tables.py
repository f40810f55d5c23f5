"""Checkpoints whose levels stand for values of a table, and MLX's: their matrices become blocks, where a kind has them.

Bytes hold two levels. A weight is `scale * value`, in MLX's form `scale * level + bias`.

    mxfp4-pack-quantized   weight_packed uint8 [out, in / 2], the first low   weight_scale uint8 [out, in / 32], powers
    nvfp4-pack-quantized   the same      weight_scale fp8 [out, in / 16] over weight_global_scale float32 [1]
    nf4, fp4               weight uint8 [out * in / 2, 1], the first high, blocks of `blocksize` inputs:
                           weight.absmax float32, weight.quant_map float32 [16]; with nested scales absmax is uint8, and
                           nested_quant_map[absmax] * nested_absmax + nested_offset; the sizes are JSON in
                           weight.quant_state.bitsandbytes__nf4, uint8
    mlx                    weight uint32 [out, in / 8], the first low   scales, biases [out, groups]

MXFP4 is a kind as it is, MLX's is Q4_1. NVFP4's blocks are those of GGUF, and the scale of a whole tensor goes with
them. NF4 and FP4 are levels with a codebook, the quant_map in bfloat16, and scales in float16; blocks that are no
multiple of 64 inputs are expanded, and the log says so.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phasewise.errors import WeightsError
from phasewise.gguf.blocks import BlockMatrix
from phasewise.model.quantisation import READ, Quantisation
from phasewise.model.quantised_tensors import QuantisedTensors
from phasewise.model.weights import DTYPES, Checkpoint
from phasewise.ops.native.levels import KINDS
from phasewise.ops.native.weights import WIDTH

Bytes = NDArray[np.uint8]
log = logging.getLogger(__name__)
OUTPUTS = 256  # that are made at a time
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and the same below 0
FP4 = torch.tensor([*E2M1, *(-value for value in E2M1)])
HALF_STEP = 2.0**-11  # that float16 rounds by, relative to the number, at most; below 2^-14 it is more
LARGEST_STATE = 1 << 16  # bytes of JSON
Some = Callable[[slice], Tensor]


@dataclass(eq=False)
class TableMatrix:
    """One matrix: of some outputs its levels uint8 [n, in], and what they are worth. It is what pack_blocks takes where
    `kind` names one: a slice of rows is blocks, made when it is asked for."""

    name: str
    outputs: int
    inputs: int
    kind: str | None
    levels: Some
    values: Callable[[slice, Tensor], Tensor]  # levels of some outputs -> float32 [n, in]
    blocks: Callable[[slice, Tensor], Bytes]  # the same as blocks [n, bytes of a row]
    parts: tuple[Tensor, ...]
    why: str = ""  # there is no kind
    whole: float | None = None  # what blocks are multiplied with

    @property
    def shape(self) -> tuple[int, int]:
        assert self.kind is not None
        kind = KINDS[self.kind]
        return self.outputs, kind.start + self.inputs // kind.inputs * kind.size

    @property
    def nbytes(self) -> int:
        """Bytes that are kept: a panel has its codebook once."""
        assert self.kind is not None
        return math.prod(self.shape) - (self.outputs - -(-self.outputs // WIDTH)) * KINDS[self.kind].start

    def __getitem__(self, rows: slice | NDArray[np.int64], /) -> Bytes:
        assert isinstance(rows, slice)
        start, end, _ = rows.indices(self.outputs)
        out = np.empty((end - start, self.shape[1]), np.uint8)
        for first in range(start, end, OUTPUTS):
            some = slice(first, min(first + OUTPUTS, end))
            out[first - start : some.stop - start] = self.blocks(some, self.levels(some))
        return out

    def expanded(self, dtype: torch.dtype) -> Tensor:
        """The matrix [out, in], worked out in float32."""
        out = torch.empty((self.outputs, self.inputs), dtype=dtype)
        for start in range(0, self.outputs, OUTPUTS):
            some = slice(start, min(start + OUTPUTS, self.outputs))
            out[some] = self.values(some, self.levels(some))
        return out


def _no_blocks(some: slice, levels: Tensor) -> Bytes:
    raise AssertionError("a matrix without a kind has no blocks")


def _low_first(raw: Tensor) -> Tensor:
    """uint8 [n, m] of two levels each -> [n, 2 m]."""
    return torch.stack((raw & 15, raw >> 4), -1).flatten(1)


def _halves(levels: Tensor) -> Tensor:
    """Levels [n, blocks, 32] -> bytes [n, blocks, 16] as GGUF has them: the first sixteen low, the others high."""
    return levels[..., :16] | levels[..., 16:] << 4


class TableQuantised(QuantisedTensors[TableMatrix]):
    """A checkpoint's tensors by the names that they have in one that is not quantised.

    Construction compares all that belongs to a matrix, and raises WeightsError naming it. What is not kept as it lies
    is bfloat16 unless told otherwise.
    """

    def __init__(self, checkpoint: Checkpoint, said: Quantisation) -> None:
        self.checkpoint, self._said = checkpoint, said
        self.where: dict[str, Path] = dict(checkpoint.where)
        self._matrices: dict[str, TableMatrix] = {}
        self._told = False
        find, ending = LAYOUTS[said.layout]
        for module in sorted(name.removesuffix(ending) for name in checkpoint.where if name.endswith(ending)):
            taken = _Parts(checkpoint, module)
            self._matrices[f"{module}.weight"] = find(taken, said)
            where = checkpoint.where[f"{module}{ending}"]
            for part in taken.names:
                self.where.pop(part, None)
            self.where[f"{module}.weight"] = where
        self._check_any(ending)

    def blocks(self, name: str) -> BlockMatrix | None:
        found = self._matrices.get(name)
        if found is None:
            return None
        if found.kind is None:
            if not self._told:
                log.warning("%s is expanded (others may be too): %s", found.name, found.why)
            self._told = True
            return None

        def done(_: int, end: int) -> None:
            if end == found.outputs:
                self._let_go(found)

        return BlockMatrix(found.kind, found, None, done, whole=found.whole)

    def let_go(self, tensor: Tensor) -> None:
        self.checkpoint.let_go(tensor)

    def _let_go(self, matrix: TableMatrix) -> None:
        for tensor in matrix.parts:
            self.checkpoint.let_go(tensor)


class _Parts:
    """Tensors of one module, each taken by the end of its name with the dtypes and the shape that it must have."""

    def __init__(self, checkpoint: Checkpoint, module: str) -> None:
        self.checkpoint, self.module = checkpoint, module
        self.names: list[str] = []
        self.tensors: list[Tensor] = []

    @property
    def name(self) -> str:
        return f"{self.checkpoint.directory}: {self.module}"

    def has(self, part: str) -> bool:
        return f"{self.module}.{part}" in self.checkpoint.where

    def take(self, part: str, *dtypes: torch.dtype, shape: tuple[int, ...] | None = None) -> Tensor:
        if not self.has(part):
            raise self.wrong(f"has no {part}")
        found = self.checkpoint.read(f"{self.module}.{part}")
        if found.dtype not in dtypes:
            raise self.wrong(f"has {part} of {found.dtype}, and {' or '.join(map(str, dtypes))} is read")
        if shape is not None and tuple(found.shape) != shape:
            raise self.wrong(f"has {part} of shape {list(found.shape)}, and its other tensors ask for {list(shape)}")
        self.names.append(f"{self.module}.{part}")
        self.tensors.append(found)
        return found

    def matrix(self, part: str, *dtypes: torch.dtype) -> Tensor:
        found = self.take(part, *dtypes)
        if found.ndim != 2 or not found.numel():
            raise self.wrong(f"has {part} of shape {list(found.shape)}, and a matrix is read")
        return found

    def whole(self, inputs: int, size: int) -> None:
        if inputs % size:
            raise self.wrong(f"has {inputs:,} inputs, which blocks of {size} do not divide")

    def finite(self, part: str, values: Tensor) -> None:
        if not bool(torch.isfinite(values.float()).all()):
            raise self.wrong(f"has {part} that is not finite")

    def wrong(self, what: str) -> WeightsError:
        return WeightsError(f"{self.name} {what}. Download or export it again. Read are {READ}.")


def _mxfp4(parts: _Parts, said: Quantisation) -> TableMatrix:
    packed = parts.matrix("weight_packed", torch.uint8)
    outputs, inputs = packed.shape[0], packed.shape[1] * 2
    parts.whole(inputs, 32)
    scales = parts.take("weight_scale", torch.uint8, shape=(outputs, inputs // 32))
    _own_shape(parts, outputs, inputs)
    if bool((scales == 255).any()):
        raise parts.wrong("has weight_scale 255, which stands for no number")
    return mxfp4(parts.name, packed, scales, tuple(parts.tensors))


def mxfp4(name: str, packed: Tensor, scales: Tensor, parts: tuple[Tensor, ...] | None = None) -> TableMatrix:
    """A matrix of nibbles, two inputs a byte, `packed` uint8 [out, in / 2], and powers of two, uint8 [out, in / 32]."""

    def values(some: slice, levels: Tensor) -> Tensor:
        powers = torch.ldexp(torch.ones(scales[some].shape), scales[some].int() - 127)
        return FP4[levels.int()] * powers.repeat_interleave(32, 1)

    def blocks(some: slice, levels: Tensor) -> Bytes:
        nibbles = _halves(levels.reshape(len(levels), -1, 32))
        return torch.cat((scales[some, :, None], nibbles), -1).flatten(1).numpy()

    return TableMatrix(name, packed.shape[0], packed.shape[1] * 2, "MXFP4", lambda some: _low_first(packed[some]),
                       values, blocks, parts or (packed, scales))  # fmt: skip


def _nvfp4(parts: _Parts, said: Quantisation) -> TableMatrix:
    packed = parts.matrix("weight_packed", torch.uint8)
    outputs, inputs = packed.shape[0], packed.shape[1] * 2
    parts.whole(inputs, 16)
    scales = parts.take("weight_scale", torch.float8_e4m3fn, shape=(outputs, inputs // 16))
    whole = parts.take("weight_global_scale", *DTYPES).float().flatten()
    if len(whole) != 1 or not bool(torch.isfinite(whole).all()) or float(whole) <= 0:
        raise parts.wrong(f"has weight_global_scale {whole.tolist()!s:.60}, and one number above 0 is read")
    parts.finite("weight_scale", scales)
    _own_shape(parts, outputs, inputs)
    if parts.has("input_global_scale"):
        parts.take("input_global_scale", *DTYPES)  # of activations, whose rounding is not imitated

    signed = bool((scales.view(torch.uint8) > 127).any())
    why = "a scale of nvfp4 is below 0" if signed else "" if inputs % 64 == 0 else "64 inputs are a block of nvfp4's"

    def values(some: slice, levels: Tensor) -> Tensor:
        return FP4[levels.int()] * (scales[some].float() / whole).repeat_interleave(16, 1)

    def blocks(some: slice, levels: Tensor) -> Bytes:
        heads = scales[some].view(torch.uint8).reshape(-1, inputs // 64, 4)
        quarters = levels.reshape(len(levels), inputs // 64, 4, 16)
        nibbles = quarters[..., :8] | quarters[..., 8:] << 4
        return torch.cat((heads, nibbles.flatten(2)), -1).flatten(1).numpy()

    return TableMatrix(parts.name, outputs, inputs, None if why else "NVFP4", lambda some: _low_first(packed[some]),
                       values, blocks, tuple(parts.tensors), why, 1 / float(whole))  # fmt: skip


def _own_shape(parts: _Parts, outputs: int, inputs: int) -> None:
    if parts.has("weight_shape"):
        said = parts.take("weight_shape", torch.int32, torch.int64).tolist()
        if said != [outputs, inputs]:
            raise parts.wrong(f"has weight_shape {said!s:.60}, and weight_packed is of {[outputs, inputs]}")


def _mlx(parts: _Parts, said: Quantisation) -> TableMatrix:
    words = parts.matrix("weight", torch.uint32, torch.int32)
    outputs, inputs = words.shape[0], words.shape[1] * 8
    size = said.groups[0][1] or inputs
    parts.whole(inputs, size)
    scales = parts.take("scales", *DTYPES, shape=(outputs, inputs // size))
    biases = parts.take("biases", *DTYPES, shape=(outputs, inputs // size))
    exact = all(torch.equal(each.half().float(), each.float()) for each in (scales, biases))
    why = "" if exact and size % 32 == 0 else "float16 does not hold all of its scales and biases"

    def levels(some: slice) -> Tensor:
        raw = words[some].contiguous().view(torch.int32).numpy().view(np.uint8)
        return _low_first(torch.from_numpy(raw))

    def values(some: slice, found: Tensor) -> Tensor:
        wide = [each[some].float().repeat_interleave(size, 1) for each in (scales, biases)]
        return found * wide[0] + wide[1]

    def blocks(some: slice, found: Tensor) -> Bytes:
        nibbles = _halves(found.reshape(len(found), -1, 32))
        heads = [each[some].half().repeat_interleave(size // 32, 1)[..., None].view(torch.uint8)
                 for each in (scales, biases)]  # fmt: skip
        return torch.cat((*heads, nibbles), -1).flatten(1).numpy()

    return TableMatrix(parts.name, outputs, inputs, None if why else "Q4_1", levels, values, blocks,
                       tuple(parts.tensors), why)  # fmt: skip


def _bitsandbytes(parts: _Parts, said: Quantisation) -> TableMatrix:
    state = _state(parts, said.layout)
    (outputs, inputs), size = state["shape"], state["blocksize"]
    count = outputs * inputs
    raw = parts.take("weight", torch.uint8)
    if raw.numel() * 2 != count + count % 2:
        raise parts.wrong(f"has weight of {raw.numel():,} bytes, and its quant_state asks for {-(-count // 2):,}")
    table = parts.take("weight.quant_map", torch.float32, shape=(16,))
    parts.finite("weight.quant_map", table)
    scales = _absmax(parts, state, -(-count // size))
    flat = raw.flatten()

    def levels(some: slice) -> Tensor:
        first, last = some.start * inputs, some.stop * inputs
        pairs = flat[first // 2 : -(-last // 2)]
        each = torch.stack((pairs >> 4, pairs & 15), -1).flatten()
        return each[first % 2 : first % 2 + last - first].reshape(-1, inputs)

    def values(some: slice, found: Tensor) -> Tensor:
        places = torch.arange(some.start * inputs, some.stop * inputs) // size
        return table[found.int()] * scales[places].reshape(found.shape)

    def blocks(some: slice, found: Tensor) -> Bytes:
        nibbles = (found[:, ::2] | found[:, 1::2] << 4).reshape(len(found), -1, each // 2)
        places = torch.arange(some.start * inputs, some.stop * inputs, each) // size
        heads = halves[places].view(torch.uint8).reshape(len(found), -1, 2)
        book = table.bfloat16().view(torch.uint8).expand(len(found), -1)
        return torch.cat((book, torch.cat((heads, nibbles), -1).flatten(1)), 1).numpy()

    each = 128 if size % 128 == 0 and inputs % 128 == 0 else 64
    halves, why = scales.half(), _why_expanded(size, inputs, scales)
    return TableMatrix(parts.name, outputs, inputs, None if why else f"CODES_4_{each}", levels, values, blocks,
                       tuple(parts.tensors), why)  # fmt: skip


def _why_expanded(size: int, inputs: int, scales: Tensor) -> str:
    """Why a matrix of bitsandbytes' is not kept as its levels and a codebook; empty: it is."""
    if size % 64 or inputs % 64:
        return f"groups of 64 inputs have a kernel, and blocks are of {size} in rows of {inputs:,}"
    if bool((scales.half().float() - scales).abs().gt(scales.abs() * HALF_STEP).any()):
        return "float16 does not hold its scales"
    return ""


def _state(parts: _Parts, kind: str) -> dict[str, Any]:
    """What the JSON beside a matrix says, its sizes checked."""
    part = f"weight.quant_state.bitsandbytes__{kind}"
    raw = parts.take(part, torch.uint8)
    if raw.numel() > LARGEST_STATE:
        raise parts.wrong(f"has {part} of {raw.numel():,} bytes, and {LARGEST_STATE:,} are the most")
    try:
        state: Any = json.loads(raw.flatten().numpy().tobytes().decode("utf-8"))
    except ValueError as error:
        raise parts.wrong(f"has {part} that is no JSON ({error})") from error

    def whole(value: object) -> bool:
        return type(value) is int and 0 < value < 1 << 40

    sizes = state.get("shape") if isinstance(state, dict) else None
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(map(whole, (*sizes, state.get("blocksize")))):
        raise parts.wrong(f"has {part} {json.dumps(state):.90}, and it must have a shape of two sizes and a blocksize")
    if state.get("quant_type") != kind:
        raise parts.wrong(f"has {part} of the type {state.get('quant_type')!r:.60}, not {kind}")
    return dict(state)


def _absmax(parts: _Parts, state: dict[str, Any], blocks: int) -> Tensor:
    """The scale of each block, float32 [blocks]."""
    stored = parts.take("weight.absmax", torch.float32, torch.uint8, shape=(blocks,))
    if stored.dtype == torch.float32:
        parts.finite("weight.absmax", stored)
        return stored
    size, offset = state.get("nested_blocksize"), state.get("nested_offset")
    if type(size) is not int or size < 1 or not isinstance(offset, (int, float)) or not math.isfinite(offset):
        raise parts.wrong(f"has nested_blocksize {size!r:.40} and nested_offset {offset!r:.40}, and numbers are read")
    table = parts.take("weight.nested_quant_map", torch.float32, shape=(256,))
    outer = parts.take("weight.nested_absmax", torch.float32, shape=(-(-blocks // size),))
    scales = table[stored.int()] * outer[torch.arange(blocks) // size] + offset
    parts.finite("weight.absmax", scales)
    return scales


Find = Callable[[_Parts, Quantisation], TableMatrix]
LAYOUTS: dict[str, tuple[Find, str]] = {  # and the end of a name by which matrices are told
    "mxfp4-pack-quantized": (_mxfp4, ".weight_packed"),
    "nvfp4-pack-quantized": (_nvfp4, ".weight_packed"),
    "nf4": (_bitsandbytes, ".weight.quant_state.bitsandbytes__nf4"),
    "fp4": (_bitsandbytes, ".weight.quant_state.bitsandbytes__fp4"),
    "mlx": (_mlx, ".scales"),
}
