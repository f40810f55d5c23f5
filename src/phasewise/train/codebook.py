"""Learned codebooks for one matrix (JLCM, arXiv 2309.17361): initialised by k-means, learned for a layer's outputs.

A weight is `scale * value`: an output has a scale for every group of inputs, and the 64 outputs of a panel share a
codebook of 2^bits values. What calibration texts bring to a layer is its Hessian H = X^T X, float32 [in, in]; with
E = Q - W the squared error of its outputs is tr(E H E^T), and its gradient by the weights is 2 E H.

Of the paper only the abstract and a summary were at hand. They state groups of similar neurons with codebooks of their
own, joint learning of values and mappings by gradients, and a proximal search: a level's gradient only weighs values
that are near its own. Inferred, and this code's own: weighing k-means by the inputs' squares, gradients scaled by
their curvature with a step that is the best along them, and a search that tries the two neighbouring levels of each
input in turn, by the gradient that passes straight through the look-up. Scales of groups of inputs are added here.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.model.codebook import PANEL, CodebookForm, CodebookLevels

CLUSTERING = 12  # rounds of k-means, at most
SWEEP = 64  # inputs after which all gradients are computed anew
DAMPING = 0.01  # of the mean of H's diagonal, added to it while a matrix learns, as in GPTQ: unused inputs stay put
LAST = 2  # searches after scales and values are rounded
MOST_SEEN = 65_536  # weights of a panel by which its first codebook is chosen
LARGEST = 60_000.0  # a scale, in float16
Start = Literal["kmeans", "uniform"]


class CodebookState(NamedTuple):
    """A matrix at work: levels int64 [out, in], codebooks float32 [panels, 2^bits], each in ascending order, and scales
    float32 [out, groups]."""

    form: CodebookForm
    levels: Tensor
    codebooks: Tensor
    scales: Tensor

    @property
    def unscaled(self) -> Tensor:
        """The values that the levels stand for, float32 [out, in]."""
        return looked_up(self.codebooks, self.levels)

    def values(self) -> Tensor:
        """What stands for the matrix, float32 [out, in]."""
        return self.unscaled * self.wide_scales()

    def wide_scales(self) -> Tensor:
        """The scale of each weight, float32 [out, in]."""
        return self.scales.repeat_interleave(self.form.group, 1)

    def rounded(self) -> CodebookState:
        """With values in bfloat16 and scales in float16, as they are stored."""
        return self._replace(codebooks=self.codebooks.bfloat16().float().sort(1).values,
                             scales=self.scales.clamp(-LARGEST, LARGEST).half().float())  # fmt: skip

    def coded(self) -> CodebookLevels:
        return CodebookLevels(self.form, self.levels.to(torch.uint8), self.codebooks.bfloat16(), self.scales.half())


def looked_up(codebooks: Tensor, levels: Tensor) -> Tensor:
    """Values of levels [out, in] in the codebooks [panels, n] of their panels, [out, in]."""
    return codebooks[panels_of(len(levels))].gather(1, levels)


def panels_of(outputs: int) -> Tensor:
    """The panel of each output, int64 [out]."""
    return torch.arange(outputs) // PANEL


def per_panel(rows: Tensor) -> Tensor:
    """Sums over the outputs of each panel, [out, ..] -> [panels, ..]."""
    found = torch.zeros(-(-len(rows) // PANEL), *rows.shape[1:], dtype=rows.dtype)
    return found.index_add_(0, panels_of(len(rows)), rows)


# ---- the beginning
def uniform(form: CodebookForm) -> Tensor:
    """2^bits values that lie evenly on both sides of 0, float32."""
    most = (1 << form.bits) - 1
    return (torch.arange(1 << form.bits) * 2.0 - most) / most


def started(weight: Tensor, importance: Tensor, form: CodebookForm, start: Start = "kmeans") -> CodebookState:
    """A matrix float32 [out, in] by k-means: values, levels and scales are the best for one another in turns.

    Squared errors are weighed by `importance` [in], the inputs' squares. A panel of no more than 2^bits different
    weights has these for its codebook. With `uniform` codebooks stay even.
    """
    scales = weight.reshape(len(weight), -1, form.group).abs().amax(2)
    books = uniform(form).repeat(-(-len(weight) // PANEL), 1)
    if start == "kmeans":
        books, scales = _first_codebooks(weight, scales, books)
    made = _assigned(weight, CodebookState(form, torch.zeros(0, dtype=torch.int64), books, scales))
    error = _weighed(weight, made, importance)
    for _ in range(CLUSTERING):
        found = _fitted_scales(weight, made, importance)
        if start == "kmeans":
            found = _centred(weight, found, importance)
        found = _assigned(weight, found)
        now = _weighed(weight, found, importance)
        if now >= error:
            break
        made, error = found, now
    return made


def _weighed(weight: Tensor, made: CodebookState, importance: Tensor) -> float:
    return float(((weight - made.values()).square() * importance).sum(dtype=torch.float64))


def _divided(weight: Tensor, made: CodebookState) -> Tensor:
    wide = made.wide_scales()
    return weight / wide.where(wide != 0, 1)


def _first_codebooks(weight: Tensor, scales: Tensor, books: Tensor) -> tuple[Tensor, Tensor]:
    """Codebooks halfway between the quantiles of each panel's weights over their scales and even ones, and scales."""
    wide = scales.repeat_interleave(weight.shape[1] // scales.shape[1], 1)
    x = weight / wide.where(wide != 0, 1)
    count = books.shape[1]
    ranks = (torch.arange(count) + 0.5) / count
    found, scales = books.clone(), scales.clone()
    for p in range(len(books)):
        rows = slice(p * PANEL, (p + 1) * PANEL)
        own: Tensor = torch.unique(weight[rows])  # type: ignore[no-untyped-call]
        if len(own) <= count:
            found[p], scales[rows] = torch.cat((own, own[-1:].expand(count - len(own)))), 1.0
            continue
        some = x[rows].flatten()
        found[p] = (torch.quantile(some[:: max(1, len(some) // MOST_SEEN)], ranks) + found[p]) / 2
    return found, scales


def _assigned(weight: Tensor, made: CodebookState) -> CodebookState:
    """The nearest values of each weight."""
    x = _divided(weight, made)
    borders = (made.codebooks[:, 1:] + made.codebooks[:, :-1]) / 2
    levels = torch.cat([torch.bucketize(x[p * PANEL : (p + 1) * PANEL].contiguous(), each)
                        for p, each in enumerate(borders)])  # fmt: skip
    return made._replace(levels=levels)


def _fitted_scales(weight: Tensor, made: CodebookState, importance: Tensor) -> CodebookState:
    """The best scales for these levels and values."""
    values = made.unscaled
    shape = (*made.scales.shape, made.form.group)
    above = (values * weight * importance).reshape(shape).sum(2)
    below = (values.square() * importance).reshape(shape).sum(2)
    return made._replace(scales=torch.where(below > 0, above / below.clamp_min(1e-30), made.scales))


def _centred(weight: Tensor, made: CodebookState, importance: Tensor) -> CodebookState:
    """The best values for these levels and scales; those of levels that no weight has stay."""
    wide = made.wide_scales()
    above = _by_level(made, weight * wide * importance)
    below = _by_level(made, wide.square() * importance)
    books = torch.where(below > 0, above / below.clamp_min(1e-30), made.codebooks)
    return made._replace(codebooks=books.sort(1).values)


def _by_level(made: CodebookState, terms: Tensor) -> Tensor:
    """Sums of [out, in] over the weights of each panel that have a level, [panels, 2^bits]."""
    rows = torch.zeros(len(terms), made.codebooks.shape[1]).scatter_add_(1, made.levels, terms)
    return per_panel(rows)


# ---- learning
class LearnedCodebooks(NamedTuple):
    """A matrix after learning, and as it was before: by k-means, or in even levels."""

    coded: CodebookLevels
    before: CodebookLevels


def learned(weight: Tensor, hessian: Tensor, form: CodebookForm, start: Start = "kmeans") -> LearnedCodebooks:
    """A matrix float32 [out, in] in codebooks that were learned for `form.learn` rounds, for inputs of this Hessian.

    No panel's outputs have a larger error over the calibration texts than before. With `uniform` codebooks stay even,
    and only levels and scales learn. Raises UserError for numbers that are not finite.
    """
    if not bool(torch.isfinite(weight).all()):
        raise UserError("a matrix has numbers that are not finite, which no codebook stands for: download it again")
    if not bool(hessian.any()):
        hessian = torch.eye(weight.shape[1])
    damped = hessian + torch.eye(len(hessian)) * (DAMPING * float(hessian.diagonal().mean()))
    first = started(weight, damped.diagonal(), form, start)
    plain = _assigned(weight, first.rounded())
    if not form.learn:
        return LearnedCodebooks(plain.coded(), plain.coded())
    made = first
    for _ in range(form.learn):
        if start == "kmeans":
            made = _book_step(weight, damped, made)
        made = _scale_step(weight, damped, made)
        made = searched(weight, damped, made)
    made = made.rounded()
    for _ in range(LAST):
        made = searched(weight, damped, made)
    return LearnedCodebooks(_better(weight, hessian, made, plain).coded(), plain.coded())


def _slope(weight: Tensor, hessian: Tensor, made: CodebookState) -> Tensor:
    """Half the gradient of the outputs' error by each weight, E H, float32 [out, in]."""
    return (made.values() - weight) @ hessian


def _book_step(weight: Tensor, hessian: Tensor, made: CodebookState) -> CodebookState:
    """One step of every codebook against its gradient, as long as is best for its panel."""
    slope, wide = _slope(weight, hessian, made), made.wide_scales()
    curvature = _by_level(made, wide.square() * hessian.diagonal())
    steps = _by_level(made, slope * wide) / curvature.clamp_min(1e-30)
    steps = torch.where(curvature > 0, steps, 0.0)
    moved = looked_up(steps, made.levels) * wide
    along = per_panel((moved * slope).sum(1)) / per_panel(((moved @ hessian) * moved).sum(1)).clamp_min(1e-30)
    books = made.codebooks - steps * along[:, None]
    order = books.argsort(1)
    rank = order.argsort(1)  # where each level has gone
    levels = rank[panels_of(len(made.levels))].gather(1, made.levels)
    return made._replace(codebooks=books.gather(1, order), levels=levels)


def _scale_step(weight: Tensor, hessian: Tensor, made: CodebookState) -> CodebookState:
    """One step of all scales of an output against their gradient, as long as is best for it."""
    slope, values, shape = _slope(weight, hessian, made), made.unscaled, (*made.scales.shape, made.form.group)
    curvature = (values.square() * hessian.diagonal()).reshape(shape).sum(2)
    steps = (slope * values).reshape(shape).sum(2) / curvature.clamp_min(1e-30)
    moved = values * steps.repeat_interleave(made.form.group, 1)
    along = (moved * slope).sum(1) / ((moved @ hessian) * moved).sum(1).clamp_min(1e-30)
    return made._replace(scales=made.scales - steps * along[:, None])


def searched(weight: Tensor, hessian: Tensor, made: CodebookState) -> CodebookState:
    """One proximal search of the mapping: of every input in turn, each output takes the neighbouring level, the one
    above or the one below, that lowers the error of its outputs most, if one does."""
    levels, wide = made.levels.clone(), made.wide_scales()
    books, most = made.codebooks[panels_of(len(levels))], made.codebooks.shape[1] - 1  # [out, n]
    off = made.values() - weight
    diagonal = hessian.diagonal()
    for start in range(0, levels.shape[1], SWEEP):
        end = min(start + SWEEP, levels.shape[1])
        slope = (off @ hessian[:, start:end]).T.contiguous()  # [inputs, out], kept up to date within the block
        for i in range(start, end):
            own = levels[:, i : i + 1]
            now = books.gather(1, own)
            near = torch.cat((own - 1, own + 1), 1).clamp(0, most)
            change = (books.gather(1, near) - now) * wide[:, i : i + 1]  # [out, 2]
            gain = change * (2 * slope[i - start, :, None] + change * diagonal[i])
            best, which = gain.min(1)
            moves = best < 0
            change = change.gather(1, which[:, None])[:, 0].where(moves, 0.0)
            levels[:, i] = near.gather(1, which[:, None])[:, 0].where(moves, own[:, 0])
            off[:, i] += change
            slope[i - start + 1 :] += hessian[i, i + 1 : end, None] * change
    return made._replace(levels=levels)


def output_errors(weight: Tensor, hessian: Tensor, values: Tensor) -> Tensor:
    """The squared error of each output over the texts of the Hessian, float64 [out]."""
    off = weight - values
    return ((off @ hessian).double() * off).sum(1)


def _better(weight: Tensor, hessian: Tensor, found: CodebookState, plain: CodebookState) -> CodebookState:
    """Panel by panel, the one with the smaller error."""
    errors = [per_panel(output_errors(weight, hessian, each.values())) for each in (found, plain)]
    keep = errors[0] <= errors[1]  # [panels]
    rows = keep[panels_of(len(weight))][:, None]
    return found._replace(levels=torch.where(rows, found.levels, plain.levels),
                          codebooks=torch.where(keep[:, None], found.codebooks, plain.codebooks),
                          scales=torch.where(rows, found.scales, plain.scales))  # fmt: skip
