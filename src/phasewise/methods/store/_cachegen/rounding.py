"""Rows rounded to a few steps between minus and plus their largest number, more of them in shallow layers.

A row of a layer's keys (or values) has one scale for all its heads. With a group above one, only the first row of each
group is rounded as it is, to 8 bits; the others as differences from it. Nothing depends on rows of other groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ANCHOR = 127  # steps on either side of zero for the first row of a group
SMALLEST = 1e-30  # numbers of a row whose largest is below this are taken for nothing


@dataclass(frozen=True, slots=True)
class Level:
    """Bins for the keys of each third of the layers, and for the values of the first sixteenth and of the rest."""

    keys: tuple[int, int, int]
    values: tuple[int, int]

    def steps(self, layer: int, layers: int) -> tuple[int, int]:
        """Steps on either side of zero for keys and for values; b bins make b // 2 - 1."""
        keys = self.keys[layer * 3 // layers]
        values = self.values[0 if layer * 16 < layers else 1]
        return keys // 2 - 1, values // 2 - 1


LEVELS = (
    Level((256, 256, 256), (256, 256)),
    Level((32, 32, 32), (32, 32)),
    Level((32, 16, 16), (32, 16)),
    Level((16, 16, 12), (16, 12)),
)
"""Levels 1, 2, ... from fine to coarse; level 0 is the rows as they are."""


@dataclass(frozen=True, slots=True)
class Rounded:
    """R rows of C numbers: `scales` bfloat16 [R], `symbols` uint8 [R, C] in 0 .. 2 * steps, `steps` being zero."""

    scales: Tensor
    symbols: Tensor
    steps: int

    def numbers(self) -> Tensor:
        """float32 [R, C]; no further from what was rounded than half a step, scale / (2 * steps)."""
        return (self.symbols.float() - self.steps) * (self.scales.float() / self.steps)[:, None]


def shrink(x: Tensor, steps: int) -> Rounded:
    """float32 [R, C] -> its rounded form. Scales are rounded before they are used, so that both sides have the same."""
    largest = x.abs().amax(-1) if x.shape[1] else x.new_zeros(x.shape[0])
    scales = torch.where(largest < SMALLEST, 0.0, largest).to(torch.bfloat16)
    by = torch.where(scales > 0, steps / scales.float(), 0.0)
    symbols = (x * by[:, None]).round_().clamp_(-steps, steps) + steps
    return Rounded(scales, symbols.to(torch.uint8), steps)


def forms(rows: int, steps: int, group: int) -> list[tuple[int, int]]:
    """(rows, steps) of each rounded form that `compress` makes of so many rows."""
    if group == 1:
        return [(rows, steps)]
    anchors = -(-rows // group)
    return [(anchors, ANCHOR), (rows - anchors, steps)]


def compress(x: Tensor, steps: int, group: int) -> list[Rounded]:
    """float32 [R, C] -> one rounded form, or with groups two: their first rows, and the others' differences from these
    as the receiver will see them."""
    if group == 1:
        return [shrink(x, steps)]
    first, others = _split(x.shape[0], group, x.device)
    anchors = shrink(x[first], ANCHOR)
    return [anchors, shrink(x[others] - anchors.numbers()[others // group], steps)]


def expand(rounded: list[Rounded], group: int) -> Tensor:
    """What `compress` was given, float32 [R, C], as far as it can be told."""
    if group == 1:
        return rounded[0].numbers()
    anchors, differences = (form.numbers() for form in rounded)
    x = anchors.new_empty(anchors.shape[0] + differences.shape[0], anchors.shape[1])
    first, others = _split(x.shape[0], group, x.device)
    x[first] = anchors
    x[others] = differences + anchors[others // group]
    return x


def _split(rows: int, group: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Indices of the first row of every group, and of all others."""
    index = torch.arange(rows, device=device)
    return index[::group], index[index % group != 0]
