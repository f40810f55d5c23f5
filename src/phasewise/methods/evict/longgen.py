"""A third of the layers keeps everything, the others sinks and a window, trained for it (LongGen, arXiv 2410.01485).

Promises that a layer which is not full holds `sinks` + `window` rows, however long the text, and that every row of a
prompt saw no more there than a row of the answer would. Another architecture than the model's: it needs weights that
were trained under this very mask, low-rank ones beside the model's own, with which prompts and answers run.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

from torch import Tensor

from phasewise.errors import UserError
from phasewise.kv.format import KVShape
from phasewise.methods.evict._windows import Dropping
from phasewise.model.artefacts import Artefact
from phasewise.model.config import ModelConfig
from phasewise.model.lowrank import Delta, shapes
from phasewise.request.request import Request
from phasewise.step.plan import EVERYTHING, AttentionPlan, Window
from phasewise.step.span import Span
from phasewise.verbs.evict import Evict
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits

RANK = 16  # of the low-rank weights of every linear layer
Full = Literal["middle", "ends", "none"]


@dataclass(frozen=True)
class LongGen(Method):
    """The `full` third of the layers, in the middle, reads and keeps everything. In the others a row at position t sees
    the first `sinks` rows and the last `window` ones, itself included; with a `stride` above 0 also every stride-th
    block of `block` rows, counted from the first (the paper's second kind). What none of them will see again is freed.

    full "ends" (as many layers, half of them first, half of them last) and "none" are what the middle is held against.
    All rows keep their place in the text, so texts end with the model's context. `weights`: `auto` (trained for this
    model and these knobs; beside the model, or shipped), a file, `random:SEED` (to test with), or `none`: the mask
    without the training, which is the control. Left out: a bound on what a request may need before its prompt is
    there; the room for its rows is that of a full cache until they are given up.
    """

    sinks: int = 4
    window: int = 252
    stride: int = 0
    block: int = 32
    full: Full = "middle"
    weights: str = "auto"

    paper: ClassVar[str] = "arXiv 2410.01485"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "trained"
    neutral: ClassVar[dict[str, object]] = {"window": 1 << 30}
    untrained: ClassVar[dict[str, object]] = {"weights": "none"}
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({}, {"weights": "none"})
    tight: ClassVar[dict[str, object]] = {"sinks": 2, "window": 10}

    def __post_init__(self) -> None:
        for name, least in (("sinks", 0), ("window", 1), ("stride", 0), ("block", 1)):
            if getattr(self, name) < least:
                raise UserError(f"longgen: {name}={getattr(self, name)} must be at least {least}")
        if self.full not in get_args(Full):
            raise UserError(f"longgen: full={self.full!r}: choose {', '.join(get_args(Full))}")

    @property
    def seen(self) -> Window:
        return Window(self.sinks, self.window, self.stride, self.block)

    def narrow(self, config: ModelConfig) -> tuple[int, ...]:
        """The layers that do not keep everything, increasing; none where the window holds the model's whole context."""
        if self.seen.rows >= config.max_positions or self.stride == 1:
            return ()
        full = set(full_layers(config.layers, self.full))
        return tuple(layer for layer in range(config.layers) if layer not in full)

    def artefact(self, config: ModelConfig) -> Artefact:
        """Low-rank weights of all layers."""
        knobs: dict[str, int | float | str] = {"sinks": self.sinks, "window": self.window, "full": self.full}
        knobs |= {"stride": self.stride, "block": self.block} if self.stride else {}
        tensors = shapes(config, range(config.layers), RANK)
        return Artefact("evict.longgen", tensors, knobs, "say weights=none for the mask without the training")

    @property
    def traits(self) -> Traits:
        return Traits("evict", frees_rows=True, low_rank=self.weights != "none")

    def bind(self, host: Host) -> _LongGen | None:
        config = host.model.config
        narrow = self.narrow(config)
        if not narrow:
            return None  # everything is seen: that is the model itself
        heads = tuple((layer in narrow,) * config.kv_heads for layer in range(config.layers))
        window = replace(self.seen, heads=heads)
        if self.weights == "none":
            return _LongGen(window, narrow, None)
        tensors = host.artefact(self.artefact(config), self.weights)
        return _LongGen(window, narrow, Delta(tensors, host.model.dtype, host.model.device))


class _LongGen(Evict):
    def __init__(self, window: Window, narrow: Collection[int], delta: Delta | None) -> None:
        self.window, self.narrow, self.delta = window, frozenset(narrow), delta
        self._plan, self.dropping = AttentionPlan(window=window), Dropping("longgen", window)

    def plan(self, span: Span) -> AttentionPlan:
        return self._plan if self.window.hides(span) else EVERYTHING

    def due(self, request: Request) -> bool:
        return self.dropping.due(request)

    def keep(self, request: Request, layer: int) -> Tensor | None:
        return self.dropping.keep(request, layer) if layer in self.narrow else None

    def places(self, layer: int, shape: KVShape) -> int:
        return int(layer in self.narrow)


def full_layers(layers: int, where: Full) -> list[int]:
    """A third of so many, rounded, and one at least: in the middle, or half of them first and the others last."""
    count = max(1, round(layers / 3))
    if where == "none":
        return []
    if where == "middle":
        first = (layers - count) // 2
        return list(range(first, first + count))
    early = (count + 1) // 2
    return [*range(early), *range(layers - count + early, layers)]
