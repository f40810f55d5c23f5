"""Weights of one linear layer packed for the native kernels, in one form or in several beside one another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phasewise.ops.native import levels, library
from phasewise.ops.native.abi import LinearCallStruct, RowsStruct, Structures, WeightsPartStruct, WeightsStruct
from phasewise.ops.native.room import room

KIND = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}  # the last: blocks of weights
FORMS = levels.WEIGHT_FORMS
WIDTH = 64  # outputs per panel, as in kernels.h
GROUP = 128  # inputs of a row, or of an output's weights, that share a scale in int8, as in linear8.cpp
SLICE = 4 << 20  # bytes of a weight that are packed at a time


class DenseRows(Protocol):
    """A weight [out, in]: a tensor, or what reads its rows when they are asked for, first to last."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def __getitem__(self, rows: slice, /) -> Tensor: ...


class PackedPart(NamedTuple):
    """Consecutive outputs of a layer in one of `FORMS`: `panels` uint8, and in int8 `scales` float32 [panels, groups,
    WIDTH], one for each output and group of inputs; outputs that only fill up the last panel have 0."""

    form: str
    outputs: int
    inputs: int
    panels: Tensor
    scales: Tensor | None
    nbytes: int  # of the parameters, however the panels are filled up
    whole: float | None = None  # what all weights are multiplied with beside the scales of their blocks

    @property
    def struct(self) -> WeightsPartStruct:
        return _struct(self.form, self.panels.data_ptr(), self.scales, self.outputs, self.whole)


def pack(weight: DenseRows, form: str, done: Callable[[Tensor], None] | None = None) -> PackedPart:
    """Packs a weight [out, in] slice by slice of its rows; `done` is told each of them, whose memory may then go.

    "bfloat16" takes weights that are; "int8" rounds float32 or bfloat16 ones.
    """
    kernels, threads = library(), torch.get_num_threads()
    assert kernels is not None and weight.dtype in KIND and (form == "int8" or weight.dtype == torch.bfloat16)
    outputs, inputs = weight.shape
    panel = kernels.panel_bytes(FORMS.index(form), inputs)
    count, groups = -(-outputs // WIDTH), -(-inputs // GROUP)
    panels, scales = room(count * panel), torch.zeros(count, groups, WIDTH) if form == "int8" else None
    step = max(SLICE // (inputs * weight.dtype.itemsize) // WIDTH, 1) * WIDTH
    for start in range(0, outputs, step):
        some = weight[start : start + step]
        rows = some.contiguous()
        source = RowsStruct(data=rows, stride=inputs, kind=KIND[rows.dtype])
        at, own = panels.data_ptr() + start // WIDTH * panel, None if scales is None else scales[start // WIDTH :]
        target = _struct(form, at, own, len(rows))
        kernels.linear_pack(source.address, target.address, inputs, threads)
        if done is not None:
            done(some)
    nbytes = outputs * (inputs + 4 * groups if form == "int8" else inputs * 2)
    return PackedPart(form, outputs, inputs, panels, scales, nbytes)


def form_of_blocks(kind: str, *, int8: bool) -> str | None:
    """The form that keeps blocks of a type (Q4_0 ..) as they are, for rows in int8 or bfloat16; None: none does."""
    form = f"{kind}/{'int8' if int8 else 'bfloat16'}"
    return form if form in levels.FORMS else None


def pack_blocks(
    blocks: levels.BlockRows, form: str, order: NDArray[np.int64] | None = None,
    done: Callable[[int, int], None] | None = None, whole: float | None = None,
) -> PackedPart:  # fmt: skip
    """Packs a weight that is blocks, uint8 [out, bytes of a row], in one of `levels.FORMS`, slice by slice of its rows.

    Rows must be of whole blocks, behind a codebook where the kind has one, and may lie any number of bytes apart. Row i
    of the weight is row `order[i]` of the blocks, or i. `done` is told that the rows from one of the weight's on up to
    another have been packed. `whole`: a finite number but 0 that the blocks are to be multiplied with.

    Raises ValueError if 64 consecutive rows, which make a panel, have unlike codebooks.
    """
    kernels, threads, kind = library(), torch.get_num_threads(), levels.KINDS[form.partition("/")[0]]
    assert kernels is not None
    outputs, row = blocks.shape
    assert (row - kind.start) % kind.size == 0, f"rows of {row} bytes are not whole blocks of {kind.size}"
    inputs, count = (row - kind.start) // kind.size * kind.inputs, -(-outputs // WIDTH)
    panel = kernels.panel_bytes(FORMS.index(form), inputs)
    panels = room(count * panel)
    step = max(SLICE // row // WIDTH, 1) * WIDTH
    for start in range(0, outputs, step):
        end = min(start + step, outputs)
        some = blocks[start:end] if order is None else blocks[order[start:end]]
        assert some.dtype == np.uint8 and some.strides[1] == 1
        if kind.codebook:
            _require_one_codebook(some[:, : kind.start], start)
        source = RowsStruct(data=some, stride=some.strides[0], kind=KIND[torch.uint8])
        target = _struct(form, panels.data_ptr() + start // WIDTH * panel, None, end - start)
        kernels.linear_pack(source.address, target.address, inputs, threads)
        if done is not None:
            done(start, end)
    nbytes = outputs * (row - kind.start) + count * kind.start
    return PackedPart(form, outputs, inputs, panels, None, nbytes, whole)


def _require_one_codebook(starts: NDArray[np.uint8], first: int) -> None:
    """Raise ValueError unless all rows of each panel have the same bytes, uint8 [rows, n]; the first is row `first`."""
    for at in range(0, len(starts), WIDTH):
        if (starts[at : at + WIDTH] != starts[at]).any():
            raise ValueError(f"rows {first + at} to {first + at + WIDTH - 1} make a panel and have unlike codebooks")


def _struct(
    form: str, panels: int, scales: Tensor | None, outputs: int, whole: float | None = None
) -> WeightsPartStruct:  # fmt: skip
    form_index = FORMS.index(form)
    return WeightsPartStruct(form=form_index, packed=panels, scales=scales, outputs=outputs, whole=whole or 0.0)


class PackedWeights:
    """x [T, in] -> x W^T + bias (+ add) [T, out] for float32 or bfloat16 rows; the result has the rows' dtype.

    W [out, in] is a weight that is packed in a form, or parts in forms of their own, one after another (`of`).

    Sums are taken in one order, so a row's result does not depend on how many rows there are. "bfloat16": the products
    are of bfloat16 (float32 rows are rounded first) and the sums float32. "int8": a row,
    and the weights of an output, have one scale for every `GROUP` of inputs (the last may have fewer), and are rounded
    to 255 levels of the group's largest magnitude; sums exact within a group, and float32 over groups in their order.
    Forms of few bits have either kind of rows, those in int8 with a scale for every group of the weights (of 32 inputs
    at least). There must be a `library()`.
    """

    __slots__ = (
        "_bias", "_multiply", "_rows", "_struct", "_structs", "address", "inputs", "nbytes", "outputs", "parts"
    )  # fmt: skip

    def __init__(
        self, weight: DenseRows, bias: Tensor | None, form: str = "bfloat16",
        done: Callable[[Tensor], None] | None = None,
    ) -> None:  # fmt: skip
        self._set([pack(weight, form, done)], bias)

    @classmethod
    def of(cls, parts: Sequence[PackedPart], bias: Tensor | None) -> PackedWeights:
        """The outputs of the parts, at least one, which all have as many inputs; `bias` is of all of them."""
        made = cls.__new__(cls)
        made._set(parts, bias)
        return made

    def _set(self, parts: Sequence[PackedPart], bias: Tensor | None) -> None:
        kernels = library()
        assert kernels is not None and len({part.inputs for part in parts}) == 1
        self.parts = tuple(parts)
        self.outputs, self.inputs = sum(part.outputs for part in parts), parts[0].inputs
        self.nbytes = sum(part.nbytes for part in parts) + (0 if bias is None else bias.nbytes)
        self._bias = None if bias is None else bias.float().contiguous()
        self._structs = Structures(WeightsPartStruct, [part.struct for part in parts])
        self._struct = WeightsStruct(
            parts=self._structs, count=len(parts), bias=self._bias, outputs=self.outputs, inputs=self.inputs
        )
        self.address = self._struct.address
        self._multiply, self._rows = kernels.linear, kernels.linear_rows

    @property
    def forms(self) -> tuple[str, ...]:
        """Those of the parts."""
        return tuple(part.form for part in self.parts)

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """`add` [T, out] is summed into the result within the same kernel."""
        rows, outputs, kind = x.shape[0], self.outputs, KIND[x.dtype]
        y = torch.empty((rows, outputs), dtype=x.dtype)
        if x.stride(1) != 1:
            x = x.contiguous()
        call = LinearCallStruct(weights=self.address, rows=rows, threads=torch.get_num_threads())
        call.x = RowsStruct(data=x.data_ptr(), stride=x.stride(0), kind=kind)
        call.y = RowsStruct(data=y.data_ptr(), stride=outputs, kind=kind)
        if add is not None:
            add = add if add.stride(1) == 1 else add.contiguous()
            call.add = RowsStruct(data=add.data_ptr(), stride=add.stride(0), kind=KIND[add.dtype])
        self._multiply(call.address)
        return y

    def rows(self, which: Tensor) -> Tensor:
        """Rows of the weight in bfloat16, int64 [N] -> [N, in]: the embeddings of a model that ties its head.

        Raises IndexError for a row that there is not.
        """
        index, count = which.contiguous(), which.numel()
        out = torch.empty((count, self.inputs), dtype=torch.bfloat16)
        if self._rows(self.address, index.data_ptr(), count, out.data_ptr(), torch.get_num_threads()):
            raise IndexError(f"rows {which.tolist()} are not all among the {self.outputs} of the weight")
        return out

    def dense(self) -> Tensor:
        """The weight [out, in] in bfloat16, a copy; what is rounded comes back as it was rounded."""
        return self.rows(torch.arange(self.outputs))
