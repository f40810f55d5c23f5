"""The first token's attention weight is scaled in chosen heads, in prompts and answers alike (arXiv 2505.11739).

Promises dense attention with the weight a0 of position 0 made gamma a0 and all weights of the row divided by their new
sum, and changes nothing else: ratios among other tokens stay. It aims at better answers, not at fewer bytes. Where no
kernel adds ln gamma to the score of that token, it costs a dot product per row and head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.methods.attend.dense import Dense
from phasewise.model.artefacts import Artefact
from phasewise.model.config import ModelConfig
from phasewise.step.bias import FirstBias
from phasewise.step.read import Read
from phasewise.step.reads import attend_lse
from phasewise.verbs.host import Host

MOST = 1e6  # of a factor, either way: float32 holds what comes of it


@dataclass(frozen=True)
class ZeroTuning:
    """With `weights` auto, a file or `random:SEED`, heads and factor are those that were chosen for the model on a
    validation part (train/artefacts/attend_zero_tuning.py); `gamma` above 0 takes the place of the chosen factor in
    these heads. `weights=none`: all heads, by `gamma`. Above 1 a head looks more at the first token and less at
    everything else; 1 is dense attention.

    The first token is the one at position 0 of the request, wherever it lies; heads that have given it up, and rows
    that do not see it, are left as they are. What there is to scale depends on the model (scripts/first_token.py, on
    held-out source): position 0 draws a third of the attention in most layers of SmolLM2, 0.54 in layer 25 of 30, even
    without a BOS token; in the pocket model less than 0.002 in every layer, and 0.004 in the head that gives most. So
    gamma=4 in the heads that it helps lowers the loss of the validation part by 0.0007 nats of 2.9437 there, nothing,
    and by 0.108 of 2.532 on SmolLM2; of new replies by 0.32, while source loses (`phasewise reproduce zero_tuning`).
    What was chosen for these two models ships with them.

    In bfloat16 steps are whole: kernels add ln gamma to the scores of that token on their way (`FirstBias`), and read
    what dense attention reads. Where an evict method acts, or heads keep unequally many rows, steps go in
    halves of layers, and in float32 layer by layer: the outputs of dense attention are then corrected by their
    log-sum-exp, for which the first row is read once more. Left out: gammas that differ by head or task, the choice by
    the entropy of outputs alone.
    """

    gamma: float = 0.0
    weights: str = "auto"

    paper: ClassVar[str] = "arXiv 2505.11739"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "calibration"
    neutral: ClassVar[dict[str, object]] = {"gamma": 1.0}
    untrained: ClassVar[dict[str, object]] = {"gamma": 2.0, "weights": "none"}
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({}, {"gamma": 2.0, "weights": "none"})
    tight: ClassVar[dict[str, object]] = {"gamma": 20.0}
    phases: ClassVar[tuple[str, ...]] = ("prefill", "decode")

    def __post_init__(self) -> None:
        if self.gamma != 0 and not 1 / MOST <= self.gamma <= MOST:
            raise UserError(
                f"zero_tuning: gamma={self.gamma} must lie between {1 / MOST:g} and {MOST:g}: 2 doubles the weight of "
                "the first token. 0 is the factor that was chosen"
            )
        if self.weights == "none" and self.gamma == 0:
            raise UserError("zero_tuning: weights=none knows no factor: say gamma=2, or leave weights out")

    def artefact(self, config: ModelConfig) -> Artefact:
        """ln gamma by layer and query head; 0 where a head is left as it is."""
        shape = (config.layers, config.heads)
        return Artefact("attend.zero_tuning", {"lift": shape}, without="say weights=none,gamma=2 for all heads alike")

    def bind(self, host: Host) -> Any:
        config = host.model.config
        if self.gamma == 1:
            return Dense()
        if self.weights == "none":
            lift = torch.full((config.layers, config.heads), math.log(self.gamma))
        else:
            lift = host.artefact(self.artefact(config), self.weights)["lift"].float()
            if self.gamma:
                lift = torch.where(lift == 0, 0.0, math.log(self.gamma))
        return Tuned(lift.to(host.model.device)) if bool(lift.any()) else Dense()


class Tuned:
    """Attention with `lift` [layers, Hq], ln gamma of every head."""

    def __init__(self, lift: Tensor) -> None:
        self.lift = lift.float()
        self.bias = FirstBias(self.lift)
        self.more = self.lift.expm1()  # gamma - 1
        self.touched = self.lift.any(1).tolist()

    def __call__(self, reads: Sequence[Read]) -> list[Tensor | None]:
        if not self.touched[reads[0].layer]:
            return [None] * len(reads)
        able = [i for i, read in enumerate(reads) if bool(_held(read).any())]
        out: list[Tensor | None] = [None] * len(reads)
        if able:
            for i, (rows, lse) in zip(able, attend_lse([reads[i] for i in able])):
                out[i] = self._tuned(reads[i], rows, lse)
        return out

    def _tuned(self, read: Read, out: Tensor, lse: Tensor) -> Tensor:
        """(out + (gamma - 1) a0 v0) / (1 + (gamma - 1) a0), where a0 is the weight that slot 0 has."""
        more, heads = self.more[read.layer], read.part.size[0]
        if read.part.heads is not None:
            more = more.view(-1, len(more) // read.span.kv.layers[read.layer].shape.heads)[read.part.heads].flatten()
        read.count(1)  # the first row once more
        extra = more * share(read, lse)  # [R, hq]
        first = read.part.between(0, 1)[1][:, 0].float()  # [h, D]
        every = first.repeat_interleave(extra.shape[1] // heads, 0)
        return ((out.float() + extra[..., None] * every) / (1 + extra)[..., None]).to(out.dtype)


def share(read: Read, lse: Tensor) -> Tensor:
    """The weight of position 0 in dense attention with this log-sum-exp, [R, hq]: 0 for who does not see it."""
    weight = (read.score(0) - lse).exp().clamp_max(1.0)
    seen = _held(read)[None] & _visible(read)  # [R | 1, 1 | h]
    heads = read.part.size[0]
    return weight * seen.expand(-1, heads).repeat_interleave(weight.shape[1] // heads, 1)


def _held(read: Read) -> Tensor:
    """Whether the first slot is that of position 0, bool [1 | h]."""
    if read.part.plain and read.part.n:
        return torch.ones(1, dtype=torch.bool, device=read.q.device)
    return read.part.positions[:, 0] == 0


def _visible(read: Read) -> Tensor:
    """Whether a row sees the first slot, bool [R | 1, 1 | h]."""
    window = read.step.model.config.attention[read.layer].window
    mask = None if window is None and read.view is None and read.span.sees is None else read.mask()
    if mask is None:
        return torch.ones(1, 1, dtype=torch.bool, device=read.q.device)
    return mask[:, :, 0].T
