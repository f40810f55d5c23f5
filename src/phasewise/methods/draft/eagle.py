"""Trees of a trained block that goes on with the model's own states (EAGLE, EAGLE-2, EAGLE-3; arXiv 2401.15077)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phasewise.errors import UserError
from phasewise.methods.draft._likeliest import LikeliestTree
from phasewise.speculation.feature_model import FeatureModel
from phasewise.speculation.features import FeatureDrafter, feature_drafter
from phasewise.speculation.heads.layouts import feature_heads
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits

KINDS = ("eagle3", "eagle1")


@dataclass(frozen=True)
class Eagle(Method):
    """Guesses by EAGLE heads: one decoder block that reads the model's state at a token and the next token's embedding,
    and its own output in place of a state where the model has not been yet. EAGLE-3 heads (arXiv 2503.01840) read
    states of three layers and have an output head of their own, EAGLE-1 and 2 the last state and the model's head.

    `heads`: `auto`, which is those that lie beside the model or are shipped for it; a folder, in EAGLE's own layout or
    in that of vLLM's `speculators`; or `random:SEED`.

    The tree is EAGLE-2's (arXiv 2406.16858). A level is one pass: the `width` likeliest nodes of it are followed up,
    and each offers `width` tokens; a node is as likely as all guesses down to it together. Of all that was offered the
    `nodes` likeliest are proposed, at most `depth` in a row. `width=1` is a chain.

    Guesses are chosen, not drawn. Where a request samples, the token that the model would draw by the heads'
    probabilities takes the place of the likeliest. Left out: heads of several layers; a budget of nodes measured on
    the machine (`paced:of=(eagle)` sizes its guesses).
    """

    heads: str = "auto"
    depth: int = 5
    width: int = 4
    nodes: int = 8
    chunk: int = 512  # prompt tokens the heads read per step while they lag behind

    paper: ClassVar[str] = "arXiv 2401.15077"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "trained"
    neutral: ClassVar[dict[str, object]] = {}
    tight: ClassVar[dict[str, object]] = {"depth": 3, "width": 2, "nodes": 5}

    def __post_init__(self) -> None:
        for knob in ("depth", "width", "nodes", "chunk"):
            if getattr(self, knob) < 1:
                raise UserError(f"eagle: {knob}={getattr(self, knob)} must be at least 1")

    @property
    def shape(self) -> LikeliestTree:
        return LikeliestTree(self.depth, self.width, self.nodes)

    @property
    def traits(self) -> Traits:
        return Traits("draft", drawn=False, max_nodes=self.shape.nodes(self.depth))

    def bind(self, host: Host) -> FeatureDrafter:
        heads, key = feature_heads(host.model, KINDS, self.heads)
        return feature_drafter(host, "eagle", FeatureModel(heads, host.model, key), self.shape, self.chunk)
