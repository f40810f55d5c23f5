"""A checkpoint whose matrices are rounded into few bits while they are loaded, slice by slice, and stay levels.

What a model then is equals what `phasewise convert weights` writes with the nearest levels (`calibrate=rtn`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phasewise.gguf.blocks import BlockMatrix
from phasewise.model.config import ModelConfig
from phasewise.model.levels import matrices, require_whole_groups, rounded_to_nearest
from phasewise.model.weights import DTYPES, Tensors
from phasewise.model.weights_form import WeightsForm
from phasewise.ops.native.levels import KINDS
from phasewise.ops.native.weights import DenseRows

log = logging.getLogger(__name__)
OUTPUTS = 256  # that are rounded at a time


def tell_rounded(tensors: Tensors, names: Iterable[str]) -> None:
    """Warn where the first of these matrices that is in few bits already would be rounded again."""
    for name in names:
        stored = tensors.blocks(name) if name in tensors.where else None
        if stored is not None and stored.kind in KINDS:
            log.warning("%s is in few bits already (%s: %s): it is rounded again", tensors.directory, name, stored.kind)
            return


class RoundedTensors:
    """A checkpoint's tensors, the matrices of its layers in a form. All else stays as its file has it, but that
    floating-point tensors are bfloat16 unless told otherwise: that is the dtype with kernels for levels.

    Raises UserError where groups do not divide a matrix, before anything is read.
    """

    def __init__(self, tensors: Tensors, config: ModelConfig, form: WeightsForm) -> None:
        self._tensors, self.form = tensors, form
        self._sizes = matrices(config)
        require_whole_groups(form, self._sizes, tensors.directory)
        self.where: dict[str, Path] = tensors.where
        tell_rounded(tensors, self._sizes)

    @property
    def directory(self) -> Path:
        return self._tensors.directory

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        own = self._tensors.dtype(name)
        return torch.bfloat16 if own in DTYPES else own

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        if name not in self._sizes:
            stored = self._tensors.read(name, dtype)
            wanted = dtype or self.dtype(name)
            return stored.to(wanted) if stored.dtype in DTYPES else stored
        weight = self._tensors.read(name, torch.float32)
        values = torch.empty(weight.shape, dtype=dtype or self.dtype(name))
        for start in range(0, len(weight), OUTPUTS):
            some = slice(start, start + OUTPUTS)
            values[some] = rounded_to_nearest(weight[some], self.form, name).values()
        self._tensors.let_go(weight)
        return values

    def rows(self, name: str, dtype: torch.dtype) -> DenseRows:
        return self.read(name, dtype) if name in self._sizes else self._tensors.rows(name, dtype)

    def blocks(self, name: str) -> BlockMatrix | None:
        if name not in self._sizes:
            return self._tensors.blocks(name)
        rows = RoundedRows(self._tensors, name, self.form)
        return BlockMatrix(self.form.kind, rows, None, rows.done)

    def let_go(self, tensor: Tensor) -> None:
        self._tensors.let_go(tensor)


class RoundedRows:
    """Rows of one matrix in blocks, made when they are asked for, uint8 [rows, bytes of a row]."""

    def __init__(self, tensors: Tensors, name: str, form: WeightsForm) -> None:
        outputs, inputs = tensors.shape(name)
        self.shape = (outputs, inputs // form.block * KINDS[form.kind].size)
        self.nbytes = math.prod(self.shape)
        self._tensors, self._name, self._form = tensors, name, form
        self._weight: DenseRows | None = None  # as it is read, until its last row has been packed

    def __getitem__(self, rows: slice | NDArray[np.int64], /) -> NDArray[np.uint8]:
        assert isinstance(rows, slice)
        if self._weight is None:
            self._weight = self._tensors.rows(self._name, torch.float32)
        start, end, _ = rows.indices(self.shape[0])
        out = np.empty((end - start, self.shape[1]), np.uint8)
        for first in range(start, end, OUTPUTS):
            some = slice(first, min(first + OUTPUTS, end))
            out[first - start : some.stop - start] = rounded_to_nearest(self._weight[some], self._form,
                                                                        self._name).blocks()  # fmt: skip
        return out

    def done(self, first: int, end: int) -> None:
        """Rows `first` to `end` have been packed."""
        if end == self.shape[0] and self._weight is not None:
            if isinstance(self._weight, Tensor):
                self._tensors.let_go(self._weight)
            self._weight = None
