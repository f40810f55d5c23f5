"""Checkpoints of learned codebooks (JLCM, arXiv 2309.17361): few bits whose values stand in tables of a matrix's own.

A weight is `scale * codebook[level]`. An output has a scale for every `group` inputs, and 64 consecutive outputs of a
matrix, a panel of the kernels, share a codebook of 2^bits values. Nothing says which codebook an output has: neurons
were reordered instead, and the order is folded into the matrices around them. In the files a matrix X [out, in] is

    X_codes      uint8 [out, in * bits / 8]          a stream of bits, the first level in the lowest of the first byte
    X_scales     float16 [out, in / group]
    X_codebooks  bfloat16 [ceil(out / 64), 2^bits]

and config.json says

    "quantization_config": {"quant_method": "codebook", "bits": 3, "group": 128}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phasewise.errors import UserError, WeightsError, near
from phasewise.gguf.blocks import BlockMatrix
from phasewise.model.quantisation import CODEBOOK, KEY
from phasewise.model.quantised_tensors import QuantisedTensors
from phasewise.model.raw import RawConfig
from phasewise.model.weights import Checkpoint
from phasewise.ops.native.levels import KINDS
from phasewise.spelling import parse_value, read

Bytes = NDArray[np.uint8]
CODES, SCALES, CODEBOOKS = "_codes", "_scales", "_codebooks"  # after the name of a matrix
PANEL = 64  # outputs that share a codebook: a panel of the kernels
BITS, GROUPS = (2, 3, 4), (64, 128)
LARGEST = 65_504.0  # a value of a codebook that is read: kernels multiply them by up to 2^16
OUTPUTS = 256  # that are expanded at a time


# ---- what is asked for
@dataclass(frozen=True)
class CodebookForm:
    """`bits` of a level, and a scale for every `group` inputs of an output. `reorder`: neurons whose weights are alike
    share a codebook. `learn`: rounds in which codebooks, scales and levels learn the layer's outputs; 0: k-means."""

    bits: int = 4
    group: int = 128
    reorder: bool = False
    learn: int = 8

    @property
    def kind(self) -> str:
        """The kind of blocks that the kernels read (`ops/native/levels.py`)."""
        return f"CODES_{self.bits}_{self.group}"

    def __str__(self) -> str:
        told = f"bits={self.bits},group={self.group},reorder={str(self.reorder).lower()},learn={self.learn}"
        return f"{CODEBOOK}:{told}"


def parse_codebook(text: str, option: str = "--weights") -> CodebookForm | None:
    """What `codebook:bits=3` asks for; None if it is another form. Raises UserError naming the value that is wrong."""
    spelled = read(text, option)
    if spelled.name != CODEBOOK:
        return None
    kinds = {"bits": int, "group": int, "reorder": bool, "learn": int}
    given: dict[str, Any] = {}
    for knob, value in spelled.knobs.items():
        if knob not in kinds:
            raise UserError(f"{option} {text}: {CODEBOOK} has no knob {knob!r}. {near(knob, kinds)}")
        given[knob] = parse_value(str(value), kinds[knob], f"{option} {text}: {knob}")
    form = CodebookForm(**given)
    for knob, allowed in (("bits", BITS), ("group", GROUPS)):
        if getattr(form, knob) not in allowed:
            raise UserError(
                f"{option} {text}: {knob}={getattr(form, knob)} has no kernel: choose {' or '.join(map(str, allowed))}"
            )
    if form.learn < 0:
        raise UserError(f"{option} {text}: learn={form.learn} is below 0: it counts rounds, and 0 is k-means alone")
    return form


def require_whole_groups(form: CodebookForm, sizes: Mapping[str, tuple[int, int]], where: object) -> None:
    """Raise UserError naming the first matrix {name: (outputs, inputs)} whose inputs groups of this size do not divide,
    and a size that does."""
    wrong = next(((name, inputs) for name, (_, inputs) in sizes.items() if inputs % form.group), None)
    if wrong is None:
        return
    fit = [str(size) for size in GROUPS if all(inputs % size == 0 for _, inputs in sizes.values())]
    choose = f"choose group={' or '.join(fit)}" if fit else "no group with a kernel does"
    raise UserError(
        f"{where}: {form} does not fit {wrong[0]}: {form.group} does not divide its {wrong[1]:,} inputs; {choose}"
    )


# ---- levels and bytes
def packed_levels(levels: Tensor, bits: int) -> Tensor:
    """Levels uint8 [out, in] as a stream of bits, uint8 [out, in * bits / 8]."""
    each = np.unpackbits(levels.numpy()[..., None], axis=2, bitorder="little", count=bits)
    return torch.from_numpy(np.packbits(each.reshape(len(levels), -1), axis=1, bitorder="little"))


def unpacked_levels(codes: Tensor, bits: int) -> Tensor:
    """The inverse of `packed_levels`."""
    each = np.unpackbits(codes.numpy(), axis=1, bitorder="little").reshape(len(codes), -1, bits)
    return torch.from_numpy(np.packbits(each, axis=2, bitorder="little")[..., 0])


class CodebookLevels(NamedTuple):
    """A matrix: levels uint8 [out, in], codebooks bfloat16 [panels, 2^bits] and scales float16 [out, groups]."""

    form: CodebookForm
    levels: Tensor
    codebooks: Tensor
    scales: Tensor

    def values(self) -> Tensor:
        """The matrix that these stand for, float32 [out, in]."""
        books = self.codebooks.float()[torch.arange(len(self.levels)) // PANEL]
        return books.gather(1, self.levels.long()) * self.scales.float().repeat_interleave(self.form.group, 1)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """By their names in the checkpoint."""
        codes = packed_levels(self.levels, self.form.bits)
        return {name + CODES: codes, name + SCALES: self.scales, name + CODEBOOKS: self.codebooks}

    def rows(self, start: int, end: int) -> CodebookLevels:
        """Outputs from `start`, the first of a panel, up to `end`."""
        assert start % PANEL == 0
        books = self.codebooks[start // PANEL : -(-end // PANEL)]
        return CodebookLevels(self.form, self.levels[start:end], books, self.scales[start:end])


def settings(form: CodebookForm) -> dict[str, Any]:
    """`quantization_config` of a checkpoint in this form. What follows the first three is told, and not read."""
    return {"quant_method": CODEBOOK, "bits": form.bits, "group": form.group, "reorder": form.reorder,
            "learn": form.learn}  # fmt: skip


# ---- what is read
@dataclass(frozen=True)
class CodebookMatrix:
    """One matrix as it lies in the files. It is what pack_blocks takes: a slice of its rows is its codebook and blocks,
    uint8 [rows, bytes of a row], made when it is asked for."""

    name: str
    bits: int
    group: int
    codes: Tensor
    scales: Tensor
    codebooks: Tensor

    @property
    def outputs(self) -> int:
        return len(self.codes)

    @property
    def inputs(self) -> int:
        return self.codes.shape[1] * 8 // self.bits

    @property
    def kind(self) -> str:
        return f"CODES_{self.bits}_{self.group}"

    @property
    def shape(self) -> tuple[int, int]:
        of = KINDS[self.kind]
        return self.outputs, of.start + self.inputs // of.inputs * of.size

    @property
    def nbytes(self) -> int:
        """Bytes that are kept: a panel has its codebook once."""
        start = KINDS[self.kind].start
        return math.prod(self.shape) - (self.outputs - len(self.codebooks)) * start

    def __getitem__(self, rows: slice | NDArray[np.int64], /) -> Bytes:
        assert isinstance(rows, slice)
        start, end, _ = rows.indices(self.outputs)
        of, count = KINDS[self.kind], end - start
        out = np.empty((count, self.shape[1]), np.uint8)
        books = self.codebooks.view(torch.uint8).numpy()
        out[:, : of.start] = books[np.arange(start, end) // PANEL]
        blocks = out[:, of.start :].reshape(count, -1, of.size)
        blocks[:, :, :2] = self.scales[start:end].numpy()[..., None].view(np.uint8)
        blocks[:, :, 2:] = self.codes[start:end].numpy().reshape(count, blocks.shape[1], -1)
        return out

    def expanded(self, dtype: torch.dtype) -> Tensor:
        """The matrix [out, in], worked out in float32."""
        form = CodebookForm(self.bits, self.group)
        out = torch.empty((self.outputs, self.inputs), dtype=dtype)
        for start in range(0, self.outputs, OUTPUTS):
            end = min(start + OUTPUTS, self.outputs)
            levels = unpacked_levels(self.codes[start:end], self.bits)
            books = self.codebooks[start // PANEL : -(-end // PANEL)]
            out[start:end] = CodebookLevels(form, levels, books, self.scales[start:end]).values()
        return out


class CodebookQuantised(QuantisedTensors[CodebookMatrix]):
    """The tensors of such a checkpoint by the names of one that is not quantised.

    Raises UserError for settings that no kernel has, and WeightsError naming the matrix whose tensors are missing, do
    not fit each other, or are not finite.
    """

    def __init__(self, checkpoint: Checkpoint, raw: RawConfig) -> None:
        self.checkpoint = checkpoint
        self.where: dict[str, Path] = dict(checkpoint.where)
        self._matrices: dict[str, CodebookMatrix] = {}
        said = RawConfig(raw.mapping(KEY), f"{raw.path}: {KEY}")
        bits, group = _one_of(said, "bits", BITS), _one_of(said, "group", GROUPS)
        for name in sorted(each.removesuffix(CODES) for each in checkpoint.where if each.endswith(CODES)):
            self._matrices[name] = self._matrix(name, bits, group)
            where = self.where[name + CODES]
            for part in (CODES, SCALES, CODEBOOKS):
                del self.where[name + part]
            self.where[name] = where
        self._check_any(CODES)

    def _matrix(self, name: str, bits: int, group: int) -> CodebookMatrix:
        codes = self._tensor(name, CODES, torch.uint8)
        scales = self._tensor(name, SCALES, torch.float16)
        codebooks = self._tensor(name, CODEBOOKS, torch.bfloat16)
        block = group * bits // 8
        outputs, width = codes.shape
        if not codes.numel() or width % block:
            raise self._wrong(name, f"{CODES} has rows of {width} bytes, which are not whole groups of {group} levels "
                                    f"of {bits} bits ({block} bytes)")  # fmt: skip
        for part, found, wanted in ((SCALES, scales, (outputs, width // block)),
                                    (CODEBOOKS, codebooks, (-(-outputs // PANEL), 1 << bits))):  # fmt: skip
            if tuple(found.shape) != wanted:
                raise self._wrong(name, f"{part} has the shape {list(found.shape)}, and {CODES} {list(codes.shape)} "
                                        f"asks for {list(wanted)}")  # fmt: skip
        if not bool(torch.isfinite(scales).all()):
            raise self._wrong(name, f"{SCALES} has numbers that are not finite")
        if not bool((codebooks.float().abs() <= LARGEST).all()):
            raise self._wrong(name, f"{CODEBOOKS} has values that are no numbers, or above {LARGEST:,.0f}")
        return CodebookMatrix(f"{self.directory}: {name}", bits, group, codes, scales, codebooks.contiguous())

    def _tensor(self, name: str, part: str, dtype: torch.dtype) -> Tensor:
        if name + part not in self.checkpoint.where:
            raise self._wrong(name, f"{part} is missing")
        found = self.checkpoint.read(name + part)
        if found.dtype != dtype or found.ndim != 2:
            raise self._wrong(name, f"{part} is {found.dtype} {list(found.shape)}, wanted a matrix of {dtype}")
        return found

    def _wrong(self, name: str, what: str) -> WeightsError:
        return WeightsError(f"{self.directory}: {name} of the {CODEBOOK} checkpoint: {what}. Convert it again.")

    def blocks(self, name: str) -> BlockMatrix | None:
        found = self._matrices.get(name)
        if found is None:
            return None

        def done(_: int, end: int) -> None:
            if end == found.outputs:
                self._let_go(found)

        return BlockMatrix(found.kind, found, None, done)

    def let_go(self, tensor: Tensor) -> None:
        self.checkpoint.let_go(tensor)

    def _let_go(self, matrix: CodebookMatrix) -> None:
        for tensor in (matrix.codes, matrix.scales, matrix.codebooks):
            self.checkpoint.let_go(tensor)


def _one_of(said: RawConfig, key: str, allowed: tuple[int, ...]) -> int:
    """A setting that must be one of these. Raises UserError."""
    value = said.get(key)
    if isinstance(value, bool) or value not in allowed:
        choose = " or ".join(map(str, allowed))
        raise UserError(f"{said.path}: {key} is {value!r:.80}; {choose} is read. Convert it again.")
    found: int = value
    return found
