"""What drafters with trained heads that read features share: their knobs, and EAGLE-2's tree of their guesses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phasewise.errors import UserError
from phasewise.methods.draft._likeliest import LikeliestTree
from phasewise.speculation.feature_model import FeatureModel
from phasewise.speculation.features import FeatureDrafter, feature_drafter
from phasewise.speculation.heads.folder import AUTO
from phasewise.speculation.heads.layouts import feature_heads
from phasewise.speculation.one_pass import one_pass_drafter
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class FeatureTree(Method):
    """A drafter called `name` with heads of any of `kinds`, of which `heads=auto` takes the first that are there."""

    heads: str = AUTO
    depth: int = 5
    width: int = 4
    nodes: int = 8
    chunk: int = 512  # prompt tokens the heads read per step while they lag behind

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "trained"
    neutral: ClassVar[dict[str, object]] = {}

    def __post_init__(self) -> None:
        for knob in ("depth", "width", "nodes", "chunk"):
            if getattr(self, knob) < 1:
                raise UserError(f"{self.name}: {knob}={getattr(self, knob)} must be at least 1")

    @property
    def shape(self) -> LikeliestTree:
        return LikeliestTree(self.depth, self.width, self.nodes)

    @property
    def traits(self) -> Traits:
        return Traits("draft", drawn=False, max_nodes=self.shape.nodes(self.depth))

    def bind(self, host: Host) -> FeatureDrafter:
        heads, key = feature_heads(host.model, self.kinds, self.heads)
        make = one_pass_drafter if heads.parallel else feature_drafter
        return make(host, self.name, FeatureModel(heads, host.model, key), self.shape, self.chunk)
