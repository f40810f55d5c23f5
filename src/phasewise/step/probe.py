"""Attention weights of rows over what they see, for methods that score cached rows by them.

Kernels do not say, so keys are read once more for it, and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from phasewise.ops import attention as ops
from phasewise.ops.native import received as native

if TYPE_CHECKING:
    from phasewise.ops.native.weighed import Doubt
    from phasewise.step.read import Read
    from phasewise.step.span import Span

AT_ONCE = 128  # query rows whose weights are in memory together


class Shaped(NamedTuple):
    """A change of logits float32 [h, G, r, N] of some rows of a read before the softmax: as a function; as data for
    such rows; and as data for the single row of a span after the prompt."""

    of: Callable[[Read, Tensor, Sequence[int]], Tensor]
    data: Callable[[Read, Sequence[int]], native.Shaping] | None = None
    row: Callable[[Span], Doubt] | None = None


def logits(read: Read, rows: Sequence[int]) -> Tensor:
    """Unmasked attention logits of `rows` (numbers of the read's rows) to every slot, float32 [h, G, r, N]."""
    spec, part = read.step.model.config.attention[read.layer], read.part
    read.count_keys(part.size[0] * part.size[1])
    return ops.scores(_some(read.q, rows), part.k, spec.scale, spec.softcap)


def probe(read: Read, rows: Sequence[int], shaped: Shaped | None = None) -> Tensor:
    """The weights with which `rows` (numbers of the read's rows) attend to every slot, float32 [h, G, r, N].

    Zero where a row does not see a slot, be it of a draft, beyond a model's window or hidden by the read's view.
    """
    return _weights(read, rows, logits(read, rows), shaped)


def received(read: Read, rows: Sequence[int], shaped: Shaped | None = None) -> Tensor:
    """The attention that every slot gets from `rows`: weights summed over them and over the query heads of a KV head,
    float32 [h, N]. Like `probe`, in pieces that take little memory; keys count once."""
    spec, part = read.step.model.config.attention[read.layer], read.part
    read.count_keys(part.size[0] * part.size[1])
    keys, some = part.k, _some(read.q, rows)
    causal = read.span.sees is None and read.rows is None and part.ids is None and read.span.block == 1
    seen = part.n + read.span.first + 1  # by the first row
    in_order = causal and read.view is None and (spec.window is None or read.in_order())
    if (shaped is None or shaped.data is not None) and in_order and native.fits(some, keys):
        sees, how = [seen + row for row in rows], native.Scoring(spec.scale, spec.softcap, spec.window)
        if shaped is not None and shaped.data is not None:
            return native.received(some, keys, sees, how, None, shaped.data(read, rows))
        lse = read.lse()
        return native.received(some, keys, sees, how, None if lse is None else _some(lse, rows))
    total = torch.zeros(part.size, dtype=torch.promote_types(keys.dtype, torch.float32), device=keys.device)
    for start in range(0, len(rows), AT_ONCE):
        mine = rows[start : start + AT_ONCE]
        end = seen + mine[-1] if causal else part.size[1]  # what comes later is not seen
        found = ops.scores(some[start : start + AT_ONCE], keys[:, :end], spec.scale, spec.softcap)
        total[:, :end] += _weights(read, mine, found, shaped).sum((1, 2))
    return total


def _some(of: Tensor, rows: Sequence[int]) -> Tensor:
    """The rows `rows` of a tensor with all of a read's."""
    if isinstance(rows, range) and rows.step == 1:
        return of[rows.start : rows.stop]
    return of[torch.tensor(list(rows), device=of.device)]


def _weights(read: Read, rows: Sequence[int], found: Tensor, shaped: Shaped | None) -> Tensor:
    """Attention weights of logits [h, G, r, N] to the first N slots."""
    if shaped is not None:
        found = shaped.of(read, found, rows)
    mask = read.seen(rows)  # [1 | h, r, all]
    if mask is not None:
        found = found.masked_fill(~mask[:, None, :, : found.shape[-1]], float("-inf"))
    return found.softmax(-1)
