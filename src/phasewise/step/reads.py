"""Reads of many requests at one layer, in one native call where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.ops import attention as ops
from phasewise.ops.native import listed
from phasewise.ops.native import spans as native
from phasewise.ops.native.choice import UnlistedRest

if TYPE_CHECKING:
    from phasewise.kv.part import KVPart
    from phasewise.step.plan import AttentionPlan
    from phasewise.step.read import Read


def attend_all(reads: Sequence[Read], commons: Sequence[native.Common] = ()) -> list[Tensor]:
    """`attend` of reads of one layer, those of few rows in a single native call where there is one.

    What some of them have in common is read once for all; `commons` number `reads`. Their members are plain: whole
    spans at positions that are slots, with no view, and no window that hides anything in common.
    """
    spec = reads[0].step.model.config.attention[reads[0].layer]
    reach = native.reaches(commons, len(reads))
    fews = [read.few(start) for read, start in zip(reads, native.starts(commons, len(reads)))]
    for common in commons:
        reads[common.members[0]].count(common.stop - common.start)
    out: dict[int, Tensor] = {}
    if not all(fews[m] is not None for common in commons for m in common.members):
        out, commons = _joined(reads, commons, reach), ()
    groups: dict[int, dict[int, native.Few]] = {}  # a call takes one number of heads, whoever else is there
    for i, (read, few) in enumerate(zip(reads, fews)):
        if i not in out and few is None:
            out[i] = read.attend()
            continue
        read.count(read.part.size[1] - reach[i])
        if i not in out and few is not None:
            groups.setdefault(few.k.shape[0], {})[i] = few
    for together in groups.values():
        place = {i: at for at, i in enumerate(together)}
        own = [common for common in commons if common.members[0] in place]  # all its members have all heads
        numbered = [common._replace(members=tuple(place[m] for m in common.members)) for common in own]
        rows, _ = native.attend(list(together.values()), spec.scale, spec.window, commons=numbered)
        out |= zip(together, torch.split(rows, [few.q.shape[0] for few in together.values()]))
    return [out[i] for i in range(len(reads))]


def attend_lse(reads: Sequence[Read]) -> list[tuple[Tensor, Tensor]]:
    """Exact attention over all that is visible with the log-sum-exp of its scores: [R, hq, D], float32 [R, hq] each.

    In a single native call where there is one, prompts included: no row's numbers depend on how many come with it.
    """
    spec = reads[0].step.model.config.attention[reads[0].layer]
    out: dict[int, tuple[Tensor, Tensor]] = {}
    by_heads: dict[int, dict[int, native.Few]] = {}  # a call takes one shape
    for i, read in enumerate(reads):
        read.count(read.part.size[1])
        few = read.few(most=read.q.shape[0])
        if few is None:
            out[i] = _plainly(read)
        else:
            by_heads.setdefault(few.k.shape[0], {})[i] = few
    for together in by_heads.values():
        rows, lse = native.attend(list(together.values()), spec.scale, spec.window, with_lse=True)
        assert lse is not None
        sizes = [few.q.shape[0] for few in together.values()]
        out |= zip(together, zip(torch.split(rows, sizes), torch.split(lse, sizes)))
    return [out[i] for i in range(len(reads))]


def with_sinks(plan: AttentionPlan, reads: Sequence[Read], scores: Tensor) -> list[Tensor]:
    """Exact attention where every query head has one more score, for which there is no row: [R, hq, D] of each read.

    `scores` float32 [Hq] of all heads. Raises UserError for a plan under which rows read less than they see.
    """
    if not plan.reads_all:
        raise UserError("this model's attention has sink scores, which no method that chooses what rows read knows of: "
                        "leave it out")  # fmt: skip
    heads = reads[0].step.model.config.kv_heads
    own = [queries_of(read.part, scores[None, :, None], heads)[0, :, 0] for read in reads]
    return [ops.sink(out, lse, mine) for mine, (out, lse) in zip(own, attend_lse(reads))]


def _plainly(read: Read) -> tuple[Tensor, Tensor]:
    """The plain twin of one read."""
    mask = read.mask()
    return ops.weigh(read.scores(), read.part.v, mask)


def queries_of(part: KVPart, q: Tensor, heads: int) -> Tensor:
    """The queries of a part's KV heads, of those of all `heads`: [R, Hq, D] -> [R, hq, D]."""
    return q if part.heads is None else q.view(q.shape[0], heads, -1, q.shape[2])[:, part.heads].flatten(1, 2)


def put(out: Tensor, read: Read, result: Tensor, heads: int) -> None:
    """Write what a read has found into the rows of all heads [T, Hq, D]."""
    if read.part.heads is None:
        out[read.at] = result
    else:
        grouped = out[read.at].view(result.shape[0], heads, -1, result.shape[2])
        grouped[:, read.part.heads] = result.view(result.shape[0], len(read.part.heads), -1, result.shape[2])


def answered(reads: Sequence[Read], answers: Sequence[Tensor | None]) -> list[Tensor]:
    """The answers of an attend method; where it left a read to others, exact attention over all that is visible."""
    left = [read for read, answer in zip(reads, answers) if answer is None]
    rest = iter(attend_all(left) if left else ())
    return [next(rest) if answer is None else answer for answer in answers]


def attend_listed(reads: Sequence[Read], slots: Sequence[Tensor], rests: Sequence[UnlistedRest] = ()) -> list[Tensor]:
    """Reads of one layer over the slots that are listed for them, int32 [h, R, S] each, which their rows all see; no
    other is read. In a single native call where there is one. -> [R, hq, D] each. `rests`: of single rows."""
    out: dict[int, Tensor] = {}
    together: dict[int, listed.Listed] = {}
    for i, (read, of_rows) in enumerate(zip(reads, slots)):
        read.count_entries(of_rows.numel())
        rows = read.listed(of_rows)
        if rows is None:
            out[i] = read.gathered(of_rows.long(), None)
            out[i] = rests[i].joined(out[i]) if rests else out[i]
        else:
            together[i] = rows._replace(rest=rests[i]) if rests else rows
    by_heads: dict[int, list[int]] = {}  # a call takes one shape
    for i, rows in together.items():
        by_heads.setdefault(rows.k.shape[0], []).append(i)
    for members in by_heads.values():
        out |= zip(members, listed.attend([together[i] for i in members], reads[0].scale))
    return [out[i] for i in range(len(reads))]


def _joined(reads: Sequence[Read], commons: Sequence[native.Common], reach: Sequence[int]) -> dict[int, Tensor]:
    """The plain twin: what members read in common and what each reads alone, joined by log-sum-exp in float32."""
    spec = reads[0].step.model.config.attention[reads[0].layer]
    parts: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for common in commons:
        k, v = reads[common.members[0]].part.between(common.start, common.stop)
        q = torch.cat([reads[m].q for m in common.members])
        rows = [reads[m].q.shape[0] for m in common.members]
        read, lse = ops.unmasked(q, k, v, spec.scale, spec.softcap)
        for m, *piece in zip(common.members, torch.split(read, rows), torch.split(lse, rows)):
            parts.setdefault(m, []).append((piece[0], piece[1]))
    out = {}
    for m, pieces in parts.items():
        part, mask = reads[m].part, reads[m].mask()
        k, v = part.between(reach[m], part.size[1])
        seen = None if mask is None else mask[..., reach[m] :]
        own = ops.reference(reads[m].q, k, v.float(), seen, spec.scale, spec.softcap)
        out[m] = ops.merge([*pieces, own]).to(reads[m].q.dtype)
    return out
