"""Controls for RLKV: as many KV heads are cut, but the wrong ones, or any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from phasewise.methods.evict.rlkv import RLKV, CutHeads
from phasewise.reproduce.controls import Control, drawn
from phasewise.step.plan import Window
from phasewise.verbs.host import Host
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class OtherHeads(Control):
    """evict: RLKV with its gates reversed, so that the heads that matter most are cut, or with random ones."""

    of: RLKV
    gates: Literal["reversed", "random"] = "reversed"
    seed: int = 0

    @property
    def traits(self) -> Traits:
        return self.of.traits

    def bind(self, host: Host) -> CutHeads | None:
        config = host.model.config
        if self.gates == "random":
            gates = torch.rand(config.layers, config.kv_heads, generator=drawn("heads", self.seed))
        else:
            gates = -host.artefact(self.of.artefact(config), self.of.weights)["gates"]
        cut = self.of.cut(gates).to(host.model.device)
        return CutHeads(cut, Window(self.of.sinks, self.of.window)) if bool(cut.any()) else None
