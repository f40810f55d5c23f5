"""Rows read a window and blocks at distances of powers of two, trained for it (PowerAttention, arXiv 2503.03588).

Promises that a row reads O(log n) blocks of the n before it and no other, and that in d layers it can hear of every row
less than 2^d blocks away: a distance takes as many hops as it has ones in binary. Nothing is chosen by content, so it
needs weights that were trained under this very mask, low-rank ones beside the model's own, with which prompts and
answers run. The cache stays whole: an old block is seen again whenever its distance becomes a power of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.methods.attend._select import single
from phasewise.methods.attend.dense import Dense
from phasewise.model.artefacts import Artefact
from phasewise.model.config import ModelConfig
from phasewise.model.lowrank import Delta, shapes
from phasewise.step.plan import EVERYTHING, AttentionPlan, Custom
from phasewise.step.read import Read
from phasewise.step.reads import attend_listed
from phasewise.step.span import Span
from phasewise.verbs.host import Host

RANK = 16  # of the low-rank weights of every linear layer


@dataclass(frozen=True)
class Power:
    """Positions count in blocks of `block`. A row in block i sees block j, up to its own place, if j is one of the
    first `sinks`, or i - j is below `window` (its own block and those before it) or a power of two; so in prompts too.

    Rows that an evict method shows at another place, as streaming does with its sinks, are read in any case. `weights`:
    `auto` (trained for this model and these knobs; beside the model, or shipped), a file, `random:SEED` (to test with),
    or `none`: the mask without the training, which is the control. Single rows and small drafts read their blocks
    alone; a slice of a prompt reads all rows once, under the mask, and kernels pass over blocks that none of a few
    neighbouring rows sees.
    """

    block: int = 32
    window: int = 4
    sinks: int = 1
    weights: str = "auto"

    paper: ClassVar[str] = "arXiv 2503.03588"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "trained"
    neutral: ClassVar[dict[str, object]] = {"window": 1 << 30}
    untrained: ClassVar[dict[str, object]] = {"weights": "none"}
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({}, {"weights": "none"})
    tight: ClassVar[dict[str, object]] = {"block": 2, "window": 1, "sinks": 1}
    phases: ClassVar[tuple[str, ...]] = ("prefill", "decode")

    def __post_init__(self) -> None:
        for name, least in (("block", 1), ("window", 1), ("sinks", 0)):
            if getattr(self, name) < least:
                raise UserError(f"power: {name}={getattr(self, name)} must be at least {least}")

    @property
    def clear(self) -> int:
        """How many rows from the first on see all before them."""
        distance = self.window  # the nearest that is hidden: then the block there is none of the first
        while distance & (distance - 1) == 0:
            distance += 1
        return (distance + self.sinks) * self.block

    def seen(self, at: Tensor, rows: Tensor) -> Tensor:
        """Whether the position `at` sees that of `rows`, which is not behind it; bool, broadcast."""
        block = rows // self.block
        distance = at // self.block - block
        return (block < self.sinks) | (distance < self.window) | (distance & (distance - 1) == 0)

    def blocks(self, own: int) -> list[int]:
        """The blocks that a row in block `own` sees, increasing."""
        far = {own - (1 << power) for power in range(own.bit_length())}
        return sorted(far | {*range(min(self.sinks, own + 1)), *range(max(0, own - self.window + 1), own + 1)})

    def acts(self, config: ModelConfig) -> bool:
        """Whether it hides anything within the model's context."""
        return self.clear < config.max_positions

    def artefact(self, config: ModelConfig) -> Artefact:
        """Low-rank weights of all layers."""
        knobs = {"block": self.block, "window": self.window, "sinks": self.sinks}
        tensors = shapes(config, range(config.layers), RANK)
        return Artefact("attend.power", tensors, knobs, "say weights=none for the mask without the training")

    def bind(self, host: Host) -> _Power | Dense:
        config = host.model.config
        if not self.acts(config):
            return Dense()  # everything is seen: that is the model itself
        if self.weights == "none":
            return _Power(self, None)
        tensors = host.artefact(self.artefact(config), self.weights)
        return _Power(self, Delta(tensors, host.model.dtype, host.model.device))


class _Power:
    def __init__(self, knobs: Power, delta: Delta | None) -> None:
        self.knobs, self.clear, self.delta = knobs, knobs.clear, delta
        self._plan = AttentionPlan(Custom(self.attend))

    def plan(self, span: Span) -> AttentionPlan:
        return self._plan if self._hides(span) else EVERYTHING

    def _hides(self, span: Span) -> bool:
        return span.last >= self.clear

    def attend(self, reads: Sequence[Read]) -> list[Tensor | None]:
        out: list[Tensor | None] = [None] * len(reads)
        lists: dict[int, Tensor] = {}
        for i, read in enumerate(reads):
            if not self._hides(read.span):
                continue
            if single(read):
                lists[i] = self._listing(read).expand(read.part.size[0], -1, -1)
            else:
                out[i] = read.attend(self._select(read))
        if lists:
            for i, result in zip(lists, attend_listed([reads[i] for i in lists], [*lists.values()])):
                out[i] = result
        return out

    def _listing(self, read: Read) -> Tensor:
        """The slots that a single row reads, int32 [1, 1, S], increasing; the same in all layers."""
        size, at = self.knobs.block, read.span.positions[0]
        key = self, at
        if key not in read.step.notes:
            blocks = torch.tensor(self.knobs.blocks(at // size), dtype=torch.int32, device=read.q.device)
            slots = (blocks[:, None] * size + torch.arange(size, dtype=torch.int32, device=read.q.device)).flatten()
            read.step.notes[key] = slots[: len(slots) - size + at % size + 1][None, None]  # the last block is its own
        found: Tensor = read.step.notes[key]
        return found

    def _select(self, read: Read) -> Tensor:
        """What every row reads of what it sees, bool [1 | h, R, N]: the same in all layers, if slots are positions."""
        if read.part.plain and read.rows is None and read.view is None:
            key = self, id(read.span), read.part.size[1]
            if key not in read.step.notes:
                read.step.notes[key] = self._mask(read)
            noted: Tensor = read.step.notes[key]
            return noted
        select = self._mask(read)
        if read.view is not None and read.view.moved is not None:
            slots, delta = read.view.moved
            select[:, :, slots] |= (delta != 0)[:, None]
        return select

    def _mask(self, read: Read) -> Tensor:
        """`seen`, worked out block by block: of a long prompt, numbers for every pair of rows would fill the memory."""
        size = self.knobs.block
        own, others = read.q_positions // size, read.part.positions // size  # [R], [1 | h, N]
        blocks = torch.arange(int(max(own.max(), others.max())) + 1, device=own.device)
        near = self.knobs.seen(own[:, None] * size, blocks * size)  # [R, B]
        return torch.stack([near.index_select(1, each) for each in others])
