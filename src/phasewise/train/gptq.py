"""GPTQ (arXiv 2210.17323): inputs are rounded one after the other, and each error is made up for by those to come.

What a text brings to a layer is its Hessian H = X^T X, [in, in]: the error of a matrix W [out, in] in levels Q is the
squared error of its outputs, tr((W - Q) H (W - Q)^T). Greedy rounding may end above the nearest levels in a row of W;
rows are independent, and such a row takes the nearest levels. Left out: rounding a layer anew for each of its parts
(`true_sequential`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from phasewise.model.levels import Levels, as_levels, grids, nearest, rounded_to_nearest
from phasewise.model.weights_form import WeightsForm

DAMPING = 0.01  # of the mean of H's diagonal, added to it, as in the paper
MORE = 10.0  # times as much where H is still not positive definite
BLOCK = 128  # inputs after which the errors of all are passed on to the rest


def gptq(weight: Tensor, hessian: Tensor, form: WeightsForm, *, act_order: bool = False) -> Levels:
    """A matrix float32 [out, in] in levels, for inputs with this Hessian, float32 [in, in].

    `act_order`: inputs are taken by how large they are, the largest first; groups stay as they lie, with the scales of
    the matrix as it was. Otherwise a group's scale is chosen when its first input is reached.
    """
    plain = rounded_to_nearest(weight, form)
    if not bool(hessian.any()):
        return plain
    factor, inputs = _factor(hessian), weight.shape[1]
    order = hessian.diagonal().argsort(descending=True) if act_order else torch.arange(inputs)
    if act_order:
        factor = _factor(hessian[order][:, order])
    rest = weight.T[order].contiguous()  # [in, out]: what is left to round
    grouped = weight.reshape(len(weight), -1, form.group)
    scales, zeros = grids(grouped, form)  # [out, groups]
    levels = torch.empty_like(rest)
    step = BLOCK if act_order else form.group
    for start in range(0, inputs, step):
        some = slice(start, min(start + step, inputs))
        if not act_order:
            group = start // form.group
            scales[:, group], zeros[:, group] = grids(rest[some].T, form)
        groups = order[some] // form.group
        errors = _round(rest[some], factor[some, some], scales[:, groups].T, zeros[:, groups].T, form, levels[some])
        rest[some.stop :] -= factor[some, some.stop :].T @ errors
    found = torch.empty_like(levels)
    found[order] = levels
    return _better(weight, hessian, as_levels(found.T.reshape(grouped.shape), scales, zeros, form), plain)


def _round(rest: Tensor, factor: Tensor, scales: Tensor, zeros: Tensor, form: WeightsForm, levels: Tensor) -> Tensor:
    """Rounds inputs [n, out] in turn, and passes each error on to those after it; levels [n, out] are filled in.

    -> the errors by the factor's diagonal, [n, out].
    """
    errors = torch.empty_like(rest)
    for i in range(len(rest)):
        levels[i] = nearest(rest[i, :, None], scales[i], zeros[i], form)[:, 0]
        errors[i] = (rest[i] - (levels[i] - zeros[i]) * scales[i]) / factor[i, i]
        rest[i + 1 :] -= factor[i, i + 1 :, None] * errors[i]
    return errors


def _factor(hessian: Tensor) -> Tensor:
    """The upper Cholesky factor of H's inverse, float32 [in, in]. Inputs that are always 0 count as 1 in H."""
    damped = hessian.double()
    diagonal = damped.diagonal()
    diagonal[diagonal == 0] = 1.0
    more = DAMPING * float(diagonal.mean())
    while True:
        diagonal += more
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            break
        more *= MORE
    upper: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
    return upper.float()


def row_errors(weight: Tensor, hessian: Tensor, values: Tensor) -> Tensor:
    """The squared error of each output over the text of the Hessian, float64 [out]."""
    off = weight - values
    return ((off @ hessian).double() * off).sum(1)


def _better(weight: Tensor, hessian: Tensor, found: Levels, plain: Levels) -> Levels:
    """Row by row, the levels with the smaller error."""
    worse = row_errors(weight, hessian, found.values()) > row_errors(weight, hessian, plain.values())
    pick = worse[:, None]
    zeros = None if found.zeros is None or plain.zeros is None else torch.where(pick, plain.zeros, found.zeros)
    return Levels(found.form, torch.where(pick, plain.levels, found.levels),
                  torch.where(pick, plain.scales, found.scales), zeros)  # fmt: skip
