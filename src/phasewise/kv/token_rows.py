"""Rows that a method keeps of every token in requests' drawers, and that cached prefixes bring along.

A drafter that reads the model's states needs those of a whole prompt, also where a prefix hit has saved computing them.
So they are cached block by block, in a tree of their own beside that of the KV; a hit reaches as far as both do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from phasewise.kv.prefix import Node, PrefixTree
    from phasewise.request.request import Request


class TokenRows(Protocol):
    """The rows of one method. `key` names all that shapes them besides the KV's own key: the method and its weights."""

    key: str

    def held(self, request: Request, upto: int) -> Tensor | None:
        """Rows [upto, width] of a request's first tokens; None where some of them are not there."""
        ...

    def give(self, request: Request, rows: Tensor) -> None:
        """Fills the drawer of a request with rows [n, width] of its first tokens, a copy."""
        ...


@dataclass(frozen=True, slots=True)
class CutTokenRows:
    """Rows [n, width], as blocks of a prefix tree are cut from them (`CutRows`)."""

    rows: Tensor

    def size(self, block: int) -> int:
        return self.rows[0].nbytes * block

    def copy(self, start: int, stop: int) -> list[list[Tensor]]:
        return [[self.rows[start:stop].clone()]]


@dataclass(frozen=True, slots=True)
class CachedTokenRows:
    """The rows of one method that are cached, in blocks of as many tokens as those of the KV."""

    method: TokenRows
    tree: PrefixTree

    def covered(self, tokens: Sequence[int]) -> int:
        """The number of tokens, from the first on, whose rows are cached."""
        return len(self._found(tokens)) * self.tree.block

    def give(self, request: Request, upto: int) -> int:
        """Gives a request the rows of its first `upto` tokens, which are covered. Returns the bytes copied."""
        blocks = [node.planes[0][0] for node in self._found(request.tokens[:upto])]
        if not blocks:
            return 0
        self.method.give(request, torch.cat(blocks))
        return sum(block.nbytes for block in blocks)

    def remember(self, request: Request, upto: int) -> int:
        """Keeps the rows of a request's first `upto` tokens, as far as the budget allows. Returns the bytes copied."""
        rows = self.method.held(request, upto)
        if rows is None:
            return 0
        held, moved = self.tree.insert(request.tokens[:upto], CutTokenRows(rows), [])
        for node in held:
            node.release()
        return moved

    def _found(self, tokens: Sequence[int]) -> list[Node]:
        """Cached blocks, which stay until something else takes room."""
        nodes = self.tree.match(tokens)
        for node in nodes:
            node.release()
        return nodes
