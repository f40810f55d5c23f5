"""store: in what form is KV kept, shared and shipped?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from phasewise.kv.buffer import KVShape


class Storing(Protocol):
    """store: in what form is KV kept, shared and shipped?

    Optional:
        inner: str  -- of a store that holds another one, whose form rows are kept in: how that one is chosen, such as
            `:rest=NAME`. Messages say it, as what is refused may be its doing
        wire(shapes: Sequence[KVShape], unit: int) -> Wire | None  -- the form in which rows leave for other engines, of
            engines with these layers that compute prompts in blocks of `unit` rows; None or absent: as they are kept
    """

    def codec(self) -> Codec:
        """The form in which rows are kept."""
        ...


class Codec(Protocol):
    """In what form rows are kept. A row's form depends on that row alone (DESIGN law 4).

    Optional:
        scaled: bool  -- the planes are keys int8 [H, N, D], their scales bfloat16 [H, N], then values and theirs, each
            row rounded to the nearest level of its largest magnitude / 127: native kernels read and write these
        cuts: tuple[BlockCut, BlockCut]  -- of keys and of values, of a codec that extends `Raw`: finished
            blocks of rows are packed together, and it also has what `kv/blocks.py: Blocks` says
        packings(dim: int) -> tuple[Packing | Classes, ...] | None  -- beside `cuts`, of keys and of values, of heads of
            `dim` numbers: how a block's planes lie, where native kernels know that (kv/packed.py). They read blocks as
            they are, and nothing is rounded to the rows' dtype; None: blocks are opened first
        settled(side: int, shape: KVShape) -> list[Kind]  -- beside `cuts`: what a block becomes hangs on how much its
            rows matter as well, and it has what `kv/blocks.py: Marked` says
    """

    exactness: str  # true | quantised | predicted | sparse

    def planes(self, shape: KVShape) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Per plane: the trailing shape of one (head, row) entry, and its dtype."""
        ...

    def encode(self, k: Tensor, v: Tensor) -> Sequence[Tensor]:
        """[H, R, D] keys and values -> planes [H, R, ...]."""
        ...

    def decode(self, planes: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Planes [H, N, ...] -> keys and values [H, N, D] of `dtype`."""
        ...
