"""The end of a prompt votes on which of its rows stay, per head (SnapKV, arXiv 2404.14469).

Promises exactly the kept number of rows per head once the prompt is complete, each with its true position, and nothing
evicted after. A question that comes later may find its rows gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from phasewise.errors import UserError
from phasewise.kv.drawers import Room
from phasewise.kv.format import KVShape
from phasewise.methods._amounts import check_amount
from phasewise.methods.evict._allot import Heads, Layers, Spread, allot
from phasewise.request.request import Request
from phasewise.step.plan import EVERYTHING, AttentionPlan, Record
from phasewise.step.read import Read
from phasewise.step.span import Span
from phasewise.step.trail import Trail
from phasewise.verbs.evict import Evict
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class SnapKV(Method):
    """The attention of the last `window` prompt rows, summed over them, averaged over the query heads of a KV head and
    pooled over `kernel` neighbours, ranks the rows before them; the best stay, and the window itself.

    `keep` up to 1 is a share of the prompt, above 1 a number of rows; the window is never cut. Votes are kept across
    chunks, so chunked prompts and prefix hits choose the same rows. `keep` is a mean: with layers "pyramid" early
    layers keep more and late ones less (PyramidKV, arXiv 2406.02069; `beta` says how steeply), with heads "ada" the
    heads of a layer compete for its rows, of which `least` are shared out evenly (AdaKV, arXiv 2407.11550). Left out:
    compressing again while decoding.
    """

    keep: float = 0.25
    window: int = 32
    kernel: int = 5
    pool: Literal["avg", "max"] = "avg"
    layers: Layers = "uniform"
    heads: Heads = "uniform"
    beta: float = 20.0
    least: float = 0.2

    paper: ClassVar[str] = "arXiv 2404.14469"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {"keep": 1.0}
    # what stays is read like any other KV
    traits: ClassVar[Traits] = Traits("evict", frees_rows=True, phases=("prefill",))
    tight: ClassVar[dict[str, object]] = {"keep": 6.0, "window": 4}
    budgets: ClassVar[tuple[dict[str, object], ...]] = (
        {"keep": 0.5}, {"keep": 0.25}, {"keep": 0.125},
        {"keep": 0.25, "layers": "pyramid"}, {"keep": 0.125, "layers": "pyramid"},
        {"keep": 0.25, "heads": "ada"}, {"keep": 0.125, "heads": "ada"},
    )  # fmt: skip

    def __post_init__(self) -> None:
        if not self.keep > 0:
            raise UserError(
                f"snapkv: keep={self.keep} must be above 0: a share of the prompt up to 1, or a number of rows"
            )
        check_amount("snapkv", "keep", self.keep)
        if self.window < 1:
            raise UserError(f"snapkv: window={self.window} must be at least 1: somebody has to vote")
        if self.kernel < 1 or self.kernel % 2 == 0:
            fix = max(1, self.kernel + 1)
            raise UserError(f"snapkv: kernel={self.kernel} must be odd and at least 1: choose {fix}")
        if self.pool not in ("avg", "max"):
            raise UserError(f"snapkv: pool={self.pool!r}: choose avg or max")
        self.spread.check("snapkv")

    @property
    def spread(self) -> Spread:
        return Spread(self.layers, self.heads, self.beta, self.least)

    def bind(self, host: Host) -> _SnapKV:
        return _SnapKV(self, host.model.config.layers)


class _SnapKV(Evict):
    """A request's drawer holds the votes that its prompt's rows have got by layer, until the prompt is complete."""

    def __init__(self, knobs: SnapKV, layers: int) -> None:
        self.knobs, self.layers, self.spread = knobs, layers, knobs.spread
        self.observes = knobs.window
        self.trail = Trail("snapkv")
        self.stayed = self.trail.stayed
        self._plan = AttentionPlan(record=Record(self._vote))

    def drawer(self, layer: int, shape: KVShape, room: Room) -> int:
        """Votes."""
        return 4 * shape.heads * room.rows if room.prompt and self.capacity(room.rows) < room.rows else 0

    def plan(self, span: Span) -> AttentionPlan:
        request, length = span.request, span.request.prompt_len
        votes = span.positions[-1] >= length - self.observes and self.capacity(length) < length
        return self._plan if request.prefilling and votes else EVERYTHING

    def _vote(self, read: Read) -> None:
        length, positions = read.span.request.prompt_len, read.q_positions
        before, upto = int((positions < length - self.observes).sum()), int((positions < length).sum())
        self.trail.add(read, range(before, upto))

    def due(self, request: Request) -> bool:
        return not request.prefilling and bool(self.trail.layers(request))

    def keep(self, request: Request, layer: int) -> Tensor | list[Tensor] | None:
        assert request.kv is not None
        votes, parts = self.trail.drop(request, layer), request.kv.layers[layer].read()
        if votes is None or not parts:
            return None
        assert isinstance(votes, Tensor)
        length, part = request.prompt_len, parts[0]  # heads are together until now
        older = int((part.positions < length - self.observes).sum())
        ranked = votes[:, :older]  # [H, L - w]
        if self.knobs.kernel > 1:
            pool = F.avg_pool1d if self.knobs.pool == "avg" else F.max_pool1d
            ranked = pool(ranked[:, None], self.knobs.kernel, 1, self.knobs.kernel // 2)[:, 0]
        rows = self.spread.of(self.capacity(length) - self.observes, length - self.observes, layer, self.layers)
        return allot(ranked, rows, part.n - older, self.spread)

    def capacity(self, prompt: int) -> int:
        """Rows per head that stay of a prompt, on average."""
        keep = self.knobs.keep
        return max(int(keep * prompt) if keep <= 1 else int(keep), self.observes)
