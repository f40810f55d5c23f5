"""A device that is not the processor, without one: tensors that say they lie on `meta` and hold their values all the
same. Whatever mixes them with tensors of the processor, and whoever reads their values, is noted with its place.

On a GPU the former raises, and the latter waits for all that was asked of it before.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
PACKAGE = "/src/phasewise/"
aten = torch.ops.aten
MOVES = {aten._to_copy.default, aten.copy_.default}
INDEX = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
MAKES = {torch.tensor, torch.as_tensor}  # operators do not make these
READS = {Tensor.tolist, Tensor.numpy, Tensor.cpu}


class There(Tensor):
    """A tensor on `meta` whose values are in `held`, on the processor."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> There:
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


def held(x: Any) -> Any:
    return x.held if isinstance(x, There) else x


class Elsewhere(TorchDispatchMode):
    """While it is entered, `meta` holds values. `mixed` and `reads` count by `file: function` of the package."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self._reading = Reading(self)

    def __enter__(self) -> Elsewhere:
        super().__enter__()
        self._reading.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._reading.__exit__(*error)
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        tensors = [x for x in tree_leaves((args, named)) if isinstance(x, Tensor)]
        there = [x for x in tensors if isinstance(x, There)]
        to = named.get("device")
        if to is not None and torch.device(to).type == DEVICE.type:
            named["device"] = torch.device("cpu")
        elif not there:
            return func(*args, **named)
        result = func(*tree_map(held, args), **tree_map(held, named))
        if func is aten._local_scalar_dense.default or (func is aten._to_copy.default and to is not None
                                                        and torch.device(to).type == "cpu"):  # fmt: skip
            self.reads[place()] += 1
            return result
        if func is aten.copy_.default and not isinstance(args[0], There):
            self.reads[place()] += 1
            return args[0]
        if there and func not in MOVES:
            here = [x for x in tensors if x.dim() and not isinstance(x, There)]
            if func in INDEX:
                here = here if not isinstance(args[0], There) else []
            if here:
                self.mixed[f"{place()}: {func}"] += 1
        if func._schema.name.endswith("_") and isinstance(args[0], There):
            return args[0]  # in place
        known = {id(x.held): x for x in there}  # what is returned as it was given

        def made(x: Any) -> Any:
            return known.get(id(x)) if id(x) in known else There(x) if isinstance(x, Tensor) else x

        return tree_map(made, result)


class Reading(TorchFunctionMode):
    """Calls that are no operators."""

    def __init__(self, of: Elsewhere) -> None:
        super().__init__()
        self.of = of

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in READS and isinstance(args[0], There):
            self.of.reads[place()] += 1
            return func(args[0].held, *args[1:], **(kwargs or {}))
        named = dict(kwargs or {})
        if func in MAKES and named.get("device") is not None and torch.device(named["device"]).type == DEVICE.type:
            return func(*args, **named | {"device": "cpu"}).to(DEVICE)
        return func(*args, **named)


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
