"""Finished rows that a request is given, and the KV that requests have left for those that go on from it or edit it:
kept within the budget, the least recently used goes first, and not before unused prefix blocks have gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from phasewise.kv.cache import KV


class InjectedKV(NamedTuple):
    """Keys and values [H, r, D] of the tokens that come next, layer by layer; `exact`: they are identical to
    recomputed ones. `start`: instead of the tokens that come next, those from this position on, in the place of
    all rows that are there."""

    rows: Sequence[tuple[Tensor, Tensor]]
    exact: bool
    start: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RetainedKV:
    """Tokens and their rows; `owner`: whose they are, for rows mean nothing elsewhere."""

    tokens: Sequence[int]
    kv: KV
    owner: object


class RetainedStore:
    """A store of retained KV by the name of the request that left it. A later request of the same name takes its
    place."""

    def __init__(self) -> None:
        self._kept: dict[str, RetainedKV] = {}  # the least recently used first

    @property
    def bytes(self) -> int:
        return sum(left.kv.bytes + left.kv.beside for left in self._kept.values())

    def put(self, name: str, left: RetainedKV) -> None:
        self._drop(name)
        self._kept[name] = left

    def find(self, name: str, owner: object) -> RetainedKV | None:
        """Returns what a request left, if it is still there. It counts as used then."""
        left = self._kept.get(name)
        if left is None or left.owner is not owner:
            return None
        self._kept[name] = self._kept.pop(name)
        return left

    def give_up(self) -> bool:
        """Free the least recently used. False: nothing was there."""
        name = next(iter(self._kept), None)
        return name is not None and self._drop(name)

    def drop_of(self, owner: object) -> None:
        """Free all that is of one owner."""
        for name in [name for name, left in self._kept.items() if left.owner is owner]:
            self._drop(name)

    def clear(self) -> None:
        while self.give_up():
            pass

    def _drop(self, name: str) -> bool:
        left = self._kept.pop(name, None)
        if left is not None:
            left.kv.close()
        return left is not None
