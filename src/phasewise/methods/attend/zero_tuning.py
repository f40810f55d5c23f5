"""The first token's attention weight is scaled in chosen heads, in prompts and answers alike (arXiv 2505.11739).

Promises dense attention with the weight a0 of position 0 made gamma a0 and all weights of the row divided by their new
sum, and changes nothing else: ratios among other tokens stay. It aims at better answers, not at fewer bytes. Where no
kernel adds ln gamma to the score of that token, it costs a dot product per row and head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.methods.attend.dense import Dense
from phasewise.model.artefacts import Artefact
from phasewise.model.config import ModelConfig
from phasewise.step.plan import AttentionPlan
from phasewise.step.span import Span
from phasewise.verbs.attend import Attend
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits

MOST = 1e6  # of a factor, either way: float32 holds what comes of it


@dataclass(frozen=True)
class ZeroTuning(Method):
    """With `weights` auto, a file or `random:SEED`, heads and factor are those that were chosen for the model on a
    validation part (train/artefacts/attend_zero_tuning.py); `gamma` above 0 takes the place of the chosen factor in
    these heads. `weights=none`: all heads, by `gamma`. Above 1 a head looks more at the first token and less at
    everything else; 1 is dense attention.

    The first token is the one at position 0 of the request, wherever it lies; heads that have given it up, and rows
    that do not see it, are left as they are. What there is to scale depends on the model (scripts/first_token.py, on
    held-out source): position 0 draws a third of the attention in most layers of SmolLM2, 0.54 in layer 25 of 30, even
    without a BOS token. In the pocket model it draws 0.17 in the head that gives most and 0.07 in layer 4 of 8 where a
    text begins with its BOS token (`--bos`), as those it was trained on do; 0.002 at most where it does not. gamma=4
    in the heads that it helps lowers the loss of the validation part by 0.0007 nats of 2.9437 there, nothing, and by
    0.108 of 2.532 on SmolLM2; of new replies by 0.32, while source loses (`phasewise reproduce zero_tuning`).
    What was chosen for these two models ships with them.

    In bfloat16 steps are whole: kernels add ln gamma to the scores of that token on their way (the plan's `bias`), and
    read what dense attention reads. Where an evict method acts, or heads keep unequally many rows, steps go in
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

    @property
    def traits(self) -> Traits:
        return Traits("attend", own_attention=self.gamma != 1)

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


class Tuned(Attend):
    """Attention with `lift` [layers, Hq], ln gamma of every head."""

    def __init__(self, lift: Tensor) -> None:
        self.lift = lift.float()
        self._plan = AttentionPlan(bias=self.lift)

    def plan(self, span: Span) -> AttentionPlan:
        return self._plan
