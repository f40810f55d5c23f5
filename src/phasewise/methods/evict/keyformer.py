"""H2O with doubt: noisy, tempered weights add up to scores, and recent rows stay (Keyformer, arXiv 2403.09054).

Promises dense attention's results until `keep` rows are there, and fewer than `lot` more afterwards, per KV head. Equal
seeds give equal rows, in any batch. What has left is gone: a later question may find its rows missing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.methods._amounts import check_amount
from phasewise.methods.evict._allot import Heads, Layers, Spread
from phasewise.methods.evict._noise import gumbel
from phasewise.methods.evict._running import KeptBudget, Running, Way, check_lot, share
from phasewise.ops.native.received import Shaping
from phasewise.ops.native.weighed import Doubt
from phasewise.step.probe import Shaped
from phasewise.step.read import Read
from phasewise.step.span import Span
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class Keyformer(Method):
    """A row's score is what all queries have given it of softmax((logits + noise) / temperature), Gumbel(0, 1) noise of
    each (query row, key, query head) and layer its own, added over the query heads of a KV head. Attention itself has
    neither. The temperature is `tau` in the prompt and `tau` + j * `tau_step` for the j-th row after it. Of `keep` rows
    the share `recent` are the last ones; of the others the lowest leaves, when the prompt is complete and after every
    further row.

    `keep` up to 1 is a share of the prompt, above 1 a number of rows. Noise of rows after the prompt hangs on the
    request's seed, that of prompts on `seed`, so that samples of one prompt can share it. Without noise, at `tau` 1 and
    `tau_step` 0, this is `h2o`; `layers`, `heads`, `beta`, `least`, `mean` and `lot` are as there. The price
    is a random number for every query row, key and query head, in every layer, and for a prompt a second product of its
    queries and keys; later rows read keys once where native steps tell what a token attends to (docs/methods.md,
    `weigh`). A prompt's rows are of use to nobody else.
    """

    keep: float = 0.6
    recent: float = 0.3
    tau: float = 1.0
    tau_step: float = 0.01
    noise: bool = True
    seed: int = 0
    mean: bool = False
    lot: int = 32
    layers: Layers = "uniform"
    heads: Heads = "uniform"
    beta: float = 20.0
    least: float = 0.2

    paper: ClassVar[str] = "arXiv 2403.09054"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {"keep": float(1 << 30)}
    traits: ClassVar[Traits] = Traits("evict", frees_rows=True, shares_prefix=False)
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({}, {"keep": 0.3, "recent": 0.15})
    tight: ClassVar[dict[str, object]] = {"keep": 9.0, "lot": 4}

    def __post_init__(self) -> None:
        if not self.keep > 0:
            raise UserError(
                f"keyformer: keep={self.keep} must be above 0: a share of the prompt up to 1, or a number of rows"
            )
        check_amount("keyformer", "keep", self.keep)
        if not 0 <= self.recent <= 1:
            raise UserError(f"keyformer: recent={self.recent} must lie in [0, 1]: a share of the rows that are kept")
        if not (0 < self.tau < math.inf and 0 <= self.tau_step < math.inf):
            raise UserError(f"keyformer: tau={self.tau} must be above 0, tau_step={self.tau_step} at least 0")
        check_lot("keyformer", self.lot)
        self.spread.check("keyformer")

    @property
    def spread(self) -> Spread:
        return Spread(self.layers, self.heads, self.beta, self.least)

    def bind(self, host: Host) -> Running:
        plain = not self.noise and self.tau == 1 and self.tau_step == 0
        tempered = Tempered(self)
        shaped = None if plain else Shaped(tempered.logits, tempered.shaping, tempered.doubt)
        way = Way("keyformer", mean=self.mean, lot=self.lot, spread=self.spread, shaped=shaped)
        return Running(way, host.model.config, self._budget)

    def _budget(self, prompt: int) -> KeptBudget:
        rows = max(1, share(self.keep, prompt))
        return KeptBudget(rows, int(self.recent * rows))


class Tempered:
    """Logits with noise, over the temperature of each row."""

    def __init__(self, knobs: Keyformer) -> None:
        self.knobs = knobs

    def logits(self, read: Read, found: Tensor, rows: Sequence[int]) -> Tensor:
        how = self.shaping(read, rows)
        if how.seeds is not None:
            keys = how.keys[:, : found.shape[-1]].long()
            found = found + gumbel(how.seeds, how.rows, keys, how.heads, found.shape[1], how.layer)
        return found * how.inverse[:, None]

    def shaping(self, read: Read, rows: Sequence[int]) -> Shaping:
        request, part, device = read.span.request, read.part, read.q.device
        at = read.q_positions[torch.tensor(list(rows), device=device)]  # [r]
        beyond = (at - request.prompt_len + 1).clamp_min(0)  # 1 for the first row after the prompt
        heads = torch.arange(part.size[0], device=device) if part.heads is None else part.heads
        seeds = torch.where(beyond > 0, _signed(request.params.seed), _signed(self.knobs.seed))
        inverse = 1 / (self.knobs.tau + self.knobs.tau_step * beyond.float())
        return Shaping(inverse, seeds if self.knobs.noise else None, at, part.positions.int(), heads, read.layer)

    def doubt(self, span: Span) -> Doubt:
        request, knobs, one = span.request, self.knobs, np.float32
        beyond = span.positions[0] - request.prompt_len + 1
        inverse = 1 / (one(knobs.tau) + one(knobs.tau_step) * one(beyond))  # the bits of `shaping`
        return Doubt(float(inverse), _signed(request.params.seed) if knobs.noise else None)


def _signed(seed: int) -> int:
    """The 64 bits of a seed as torch has them."""
    return (seed + 2**63) % 2**64 - 2**63
