"""The end of a prompt votes on which of its rows stay, per head (SnapKV, arXiv 2404.14469).

Promises exactly the kept number of rows per head once the prompt is complete, each with its true position, and nothing
evicted after. A question that comes later may find its rows gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from phasewise.errors import UserError
from phasewise.kv.part import Part
from phasewise.model.config import AttentionSpec
from phasewise.ops.attention import scores
from phasewise.request.request import Request
from phasewise.step.read import Read, View
from phasewise.step.span import Span
from phasewise.verbs.evict import retain
from phasewise.verbs.host import Host


@dataclass(frozen=True)
class SnapKV:
    """The attention of the last `window` prompt rows, summed over them, averaged over the query heads of a KV head and
    pooled over `kernel` neighbours, ranks the rows before them; the best stay, and the window itself.

    `keep` up to 1 is a share of the prompt, above 1 a number of rows; the window is never cut. Queries are kept across
    chunks, so chunked prompts and prefix hits choose the same rows. Left out: budgets that differ by head or layer, and
    compressing again while decoding.
    """

    keep: float = 0.25
    window: int = 32
    kernel: int = 5
    pool: Literal["avg", "max"] = "avg"

    phases: ClassVar[tuple[str, ...]] = ("prefill",)  # what stays is read like any other KV
    paper: ClassVar[str] = "arXiv 2404.14469"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {"keep": 1.0}
    tight: ClassVar[dict[str, object]] = {"keep": 6.0, "window": 4}
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({"keep": 0.5}, {"keep": 0.25}, {"keep": 0.125})

    def __post_init__(self) -> None:
        if not self.keep > 0:
            raise UserError(
                f"snapkv: keep={self.keep} must be above 0: a share of the prompt up to 1, or a number of rows"
            )
        if self.window < 1:
            raise UserError(f"snapkv: window={self.window} must be at least 1")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise UserError(f"snapkv: kernel={self.kernel} must be odd and at least 1")
        if self.pool not in ("avg", "max"):
            raise UserError(f"snapkv: pool={self.pool!r}: choose avg or max")

    def bind(self, host: Host) -> _SnapKV:
        return _SnapKV(self, host.model.config.attention)


Pieces = list[tuple[Tensor, Tensor]]  # rotated queries of consecutive prompt rows: positions [r], q [r, hq, D]


class _SnapKV:
    """A request's drawer holds the queries of its prompt's last rows by layer, until they have voted."""

    def __init__(self, knobs: SnapKV, attention: tuple[AttentionSpec, ...]) -> None:
        self.knobs, self.attention = knobs, attention
        self.observes = knobs.window

    def looks(self, span: Span) -> bool:
        request = span.request
        return request.prefilling and span.positions[-1] >= request.prompt_len - self.observes

    def observe(self, read: Read) -> None:
        request = read.span.request
        first = request.prompt_len - self.observes
        if not self.looks(read.span):
            return
        positions = read.q_positions
        new = (positions >= first) & (positions < request.prompt_len)
        if not bool(new.any()):
            return
        drawer: dict[int, Pieces] = request.state.setdefault("snapkv", {})
        start = int(positions.min())  # rows may come again: after a failed step, or denoised in several
        before = [(p[p < start], q[p < start]) for p, q in drawer.get(read.layer, [])]
        drawer[read.layer] = [*before, (positions[new], read.q[new])]

    def view(self, read: Read) -> View | None:
        return None

    def due(self, request: Request) -> bool:
        return not request.prefilling and bool(request.state.get("snapkv"))

    def keep(self, request: Request, layer: int) -> Tensor | None:
        assert request.kv is not None
        parts = request.kv.layers[layer].read()
        pieces: Pieces = request.state["snapkv"].pop(layer, [])
        if not pieces or not parts or self.capacity(request.prompt_len) >= request.prompt_len:
            return None
        part = parts[0]  # heads are together until now
        older = int((part.positions < request.prompt_len - self.observes).sum())
        votes = self.votes(pieces, part, layer)[:, :older]  # [H, L - w]
        if self.knobs.kernel > 1:
            pool = F.avg_pool1d if self.knobs.pool == "avg" else F.max_pool1d
            votes = pool(votes[:, None], self.knobs.kernel, 1, self.knobs.kernel // 2)[:, 0]
        return retain(votes, self.capacity(request.prompt_len) - self.observes, part.n - older)

    def capacity(self, prompt: int) -> int:
        """Rows per head that stay of a prompt."""
        keep = self.knobs.keep
        return max(int(keep * prompt) if keep <= 1 else int(keep), self.observes)

    def votes(self, pieces: Pieces, part: Part, layer: int) -> Tensor:
        """Attention that each row gets from the observed queries, float32 [H, n]; head by head, to save memory."""
        spec = self.attention[layer]
        at, q = (torch.cat(each) for each in zip(*pieces))
        distance = at[:, None] - part.positions  # [w, n]
        hidden = distance < 0
        if spec.window is not None:
            hidden |= distance >= spec.window
        heads, group = part.size[0], q.shape[1] // part.size[0]
        votes = []
        for head in range(heads):
            mine = q[:, head * group : (head + 1) * group]
            logits = scores(mine, part.k[head : head + 1], spec.scale, spec.softcap)[0]  # [G, w, n]
            votes.append(logits.masked_fill_(hidden, float("-inf")).softmax(-1).sum(1).mean(0))
        return torch.stack(votes)
