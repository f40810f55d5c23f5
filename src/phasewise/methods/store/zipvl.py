"""A prompt's layers attend to important tokens alone, and keep the others in fewer bits (ZipVL, arXiv 2410.08584).

This is the paper's first version. It promises that prompts are computed as by `evict.zipvl`, that of each layer all
important tokens in full blocks are kept in `high` bits, however many the prompt has, and the others in `low`, and that
no row is given up. What rows become is ZipCache's work, as in the paper. Left out: images.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.kv.drawers import Room
from phasewise.kv.format import KVShape, Raw, RowFormat
from phasewise.methods.evict.zipvl import Zipped, ZipVL
from phasewise.methods.store._classed import IMPORTANT, FittedClasses
from phasewise.methods.store._saliency import BlockSaliency
from phasewise.model.config import ModelConfig
from phasewise.ops.native.weighed import Weighs
from phasewise.request.request import Request
from phasewise.step.plan import EVERYTHING, AttentionPlan, Record
from phasewise.step.read import Read
from phasewise.step.span import Span
from phasewise.verbs.attend import Attend
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.store import Storing
from phasewise.verbs.traits import Traits

MARKS, BLOCK = "zipvl", "zipvl block"  # drawers: of a prompt's slots; of the rows of the last block that is full


@dataclass(frozen=True)
class MixedZipVL(Method, Storing):
    """Important tokens are found, and prompts computed, as by `evict.zipvl`: `tau`, `window`, `probes`, `seed` and
    `queries` are its knobs.

    Rows are packed `gap` at a time: keys are rounded channel by channel, values row by row with their channels brought
    to one scale, as by `store.zipcache`. How many rows of a block have `high` bits is settled in each layer when the
    prompt is complete: as many as its important tokens need. Blocks that fill later have as many, chosen by the
    attention of their last row. Where so few rows would have `low` bits that a second class takes more than it saves,
    all have `high`. Room for rows is booked as if all had, and what is not needed is given back with the first block.
    16 bits for both = rows as they are.
    """

    tau: float = 0.975
    window: int = 32
    probes: int = 32
    seed: int = 0
    queries: Literal["important", "all"] = "important"
    high: Literal[4, 8, 16] = 4
    low: Literal[2, 4, 16] = 2
    gap: int = 100

    paper: ClassVar[str] = "arXiv 2410.08584"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {"tau": 1.0, "high": 16, "low": 16}
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({"high": 8}, {}, {"tau": 0.9})
    tight: ClassVar[dict[str, object]] = {"tau": 0.5, "window": 4, "probes": 4, "gap": 16, "high": 8}

    def __post_init__(self) -> None:
        if (self.high == 16) != (self.low == 16) or self.low > self.high:
            raise UserError(
                f"zipvl: high={self.high} and low={self.low}: choose high at least as large as low, and 16 for both or "
                "for neither (rows as they are)"
            )
        if self.gap < 1:
            raise UserError(f"zipvl: gap={self.gap} must be at least 1 (rows that are packed together)")
        self.important  # noqa: B018 (its own knobs are checked)

    @property
    def important(self) -> ZipVL:
        """How prompts are computed."""
        return ZipVL(self.tau, self.window, self.probes, self.seed, self.queries)

    @property
    def raw(self) -> bool:
        return self.high == 16

    def format(self) -> RowFormat:
        return Raw() if self.raw else FittedClasses(self.high, self.low, self.gap, self.gap, True)

    @property
    def traits(self) -> Traits:
        return Traits(
            "store", fills=("attend", "evict"), own_attention=True, whole_prompts=True, shares_prefix=False,
            packs_blocks=not self.raw, ranks_rows=not self.raw,
        )  # fmt: skip

    def bind(self, host: Host) -> Mixed:
        return Mixed(self, host.model.config, Marking(self.important, host.model.config.attention))


class Marking(Zipped):
    """Computes prompts. A request's drawer holds by layer how much each row matters, float32 [n], from the layer's
    attention until the rows are packed."""

    def noted(self, read: Read, stay: Tensor | None, normalised: Tensor) -> Tensor:
        marks = normalised / read.q.shape[1]
        marks[slice(None) if stay is None else stay] += IMPORTANT
        return marks


class Mixed(Attend, BlockSaliency):
    """Attend and evict beside the store: how prompts are computed, and how much rows matter."""

    def __init__(self, knobs: MixedZipVL, config: ModelConfig, prompts: Marking) -> None:
        super().__init__(BLOCK, knobs.gap, config)
        self.knobs, self.prompts = knobs, prompts
        self._later = AttentionPlan(record=Record(self.note_lasts, self.weigh))

    def drawer(self, layer: int, shape: KVShape, room: Room) -> int:
        return 0 if self.knobs.raw and self.knobs.tau == 1 else 4 * max(room.rows, self.knobs.gap)

    def plan(self, span: Span) -> AttentionPlan:
        if span.request.prefilling:
            return self.prompts.plan(span)
        return EVERYTHING if self.knobs.raw or not self.lasts(span) else self._later

    def weigh(self, span: Span) -> Weighs | None:
        return self.weighs_last(span)

    def after_prompt(self, request: Request) -> bool:
        return bool(request.state.pop(MARKS, None))

    def saliency(self, request: Request, layer: int, start: int, stop: int) -> Tensor:
        if stop > request.prompt_len:
            later: Tensor = request.state[BLOCK][layer]
            return later
        marks: Tensor | None = request.state.get(MARKS, {}).get(layer)
        return torch.full((stop - start,), IMPORTANT) if marks is None else marks[start:stop]
