"""One linear layer: a plain twin (`F.linear`), and packed weights that read memory faster (native, else oneDNN)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from phasewise.errors import UserError
from phasewise.ops import native
from phasewise.ops.native.weights import PackedWeights

log = logging.getLogger(__name__)

PRECISIONS = ("as stored", "int8")


class Form(Protocol):
    """The form in which a weight is kept and multiplied."""

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor: ...

    def rows(self, which: Tensor) -> Tensor: ...

    def dense(self) -> Tensor: ...


class Linear:
    """x [T, in] -> x W^T + bias (+ add) [T, out], for a weight [out, in] and a bias [out] or None.

    On a CPU bfloat16 weights are packed and the plain copy is let go, unless `packed` is False: for the native kernels,
    or for oneDNN where those could not be built. `precision` "int8" rounds weights and rows, with one scale for every
    128 inputs of an output or a row; it is never chosen unasked, and raises UserError without the native kernels. The
    result is always a fresh tensor. `nbytes` counts the parameters, whatever their layout. `done` is told which rows of
    the weight are not needed again.
    """

    __slots__ = ("_form", "inputs", "nbytes", "outputs")

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, packed: bool | None = None, precision: str = "as stored",
        done: Callable[[Tensor], None] | None = None,
    ) -> None:  # fmt: skip
        self.outputs, self.inputs = weight.shape
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._form: Form
        if precision == "int8":
            _require_int8(weight)
            self._form = PackedWeights(weight, bias, "int8", done)
            self.nbytes = self._form.nbytes
            return
        if precision not in PRECISIONS:
            raise UserError(f"Unknown precision {precision!r} of weights. Valid: {', '.join(PRECISIONS)}.")
        on_cpu, half = weight.device.type == "cpu", weight.dtype == torch.bfloat16
        wanted = on_cpu and half if packed is None else packed
        if wanted and on_cpu and half and native.library() is not None:
            self._form = PackedWeights(weight, bias, done=done)
        elif wanted and _can_pack(weight.dtype):
            self._form = OneDNN(weight, bias)
            if done is not None:
                done(weight)
        else:
            self._form = Plain(weight, bias)

    @classmethod
    def of(cls, weights: PackedWeights, columns: Tensor | None = None) -> Linear:
        """The layer of weights that are packed already. `columns` int64 [in]: which input of the layer is each of the
        weights'; None: they are in the same order."""
        made = cls.__new__(cls)
        made.outputs, made.inputs, made.nbytes = weights.outputs, weights.inputs, weights.nbytes
        made._form = weights if columns is None else Gathered(weights, columns)
        return made

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """`add` [T, out] is summed into the result; in the packed forms within the same kernel."""
        return self._form(x, add)

    def with_pair(self, down: Tensor, up: Tensor) -> Linear:
        """The layer W + up down, which keeps the pair beside W: `down` [rank, in] and `up` [out, rank] have the dtype
        and the device of its rows."""
        made = type(self).__new__(type(self))
        form = WithPair(self, Linear(down), Linear(up))
        made.outputs, made.inputs, made._form = self.outputs, self.inputs, form
        made.nbytes = self.nbytes + form.down.nbytes + form.up.nbytes
        return made

    @property
    def beside(self) -> WithPair | None:
        """The layer as one with a low-rank pair beside it, if it is one."""
        return self._form if isinstance(self._form, WithPair) else None

    @property
    def packed(self) -> bool:
        return not isinstance(self._form, Plain)

    @property
    def native(self) -> PackedWeights | None:
        """The weights as the kernels of `ops.native` take them, where those do the work."""
        return self._form if isinstance(self._form, PackedWeights) else None

    def rows(self, which: Tensor) -> Tensor:
        """Rows of the weight, int64 [N] -> [N, in], as an embedding table gives them."""
        return self._form.rows(which)

    def dense(self) -> Tensor:
        """The weight [out, in] as a plain tensor; a copy when packed, the rounded values when int8."""
        return self._form.dense()


class Gathered:
    """Packed weights whose inputs are in an order of their own: those of a row are gathered before it is multiplied."""

    def __init__(self, weights: PackedWeights, columns: Tensor) -> None:
        self.weights, self.columns, self._places = weights, columns, columns.argsort()

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        return self.weights(x.index_select(1, self.columns), add)

    def rows(self, which: Tensor) -> Tensor:
        return self.weights.rows(which).index_select(1, self._places)

    def dense(self) -> Tensor:
        return self.weights.dense().index_select(1, self._places)


class WithPair:
    """A layer with a low-rank pair beside its weight: W x + bias (+ add) is rounded to the rows' dtype, and so is down
    x before up (down x) is added. Native steps do the same (`Stage::tune` of stage.h)."""

    def __init__(self, base: Linear, down: Linear, up: Linear) -> None:
        self.base, self.down, self.up = base, down, up

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        return self.up(self.down(x), self.base(x, add))

    def rows(self, which: Tensor) -> Tensor:
        return self.base.rows(which) + self.up.rows(which) @ self.down.dense()

    def dense(self) -> Tensor:
        return self.base.dense() + self.up.dense() @ self.down.dense()


class Plain:
    """torch's own linear layer, on any device and for any dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        return y if add is None else y.add_(add)

    def rows(self, which: Tensor) -> Tensor:
        return self.weight[which]

    def dense(self) -> Tensor:
        return self.weight


class OneDNN:
    """Weights in oneDNN's own layout; its kernels round to the weights' dtype before the residual is added."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = _pack(weight), bias

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        return _multiply(x, self.weight, self.bias, add)

    def rows(self, which: Tensor) -> Tensor:
        return self.dense()[which]

    def dense(self) -> Tensor:
        return self.weight.to_dense()


def _require_int8(weight: Tensor) -> None:
    if weight.device.type != "cpu":
        raise UserError(f"int8 weights run on the CPU only, these are on {weight.device}. Leave int8 out.")
    if native.library() is None:
        raise UserError("int8 weights need the native CPU kernels; the log says why they are missing. Leave int8 out.")


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return packed


def _multiply(x: Tensor, packed: Tensor, bias: Tensor | None, add: Tensor | None) -> Tensor:
    y: Tensor
    if add is None:
        y = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    else:
        y = torch.ops.mkldnn._linear_pointwise.binary(x, add, packed, bias, "add")
    return y


@cache
def _can_pack(dtype: torch.dtype) -> bool:
    """True if oneDNN packs and multiplies weights of this type here. The log says so once when it does not."""
    try:
        x = torch.zeros(1, 16, dtype=dtype)
        _multiply(x, _pack(torch.zeros(16, 16, dtype=dtype)), None, x)
    except (AttributeError, RuntimeError) as error:  # NotImplementedError is a RuntimeError
        log.warning("oneDNN cannot pack %s weights here, using plain linear layers: %s", dtype, error)
        return False
    return True
