"""Rows read a window and blocks at distances of powers of two, trained for it (PowerAttention, arXiv 2503.03588).

Promises that a row reads O(log n) blocks of the n before it and no other, and that in d layers it can hear of every row
less than 2^d blocks away: a distance takes as many hops as it has ones in binary. Nothing is chosen by content, so it
needs weights that were trained under this very mask, low-rank ones beside the model's own, with which prompts and
answers run. The cache stays whole: an old block is seen again whenever its distance becomes a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from phasewise.errors import UserError
from phasewise.methods.attend.dense import Dense
from phasewise.model.artefacts import Artefact
from phasewise.model.config import ModelConfig
from phasewise.model.lowrank import Delta, shapes
from phasewise.step.plan import EVERYTHING, AttentionPlan, ReadBlocks
from phasewise.step.span import Span
from phasewise.verbs.attend import Attend
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits

RANK = 16  # of the low-rank weights of every linear layer


@dataclass(frozen=True)
class Power(Method):
    """Positions count in blocks of `block`. A row in block i sees block j, up to its own place, if j is one of the
    first `sinks`, or i - j is below `window` (its own block and those before it) or a power of two; so in prompts too.
    With `far=none` it sees no powers of two, but sinks and window alone: the static mask that the paper compares with.

    Rows that an evict method shows at another place, as streaming does with its sinks, are read in any case. `weights`:
    `auto` (trained for this model and these knobs; beside the model, or shipped), a file, `random:SEED` (to test with),
    or `none`: the mask without the training, which is the control. Single rows and small drafts read their blocks
    alone; a slice of a prompt reads all rows once, under the mask, and kernels pass over blocks that none of a few
    neighbouring rows sees.
    """

    block: int = 32
    window: int = 4
    sinks: int = 1
    far: Literal["powers", "none"] = "powers"
    weights: str = "auto"

    paper: ClassVar[str] = "arXiv 2503.03588"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "trained"
    neutral: ClassVar[dict[str, object]] = {"window": 1 << 30}
    untrained: ClassVar[dict[str, object]] = {"weights": "none"}
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({}, {"weights": "none"})
    tight: ClassVar[dict[str, object]] = {"block": 2, "window": 1, "sinks": 1}

    def __post_init__(self) -> None:
        for name, least in (("block", 1), ("window", 1), ("sinks", 0)):
            if getattr(self, name) < least:
                raise UserError(f"power: {name}={getattr(self, name)} must be at least {least}")

    @property
    def clear(self) -> int:
        """How many rows from the first on see all before them."""
        distance = self.window  # the nearest that is hidden: then the block there is none of the first
        while self.far == "powers" and distance & (distance - 1) == 0:
            distance += 1
        return (distance + self.sinks) * self.block

    def seen(self, at: Tensor, rows: Tensor) -> Tensor:
        """Whether the position `at` sees that of `rows`, which is not behind it; bool, broadcast."""
        block = rows // self.block
        distance = at // self.block - block
        near = (block < self.sinks) | (distance < self.window)
        return near | (distance & (distance - 1) == 0) if self.far == "powers" else near

    def blocks(self, own: int) -> list[int]:
        """The blocks that a row in block `own` sees, increasing."""
        far = {own - (1 << power) for power in range(own.bit_length())} if self.far == "powers" else set[int]()
        return sorted(far | {*range(min(self.sinks, own + 1)), *range(max(0, own - self.window + 1), own + 1)})

    def acts(self, config: ModelConfig) -> bool:
        """Whether it hides anything within the model's context."""
        return self.clear < config.max_positions

    def artefact(self, config: ModelConfig) -> Artefact:
        """Low-rank weights of all layers."""
        knobs: dict[str, int | str] = {"block": self.block, "window": self.window, "sinks": self.sinks}
        if self.far != "powers":  # files of the usual mask do not name it
            knobs["far"] = self.far
        tensors = shapes(config, range(config.layers), RANK)
        return Artefact("attend.power", tensors, knobs, "say weights=none for the mask without the training")

    @property
    def traits(self) -> Traits:
        return Traits("attend", own_attention=True, low_rank=self.weights != "none")

    def bind(self, host: Host) -> _Power | Dense:
        config = host.model.config
        if not self.acts(config):
            return Dense()  # everything is seen: that is the model itself
        if self.weights == "none":
            return _Power(self, None)
        tensors = host.artefact(self.artefact(config), self.weights)
        return _Power(self, Delta(tensors, host.model.dtype, host.model.device))


class _Power(Attend):
    def __init__(self, knobs: Power, delta: Delta | None) -> None:
        self.clear, self.delta = knobs.clear, delta
        self._plan = AttentionPlan(ReadBlocks(knobs.block, knobs.blocks))

    def plan(self, span: Span) -> AttentionPlan:
        return self._plan if span.last >= self.clear else EVERYTHING
