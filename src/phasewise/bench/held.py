"""Bytes of the tensors that objects hold on to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from phasewise.kv.cache import KV
from phasewise.request.request import Request

APART = (KV, Request, str, bytes, int, float, type)  # a KV counts by itself
OWN = __name__.partition(".")[0]


def lying(*values: Any) -> int:
    """Bytes of all memory that tensors within these values keep alive, views as all that they are views of, each once:
    in containers, and in objects of this package."""
    storages: dict[int, int] = {}
    seen: dict[int, Any] = {}
    left = list(values)
    while left:
        value = left.pop()
        if value is None or isinstance(value, APART) or id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        else:
            left.extend(_within(value))
    return sum(storages.values())


def _within(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.keys()
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    elif type(value).__module__.partition(".")[0] == OWN:
        yield from getattr(value, "__dict__", {}).values()
        for kind in type(value).__mro__:
            names = kind.__dict__.get("__slots__", ())
            for name in (names,) if isinstance(names, str) else names:
                yield getattr(value, name, None)
