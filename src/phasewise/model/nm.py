"""N:M sparse checkpoints: of every M consecutive inputs of an output N weights are kept, and the others are 0.

Kernels multiply such matrices as they are kept (`ops/native/level_sparse.h`); no dense copy is made. In the files a
matrix X [out, in] is two tensors, those of compressed-tensors' former `sparse-24-bitmask` for any N and M:

    X_compressed  bfloat16 [out, in * N / M]  the kept values of each output, in the order of inputs
    X_bitmask     uint8 [out, in / 8]         a bit for each input, the first in the lowest bit: 1 is kept

What config.json says: `"quantization_config": {"quant_method": "nm", "pattern": "2:4"}`.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phasewise.errors import UserError, WeightsError, near
from phasewise.gguf.blocks import BlockMatrix
from phasewise.model.quantisation import KEY, NM
from phasewise.model.quantised_tensors import QuantisedTensors
from phasewise.model.raw import RawConfig
from phasewise.model.weights import Checkpoint
from phasewise.ops.native.levels import KINDS
from phasewise.spelling import read

log = logging.getLogger(__name__)
Bytes = NDArray[np.uint8]
COMPRESSED, BITMASK = "_compressed", "_bitmask"
OUTPUTS = 256  # of which blocks are made at a time
TWO, FOUR, SIX = map(np.uint8, (2, 4, 6))


# ---- what is asked for
@dataclass(frozen=True)
class NMPattern:
    """Of every `m` consecutive inputs of an output `n` weights are kept."""

    n: int
    m: int

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"

    @property
    def kind(self) -> str:
        """The kernels' kind of blocks (`ops/native/levels.py`)."""
        return f"NM_{self.n}_{self.m}"

    @property
    def bits(self) -> float:
        """Bits of a weight in memory, those of its group's code among them."""
        return KINDS[self.kind].size * 8 / KINDS[self.kind].inputs


PATTERNS = {str(pattern): pattern for pattern in (NMPattern(2, 4), NMPattern(1, 4), NMPattern(1, 8))}


def pattern_of(text: object, what: str) -> NMPattern:
    """The pattern that is named. Raises UserError beginning with `what` for one that no kernel has."""
    if not isinstance(text, str) or text not in PATTERNS:
        raise UserError(f"{what}={text!r:.40}: kernels have {', '.join(PATTERNS)}: choose one of them")
    return PATTERNS[text]


def parse_nm(text: str, option: str = "--weights") -> NMPattern | None:
    """What `nm:pattern=2:4` asks for; None if it is another form. Raises UserError naming the value that is wrong."""
    spelled = read(text, option)
    if spelled.name != NM:
        return None
    for knob in spelled.knobs:
        if knob != "pattern":
            raise UserError(f"{option} {text}: {NM} has no knob {knob!r}. {near(knob, ('pattern',))}")
    return pattern_of(str(spelled.knobs.get("pattern", "2:4")), f"{option} {text}: pattern")


def require_whole(pattern: NMPattern, sizes: dict[str, tuple[int, int]], where: object) -> None:
    """Raise UserError naming the first matrix whose inputs are no whole blocks of the kernels."""
    block = KINDS[pattern.kind].inputs
    for name, (_, inputs) in sizes.items():
        if inputs % block:
            raise UserError(f"{where}: {name} has {inputs:,} inputs, which blocks of {block} do not divide: no kernel "
                            f"takes it as {pattern}, and it would be kept dense. Choose another form")  # fmt: skip


# ---- masks
def largest(weight: Tensor, pattern: NMPattern) -> Tensor:
    """The `n` largest magnitudes of every `m` inputs of an output: bool [out, in], of a float matrix [out, in].

    Of equal magnitudes the earlier one is kept. A group never keeps more or fewer than `n`.
    """
    each = weight.detach().abs().view(*weight.shape[:-1], -1, pattern.m).unbind(-1)
    kept = []
    for i, own in enumerate(each):
        above = torch.zeros_like(own, dtype=torch.uint8)
        for j, other in enumerate(each):
            if j != i:
                above += other >= own if j < i else other > own
        kept.append(above < pattern.n)
    return torch.stack(kept, -1).flatten(-2)


# ---- what is written and read
@dataclass(frozen=True)
class NMMatrix:
    """A matrix [outputs, inputs]: `values` bfloat16 [outputs, inputs * n / m] and `bits` uint8 [outputs, inputs / 8].

    As an array it is blocks of the kernels' kind, uint8 [rows, bytes of a row], made when rows are asked for.
    """

    name: str
    pattern: NMPattern
    values: Tensor
    bits: Tensor

    @classmethod
    def of(cls, name: str, weight: Tensor, pattern: NMPattern, mask: Tensor | None = None) -> NMMatrix:
        """A finite float matrix [out, in], of which `mask` says what is kept; None: the largest magnitudes."""
        mask = largest(weight, pattern) if mask is None else mask
        bits = np.packbits(mask.numpy(), axis=-1, bitorder="little")
        return cls(name, pattern, weight[mask].reshape(len(weight), -1).bfloat16(), torch.from_numpy(bits))

    def tensors(self) -> dict[str, Tensor]:
        """By their names in the checkpoint."""
        return {self.name + COMPRESSED: self.values, self.name + BITMASK: self.bits}

    @property
    def outputs(self) -> int:
        return len(self.values)

    @property
    def inputs(self) -> int:
        return self.values.shape[1] // self.pattern.n * self.pattern.m

    @property
    def shape(self) -> tuple[int, int]:
        kind = KINDS[self.pattern.kind]
        return self.outputs, self.inputs // kind.inputs * kind.size

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape)

    def mask(self, rows: slice = slice(None)) -> Tensor:
        """What is kept, bool [rows, in]."""
        unpacked = np.unpackbits(self.bits[rows].numpy(), axis=-1, bitorder="little")
        return torch.from_numpy(unpacked).bool()

    def expanded(self, dtype: torch.dtype) -> Tensor:
        """The matrix with its zeros, [out, in]."""
        out = torch.zeros((self.outputs, self.inputs), dtype=dtype)
        return out.masked_scatter_(self.mask(), self.values.to(dtype))

    def __getitem__(self, rows: slice | NDArray[np.int64], /) -> Bytes:
        assert isinstance(rows, slice)
        start, end, _ = rows.indices(self.outputs)
        out = np.empty((end - start, self.shape[1]), np.uint8)
        for first in range(start, end, OUTPUTS):
            some = slice(first, min(first + OUTPUTS, end))
            out[first - start : some.stop - start] = self._blocks(some)
        return out

    def _blocks(self, rows: slice) -> Bytes:
        kind, count = KINDS[self.pattern.kind], rows.stop - rows.start
        values = self.values[rows].contiguous().view(torch.uint8).numpy().reshape(count, self.inputs // kind.inputs, -1)
        codes = self._codes(rows).reshape(count, self.inputs // kind.inputs, -1)
        return np.concatenate((codes, values), -1).reshape(count, -1)

    def _codes(self, rows: slice) -> Bytes:
        """The codes of all groups, as level_sparse.h has them: masks of 4 bits, else places in 2 or 4 bits."""
        if self.pattern.n == 2:
            masks: Bytes = self.bits[rows].numpy()
            return masks
        groups = self.mask(rows).view(rows.stop - rows.start, -1, self.pattern.m)
        places: Bytes = groups.to(torch.uint8).argmax(-1).to(torch.uint8).numpy()
        if self.pattern.m == 8:
            codes: Bytes = places[:, ::2] | places[:, 1::2] << FOUR
        else:
            codes = places[:, ::4] | places[:, 1::4] << TWO | places[:, 2::4] << FOUR | places[:, 3::4] << SIX
        return codes


def settings(pattern: NMPattern) -> dict[str, Any]:
    """`quantization_config` of such a checkpoint."""
    return {"quant_method": NM, "pattern": str(pattern)}


class NMSparse(QuantisedTensors[NMMatrix]):
    """The tensors of such a checkpoint by the names of one that is dense.

    Raises WeightsError naming the matrix whose tensors are missing, do not fit each other or the pattern, or are not
    finite; before anything is packed.
    """

    def __init__(self, checkpoint: Checkpoint, raw: RawConfig) -> None:
        self.checkpoint = checkpoint
        self.where: dict[str, Path] = dict(checkpoint.where)
        self._matrices: dict[str, NMMatrix] = {}
        self._told = False
        said = RawConfig(raw.mapping(KEY), f"{raw.path}: {KEY}")
        pattern = pattern_of(said.get("pattern"), f"{said.path}: pattern")
        for name in sorted(name.removesuffix(COMPRESSED) for name in checkpoint.where if name.endswith(COMPRESSED)):
            self._matrices[name] = self._read(name, pattern)
            self.where[name] = self.where.pop(name + COMPRESSED)
            del self.where[name + BITMASK]
        self._check_any(COMPRESSED)

    def _read(self, name: str, pattern: NMPattern) -> NMMatrix:
        values = self._tensor(name, COMPRESSED, torch.bfloat16)
        bits = self._tensor(name, BITMASK, torch.uint8)
        wanted = [len(values), values.shape[1] // pattern.n * pattern.m // 8]
        if values.shape[1] % (8 * pattern.n // pattern.m) or not values.numel() or list(bits.shape) != wanted:
            raise self._wrong(name, f"{COMPRESSED} {list(values.shape)} and {BITMASK} {list(bits.shape)} do not fit "
                                    f"each other as {pattern}")  # fmt: skip
        found = NMMatrix(name, pattern, values, bits)
        for start in range(0, found.outputs, OUTPUTS):
            mask = found.mask(slice(start, min(start + OUTPUTS, found.outputs)))
            groups = mask.view(len(mask), -1, pattern.m).sum(-1)
            if bool((groups != pattern.n).any()):
                row, group = (groups != pattern.n).nonzero()[0].tolist()
                raise self._wrong(name, f"{BITMASK} keeps {int(groups[row, group])} of the {pattern.m} inputs from "
                                        f"{group * pattern.m} on of output {start + row}, not {pattern.n}")  # fmt: skip
        if not bool(torch.isfinite(values).all()):
            raise self._wrong(name, f"{COMPRESSED} has numbers that are not finite")
        self._let_go(found)
        return found

    def _tensor(self, name: str, part: str, dtype: torch.dtype) -> Tensor:
        if name + part not in self.checkpoint.where:
            raise self._wrong(name, f"{part} is missing")
        found = self.checkpoint.read(name + part)
        if found.dtype != dtype or found.ndim != 2:
            raise self._wrong(name, f"{part} is {found.dtype} {list(found.shape)}, wanted a matrix of {dtype}")
        return found

    def _wrong(self, name: str, what: str) -> WeightsError:
        return WeightsError(f"{self.directory}: {name} of the {NM} checkpoint: {what}. Convert it again.")

    def blocks(self, name: str) -> BlockMatrix | None:
        found = self._matrices.get(name)
        if found is None:
            return None
        if found.inputs % KINDS[found.pattern.kind].inputs:
            if not self._told:
                log.warning("%s is expanded (others may be too): its %d inputs are no whole blocks of %d", name,
                            found.inputs, KINDS[found.pattern.kind].inputs)  # fmt: skip
            self._told = True
            return None

        def done(_: int, end: int) -> None:
            if end == found.outputs:
                self._let_go(found)

        return BlockMatrix(found.pattern.kind, found, None, done)

    def let_go(self, tensor: Tensor) -> None:
        self.checkpoint.let_go(tensor)

    def _let_go(self, matrix: NMMatrix) -> None:
        self.checkpoint.let_go(matrix.values)
        self.checkpoint.let_go(matrix.bits)
