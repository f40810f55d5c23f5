"""Rows stay that later queries are expected to attend to (Expected Attention, arXiv 2510.00636).

Were a head's queries Gaussian, the mean of exp(q . k) over those to come is a closed form of k, which ranks the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.kv.drawers import Room
from phasewise.kv.format import KVShape
from phasewise.methods._amounts import check_amount
from phasewise.methods.evict._allot import Heads, Spread, allot
from phasewise.request.request import Request
from phasewise.step.plan import EVERYTHING, AttentionPlan, Record
from phasewise.step.read import Read
from phasewise.step.span import Span
from phasewise.verbs.evict import Evict
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits

NAME = "expected_attention"


@dataclass(frozen=True)
class ExpectedAttention(Method):
    """The mean and covariance of the last `sample` queries of a prompt, before rotation, stand for those to come.

    The mean rotation of the next `future` positions turns them. A row's score is its expected attention times the norm
    of its value; the first `sinks` rows always stay. `keep` up to 1 is a share of the prompt, above 1 a number of rows.
    With heads "ada" heads compete. Left out: queries of the whole prompt; the last ones are there after a prefix hit.
    """

    keep: float = 0.25
    sample: int = 256  # queries
    future: int = 512  # positions
    sinks: int = 4
    heads: Heads = "uniform"

    paper: ClassVar[str] = "arXiv 2510.00636"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {"keep": 1.0}
    traits: ClassVar[Traits] = Traits("evict", frees_rows=True, phases=("prefill",))  # decode reads what stays as ever
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({"keep": 0.5}, {"keep": 0.25}, {"keep": 0.125})
    tight: ClassVar[dict[str, object]] = {"keep": 8.0, "sample": 4, "sinks": 1}

    def __post_init__(self) -> None:
        check_amount(NAME, "keep", self.keep)
        if not self.keep > 0 or min(self.sample, self.future, self.sinks + 1) < 1:
            got = f"keep={self.keep}, sample={self.sample}, future={self.future}, sinks={self.sinks}"
            raise UserError(f"{NAME}: {got}: keep must be above 0, sample and future at least 1, sinks at least 0")
        Spread(heads=self.heads).check(NAME)

    def bind(self, host: Host) -> _ExpectedAttention:
        return _ExpectedAttention(self, host)


class _ExpectedAttention(Evict):
    def __init__(self, knobs: ExpectedAttention, host: Host) -> None:
        """`request.state[NAME]` holds a prompt's sampled queries by layer, [n, Hq, D], until it is complete."""
        self.knobs, self.model, self.observes = knobs, host.model, knobs.sample
        self._plan = AttentionPlan(record=Record(self._take))

    def drawer(self, layer: int, shape: KVShape, room: Room) -> int:
        counts = min(self.knobs.sample, room.rows) if room.prompt and self.capacity(room.rows) < room.rows else 0
        return 4 * counts * self.model.config.heads * shape.dim

    def capacity(self, prompt: int) -> int:
        """Rows per head that stay of a prompt, on average."""
        return max(int(self.knobs.keep * (prompt if self.knobs.keep <= 1 else 1)), self.knobs.sinks, 1)

    def plan(self, span: Span) -> AttentionPlan:
        length = span.request.prompt_len
        sampled = span.last >= length - self.knobs.sample and self.capacity(length) < length
        return self._plan if span.request.prefilling and sampled else EVERYTHING

    def _take(self, read: Read) -> None:
        """Unrotate the sampled queries; they lie with the span until its rows are committed."""
        length, at = read.span.request.prompt_len, read.q_positions
        rows = ((at >= length - self.knobs.sample) & (at < length)).nonzero()[:, 0]
        back = self.model.rotate(read.layer, read.q[rows].float(), -at[rows][:, None])
        read.span.trail = read.span.trail or {}
        read.span.trail.setdefault(NAME, {})[read.layer] = rows.tolist(), back

    def stayed(self, span: Span, keep: int | Sequence[int]) -> None:
        kept = set(range(keep) if isinstance(keep, int) else keep)
        for layer, (rows, queries) in (span.trail or {}).pop(NAME, {}).items():
            mine = queries[torch.tensor([row in kept for row in rows], dtype=torch.bool, device=queries.device)]
            layers = span.request.state.setdefault(NAME, {})
            layers[layer] = torch.cat((layers[layer], mine)) if layer in layers else mine

    def due(self, request: Request) -> bool:
        return not request.prefilling and bool(request.state.get(NAME))

    def keep(self, request: Request, layer: int) -> Tensor | list[Tensor] | None:
        assert request.kv is not None
        queries, length = request.state[NAME].pop(layer, None), request.prompt_len
        if queries is None or not (parts := request.kv.layers[layer].read()):
            return None
        part, older = parts[0], int((parts[0].positions < length).sum())  # heads are together until now
        found = self.scores(layer, queries, part.between(0, older), length)
        found[:, : self.knobs.sinks] = torch.inf
        return allot(found, self.capacity(length), part.n - older, Spread(heads=self.knobs.heads))

    def scores(self, layer: int, queries: Tensor, kv: tuple[Tensor, Tensor], end: int) -> Tensor:
        """Float32 [H, N], of keys and values [H, N, D] before position `end` and unrotated queries [n, Hq, D]."""
        (keys, values), (heads, _, dim) = (each.float() for each in kv), kv[0].shape
        ahead = torch.arange(end, end + self.knobs.future, device=keys.device)[:, None]
        turn = self.model.rotate(layer, torch.eye(dim, device=keys.device).expand(len(ahead), -1, -1), ahead).mean(0)
        turned = queries.transpose(0, 1) @ turn  # [Hq, n, D]
        each = turned @ keys.repeat_interleave(len(turned) // heads, 0).mT * self.model.config.attention[layer].scale
        logits = each.mean(1) + 0.5 * each.var(1, correction=0)  # log E exp of a Gaussian
        return logits.softmax(-1).view(heads, -1, keys.shape[1]).mean(1) * values.square().sum(-1).sqrt()
