"""A device that is not the processor, without one: tensors that say they lie on `meta` and hold their values all the
same. Whatever mixes them with tensors of the processor, and whoever reads their values, is noted with its place.

On a GPU the former raises, and the latter waits for all that was asked of it before. An operator whose result's shape
hangs on values, such as `nonzero` or an index of bools, is a read as well.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("meta")
PACKAGE = "/src/phasewise/"
aten = torch.ops.aten
MOVES = {aten._to_copy.default, aten.copy_.default}
INDEX = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
MAKES = {torch.tensor, torch.as_tensor}  # operators do not make these
READS = {Tensor.tolist, Tensor.numpy, Tensor.cpu}
ITEMS = {Tensor.__getitem__, Tensor.__setitem__}
# What has to know values before it knows a shape, or returns none but on the processor.
WAITS = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default,
    aten._unique2.default, aten.unique_consecutive.default, aten.unique_dim.default, aten.bincount.default,
    aten.repeat_interleave.Tensor,
}  # fmt: skip


class There(Tensor):
    """A tensor on `meta` whose values are in `held`, on the processor."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> There:
        with torch.inference_mode(False):  # made in or out of it, both sorts of tensors meet
            made: There = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
                device=DEVICE, requires_grad=False,
            )  # fmt: skip
        made.held = held
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"There({self.held})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("outside of Elsewhere")


def each(of: Callable[[Tensor], Any], x: Any) -> Any:
    """`x` with this made of all its tensors, in lists and tuples as well."""
    if isinstance(x, Tensor):
        return of(x)
    return type(x)(each(of, one) for one in x) if type(x) in (list, tuple) else x


def held(x: Tensor) -> Tensor:
    return x.held if isinstance(x, There) else x


class Elsewhere:
    """While it is entered, `meta` holds values. `mixed` and `reads` count by `file: function` of the package, and
    `calls` counts operators that worked there."""

    def __init__(self) -> None:
        self.mixed: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self.calls = 0
        self._modes = Operators(self), Calls(self)

    def __enter__(self) -> Elsewhere:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


class Operators(TorchDispatchMode):
    """Runs operators on what There tensors hold."""

    def __init__(self, of: Elsewhere) -> None:
        super().__init__()
        self.of = of

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise every call would be wrapped, and seconds go by until that is imported

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if composite(func):  # in inference mode these come whole
            with self:
                return func.decompose(*args, **named)
        tensors: list[Tensor] = []
        plain = each(lambda x: tensors.append(x) or held(x), args)
        named = {name: each(lambda x: tensors.append(x) or held(x), x) for name, x in named.items()}
        there = [x for x in tensors if isinstance(x, There)]
        to = None if named.get("device") is None else torch.device(named["device"]).type
        if to == DEVICE.type:
            named["device"] = torch.device("cpu")
        elif not there:
            return func(*args, **named)
        self.of.calls += 1
        result = func(*plain, **named)
        if func is aten._to_copy.default and to == "cpu":
            self.of.reads[place()] += 1
            return result
        if func is aten.copy_.default and not isinstance(args[0], There):
            self.of.reads[place()] += 1
            return args[0]
        if func in WAITS or (func in INDEX and counts_true(func, *args[:3])):
            self.of.reads[place()] += 1
        indices = {id(x) for x in args[1]} if func in INDEX and isinstance(args[0], There) else ()
        here = [x for x in tensors if x.dim() and not isinstance(x, There) and id(x) not in indices]
        if here and there and func not in MOVES:
            self.of.mixed[f"{place()}: {func}"] += 1
        if func._schema.is_mutable and isinstance(args[0], There):
            return args[0]  # in place
        known = {id(x.held): x for x in there}  # what is returned as it was given
        return each(lambda x: known[id(x)] if id(x) in known else There(x), result)


class Calls(TorchFunctionMode):
    """Calls that are no operators."""

    def __init__(self, of: Elsewhere) -> None:
        super().__init__()
        self.of = of

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func in READS and isinstance(args[0], There):
            self.of.reads[place()] += 1
            return func(args[0].held, *args[1:], **named)
        if func in ITEMS and isinstance(args[0], There):
            args = (args[0], there_lists(args[1]), *args[2:])
        there = named.get("device") is not None and torch.device(named["device"]).type == DEVICE.type
        if func in MAKES and there and not isinstance(args[0], Tensor):
            return func(*args, **named | {"device": "cpu"}).to(DEVICE)
        return func(*args, **named)


@cache
def composite(func: Any) -> bool:
    return bool(func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def counts_true(func: Any, x: Tensor, index: Sequence[Tensor | None], values: Tensor | None = None) -> bool:
    """Returns True if an index of bools has to be counted: all but those at which one number is put."""
    if func is not aten.index.Tensor and isinstance(values, Tensor) and values.numel() == 1:
        return False
    return any(isinstance(each, There) and each.dtype in (torch.bool, torch.uint8) for each in index)


def there_lists(index: Any) -> Any:
    """The index with its lists as tensors there, where torch itself puts them."""
    if isinstance(index, tuple):
        return tuple(there_lists(each) for each in index)
    return torch.tensor(index).to(DEVICE) if isinstance(index, list) else index


def place() -> str:
    """`file: function` of the innermost frame that is the package's."""
    frame: Any = sys._getframe(1)
    while frame is not None and PACKAGE not in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        return "elsewhere"
    inner = ("<locals>", "<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<lambda>")
    name = ".".join(part for part in frame.f_code.co_qualname.split(".") if part not in inner)
    return f"{frame.f_code.co_filename.partition(PACKAGE)[2]}: {name}"
