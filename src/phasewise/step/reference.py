"""Executes any attention plan in torch, for the reads of one layer.

It is the plain twin of what kernels do with the plans that `step/lower.py` gives them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phasewise.ops.native.spans import Common
from phasewise.step.plan import AttentionPlan, Custom, SharedPrefix, Window
from phasewise.step.read import FEW, Read, View
from phasewise.step.reads import attend_all, attend_lse
from phasewise.step.shared import in_common


def look(plan: AttentionPlan, read: Read) -> None:
    """Set what the rows of a read see (`read.view`), and hand the weights that the plan records to who takes them."""
    if plan.window is not None:
        read.view = visible(plan.window, read)
    elif plan.record is not None:
        read.view = plan.record.take(read)


def attend(plan: AttentionPlan, reads: Sequence[Read]) -> Sequence[Tensor | None]:
    """One output [R, hq, D] per read of one layer, all of this plan; None: attention over everything visible."""
    if isinstance(plan.keys, Custom):
        return plan.keys.attend(reads)
    if plan.bias is not None:
        return _biased(plan.bias, reads)
    if plan.shared is not None:
        return attend_all(reads, _commons(plan.shared, reads))
    return [None] * len(reads)


# ---- attention windows
def visible(window: Window, read: Read) -> View | None:
    """What the rows of a read see through an attention window; None: everything."""
    if not window.hides(read.span):
        return None
    part, at = read.part, read.q_positions
    rows = part.positions[:, None]  # [1 | h, 1, N]
    heads = None
    if window.heads is not None:
        heads = torch.tensor(window.heads[read.layer], device=at.device)
        heads = heads if part.heads is None else heads[part.heads]
        if not bool(heads.any()):
            return None
    mask = window.seen(at[:, None], rows)  # [1 | h, R, N]
    if not window.prompts:
        mask = mask | (at < read.span.request.prompt_len)[:, None]
        if bool(mask.all()):
            return None
    if heads is not None:
        return View(mask if bool(heads.all()) else mask | ~heads[:, None, None])
    if not window.rebased:
        return View(mask)
    lost = (at - (window.rows - 1)).clamp_min(0)  # [R]: rows given up before this one
    return View(mask, (torch.nonzero(rows[0, 0] < window.sinks)[:, 0], lost))


# ---- a number added to the score of the first token
def _biased(bias: Tensor, reads: Sequence[Read]) -> list[Tensor | None]:
    """Attention with `bias` float32 [layers, Hq] on the score of position 0: the outputs of attention without it,
    corrected by their log-sum-exp, for which that row is read once more."""
    added, out = bias[reads[0].layer], list[Tensor | None]([None] * len(reads))
    if not bool(added.any()):
        return out
    able = [i for i, read in enumerate(reads) if bool(_holds_first(read).any())]
    if able:
        for i, (rows, lse) in zip(able, attend_lse([reads[i] for i in able])):
            out[i] = _corrected(added.expm1(), reads[i], rows, lse)
    return out


def _corrected(more: Tensor, read: Read, out: Tensor, lse: Tensor) -> Tensor:
    """(out + more a0 v0) / (1 + more a0), where a0 is the weight of slot 0 and `more` [Hq] = e^bias - 1."""
    heads = read.part.size[0]
    if read.part.heads is not None:
        more = more.view(-1, len(more) // read.span.kv.layers[read.layer].shape.heads)[read.part.heads].flatten()
    read.count(1)
    extra = more * first_weight(read, lse)  # [R, hq]
    first = read.part.between(0, 1)[1][:, 0].float()  # [h, D]
    every = first.repeat_interleave(extra.shape[1] // heads, 0)
    return ((out.float() + extra[..., None] * every) / (1 + extra)[..., None]).to(out.dtype)


def first_weight(read: Read, lse: Tensor) -> Tensor:
    """The weight of position 0 in attention with this log-sum-exp, [R, hq]; 0 for rows that do not see it."""
    weight = (read.score(0) - lse).exp().clamp_max(1.0)
    seen = _holds_first(read)[None] & _sees_first(read)  # [R | 1, 1 | h]
    heads = read.part.size[0]
    return weight * seen.expand(-1, heads).repeat_interleave(weight.shape[1] // heads, 1)


def _holds_first(read: Read) -> Tensor:
    """Whether the first slot is that of position 0, bool [1 | h]."""
    if read.part.plain and read.part.n:
        return torch.ones(1, dtype=torch.bool, device=read.q.device)
    return read.part.positions[:, 0] == 0


def _sees_first(read: Read) -> Tensor:
    """Whether a row sees the first slot, bool [R | 1, 1 | h]."""
    window = read.step.model.config.attention[read.layer].window
    mask = None if window is None and read.view is None and read.span.sees is None else read.mask()
    if mask is None:
        return torch.ones(1, 1, dtype=torch.bool, device=read.q.device)
    return mask[:, :, 0].T


# ---- prefixes that several requests share
def _commons(how: SharedPrefix, reads: Sequence[Read]) -> list[Common]:
    """What reads have in common, by their numbers; most layers ask the same."""
    able = tuple((i, id(read.span)) for i, read in enumerate(reads) if _in_order(read))
    notes, key = reads[0].step.notes, (how, able)
    if key not in notes:
        found = in_common([reads[i].span for i, _ in able], how)
        notes[key] = [c._replace(members=tuple(able[m][0] for m in c.members)) for c in found]
    commons: list[Common] = notes[key]
    return commons


def _in_order(read: Read) -> bool:
    """Whether the read's rows see all that its request has computed, each row at the slot of its position."""
    part, window = read.part, read.step.model.config.attention[read.layer].window
    return (
        part.plain
        and part.heads is None
        and part.ids is None
        and read.rows is None
        and read.view is None
        and read.q.shape[0] <= FEW
        and (window is None or read.span.last < window)
    )
