"""Matrices as levels of few bits: which of a model become such, what each then holds, and the nearest levels.

Round-to-nearest takes the extremes of a group for those of the levels, as the observers of compressed-tensors do. Only
scales are shorter here: float16 and bfloat16 hold them alike, so that no file rounds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phasewise.errors import UserError
from phasewise.model.config import ModelConfig
from phasewise.model.layout import layout
from phasewise.model.weights_form import WeightsForm
from phasewise.ops.native.levels import KINDS

LARGEST = 61_440.0  # a scale, in float16 with few bits
LINEARS = ("qkv", "o", "gate_up", "down")  # of a layer or an expert; routers, norms and embeddings stay as they are


def matrices(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """The matrices of all layers that a form takes, {name in the checkpoint: (outputs, inputs)}."""
    found: dict[str, tuple[int, int]] = {}
    for key, parts in layout(config).items():
        if key.rpartition(".")[2] in LINEARS:
            found.update((name, (shape[0], shape[1])) for name, shape in parts)
    return found


def require_whole_groups(form: WeightsForm, sizes: Mapping[str, tuple[int, int]], where: object) -> None:
    """Raise UserError naming the first matrix whose inputs groups of this size do not divide, and sizes that do."""
    wrong = next(((name, inputs) for name, (_, inputs) in sizes.items() if inputs % form.group), None)
    if wrong is None:
        return
    name, inputs = wrong
    fit = [str(size) for size in (32, 64, 96, 128, 256) if all(each % size == 0 for _, each in sizes.values())]
    choose = f"choose group={' or '.join(fit)}" if fit else "no group does: its matrices stay as they are"
    raise UserError(
        f"{where}: {form} does not fit {name}: {form.group} does not divide its {inputs:,} inputs; {choose}"
    )


# ---- levels
class Levels(NamedTuple):
    """A matrix in few bits: `scales * (levels - zeros)`, a scale and a zero for each output and group of inputs."""

    form: WeightsForm
    levels: Tensor  # uint8 [out, in]
    scales: Tensor  # float16 [out, groups], which bfloat16 holds exactly too
    zeros: Tensor | None  # uint8 [out, groups]; None: all are the middle level

    def values(self) -> Tensor:
        """The matrix that these stand for, float32 [out, in]."""
        size, zeros = self.form.group, self.form.middle if self.zeros is None else self.zeros.float()[..., None]
        grouped = self.levels.float().reshape(*self.scales.shape, size)
        return ((grouped - zeros) * self.scales.float()[..., None]).reshape(self.levels.shape)

    def blocks(self) -> NDArray[np.uint8]:
        """The matrix in blocks of the form's kind, uint8 [out, bytes of a row]."""
        size, each = self.form.block, KINDS[self.form.kind]
        outputs, inputs = self.levels.shape
        out = np.empty((outputs, inputs // size, each.size), np.uint8)
        repeat = self.form.group // size
        out[:, :, :2] = self.scales.repeat_interleave(repeat, 1)[..., None].numpy().view(np.uint8)
        if self.zeros is not None:
            out[:, :, 2] = self.zeros.repeat_interleave(repeat, 1).numpy()
        levels = self.levels.numpy().reshape(outputs, -1, size)
        if self.form.bits == 8:
            out[:, :, 2:] = levels ^ 128  # signed
        else:
            out[:, :, -size // 2 :] = levels[..., ::2] | levels[..., 1::2] << 4
        return out.reshape(outputs, -1)

    def rows(self, some: slice) -> Levels:
        """Some outputs of the matrix."""
        zeros = None if self.zeros is None else self.zeros[some]
        return Levels(self.form, self.levels[some], self.scales[some], zeros)


def grids(groups: Tensor, form: WeightsForm) -> tuple[Tensor, Tensor]:
    """Groups float32 [..., g] -> the scale and the zero of each, float32 [...].

    Scales have few bits, so that float16 and bfloat16 hold them alike and float16 holds `scale * zero` (Q4_1's
    minimum): 8 bits, or 7 where there are zeros of 4.
    """
    most = (1 << form.bits) - 1
    if not form.zeros:
        scales = _short(groups.abs().amax(-1) * 2 / most, 8)
        return scales, torch.full_like(scales, form.middle)
    low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    scales = _short((high - low) / most, 7)
    return scales, (-low / scales.where(scales > 0, 1)).round_().clamp_(0, most)


def _short(values: Tensor, bits: int) -> Tensor:
    """Numbers that are not negative, rounded to so many significant bits and to float16."""
    mantissa, exponent = torch.frexp(values.clamp_max(LARGEST))
    return torch.ldexp((mantissa * (1 << bits)).round() / (1 << bits), exponent).half().float()


def nearest(weights: Tensor, scales: Tensor, zeros: Tensor, form: WeightsForm) -> Tensor:
    """The nearest levels of numbers float32 [..., g], float32; scales and zeros [...]."""
    levels = weights / scales.where(scales > 0, 1)[..., None] + zeros[..., None]
    return levels.round_().clamp_(0, (1 << form.bits) - 1)


def rounded_to_nearest(weight: Tensor, form: WeightsForm, name: str = "a weight") -> Levels:
    """A matrix [out, in] of whole groups in its nearest levels. Raises UserError for numbers that are not finite."""
    groups = weight.float().reshape(len(weight), -1, form.group)
    if not bool(torch.isfinite(groups).all()):
        raise UserError(f"{name} has numbers that are not finite, which no level stands for. Download it again, or "
                        "leave the form of weights out.")  # fmt: skip
    scales, zeros = grids(groups, form)
    return as_levels(nearest(groups, scales, zeros, form), scales, zeros, form)


def as_levels(levels: Tensor, scales: Tensor, zeros: Tensor, form: WeightsForm) -> Levels:
    """Whole numbers float32 [out, groups, g] with scales and zeros [out, groups], as they are stored."""
    kept = zeros.to(torch.uint8) if form.zeros else None
    return Levels(form, levels.reshape(len(levels), -1).to(torch.uint8), scales.half(), kept)
