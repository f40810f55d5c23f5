"""KV in 8 bits: one symmetric scale per row and head, rounded to the nearest of 255 levels.

Promises that no number is off by more than half its row's scale, and that a row's form depends on that row alone. Every
row is read in this form, its own step included, so results do not depend on chunks or prefix hits, but for the rare
number that the last bit of a float moves over the edge of a level. Kernels with products of bytes read levels as they
are, and round queries and weights to 16 bits instead; others decode rows first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from phasewise.kv.format import KVShape, Raw, RowFormat
from phasewise.verbs.method import Method
from phasewise.verbs.store import Storing
from phasewise.verbs.traits import Traits

LEVELS = 127


@dataclass(frozen=True)
class Int8(Method, Storing):
    """Keys (rotated) and values as int8 with a bfloat16 scale: `2 * (D + 2)` bytes per row and head. 16 bits = as is.

    Left out: keys quantised per channel, which low bit widths need (KIVI, arXiv 2402.02750).
    """

    bits: Literal[8, 16] = 8

    paper: ClassVar[str] = ""
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {"bits": 16}
    traits: ClassVar[Traits] = Traits("store")
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({},)

    def format(self) -> RowFormat:
        return _Rounded() if self.bits == 8 else Raw()


class _Rounded(RowFormat):
    """Planes: keys int8 [H, R, D], their scales bfloat16 [H, R], then the same for values."""

    exactness = "quantised"
    scaled = True  # native kernels know this form

    def planes(self, shape: KVShape) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [((shape.dim,), torch.int8), ((), torch.bfloat16)] * 2

    def encode(self, k: Tensor, v: Tensor) -> Sequence[Tensor]:
        return *_shrink(k), *_shrink(v)

    def decode(self, planes: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        keys, key_scales, values, value_scales = planes
        return keys.to(dtype) * key_scales.to(dtype)[..., None], values.to(dtype) * value_scales.to(dtype)[..., None]


def _shrink(x: Tensor) -> tuple[Tensor, Tensor]:
    """[H, R, D] -> levels int8 [H, R, D], scale bfloat16 [H, R].

    The scale is rounded before it is used: a bfloat16 is at most 0.4% off, which is 0.5 of a level at the outermost.
    """
    scale = (x.abs().amax(-1).float() / LEVELS).clamp_min(1e-30).to(torch.bfloat16)
    levels = (x.float() / scale.float()[..., None]).round_().clamp_(-LEVELS, LEVELS)
    return levels.to(torch.int8), scale
