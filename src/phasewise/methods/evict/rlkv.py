"""Heads that matter for the answer keep every row, the others some first ones and a window (RLKV, arXiv 2510.08525).

Promises dense prompts, and after them that just the share `share` of all KV heads sees and holds `sinks` + `window`
rows of a text (and up to 31 that lie idle), while the others hold all. Which heads these are was learned by reward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.kv.format import KVShape
from phasewise.methods.evict._windows import Dropping, check
from phasewise.model.artefacts import Artefact
from phasewise.model.config import ModelConfig
from phasewise.request.request import Request
from phasewise.step.plan import EVERYTHING, AttentionPlan, Window
from phasewise.step.span import Span
from phasewise.verbs.evict import Evict
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class RLKV(Method):
    """Of all KV heads of the model, the `share` with the lowest gates is cut; layers may have any number of them. Rows
    keep their rotations and positions.

    `weights`: `auto` (gates that were trained for this model), a file, or `random:SEED`. Gates are trained by
    reinforcement (train/artefacts/evict_rlkv.py): the model samples answers with every head's output mixed of full and
    of local attention, right ones are rewarded, and a penalty draws gates to 0 as long as enough answers are right.
    They are trained with the default sinks and window, whichever are asked for here.

    Tokens are whole native steps over heads of unequal length. Left out: the paper's permutation of heads, which two
    kernels need and slabs do not, and its mathematics: gates are learned from recall and pass keys.
    """

    share: float = 0.5
    sinks: int = 16
    window: int = 64
    weights: str = "auto"

    paper: ClassVar[str] = "arXiv 2510.08525"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "trained"
    neutral: ClassVar[dict[str, object]] = {"share": 0.0}
    tight: ClassVar[dict[str, object]] = {"share": 0.6, "sinks": 2, "window": 8}
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({"share": 0.25}, {}, {"share": 0.75})

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise UserError(f"rlkv: share={self.share} must lie in [0, 1]: of all KV heads, those that are cut")
        check("rlkv", self.sinks, self.window)

    def artefact(self, config: ModelConfig) -> Artefact:
        """A gate by layer and KV head: the higher, the more answers hang on all its rows."""
        shape = (config.layers, config.kv_heads)
        return Artefact("evict.rlkv", {"gates": shape}, without="say share=0 to keep everything")

    def cut(self, gates: Tensor) -> Tensor:
        """Which heads are cut: bool [layers, H]. Of equal gates the earlier."""
        order = gates.float().flatten().sort(stable=True).indices
        cut = torch.zeros(gates.numel(), dtype=torch.bool)
        cut[order[: round(self.share * gates.numel())]] = True
        return cut.view(gates.shape)

    @property
    def traits(self) -> Traits:
        return Traits("evict", frees_rows=self.share > 0)

    def bind(self, host: Host) -> CutHeads | None:
        if self.share == 0:
            return None
        gates = host.artefact(self.artefact(host.model.config), self.weights)["gates"]
        return CutHeads(self.cut(gates).to(host.model.device), Window(self.sinks, self.window))


class CutHeads(Evict):
    """The heads `cut` [layers, H] see sinks and window, once the prompt is complete."""

    def __init__(self, cut: Tensor, window: Window) -> None:
        self.cut, self.some = cut, cut.any(1).tolist()
        self.window = replace(window, heads=tuple(map(tuple, cut.tolist())), prompts=False)
        self._plan, self.dropping = AttentionPlan(window=self.window), Dropping("rlkv", self.window)

    def plan(self, span: Span) -> AttentionPlan:
        return self._plan if any(self.some) and self.window.hides(span) else EVERYTHING

    def due(self, request: Request) -> bool:
        return not request.prefilling and self.dropping.due(request)

    def keep(self, request: Request, layer: int) -> Tensor | list[Tensor] | None:
        assert request.kv is not None
        assert self.window.heads is not None
        parts, cut = request.kv.layers[layer].read(), self.window.heads[layer]
        stay: dict[int, Tensor] = {}
        for part in parts:
            heads, rows = part.size
            mine = range(heads) if part.heads is None else part.heads.tolist()
            positions = part.positions.expand(heads, -1)
            for head, own in zip(mine, positions):
                near = self.dropping.drop(request, own)  # noted for all layers, whether they have such heads or not
                stay[head] = near if cut[head] else torch.arange(rows, device=own.device)
        if not stay or not any(cut):
            return None
        return [stay[head] for head in sorted(stay)]

    def places(self, layer: int, shape: KVShape) -> int:
        return shape.heads if self.some[layer] else 0
