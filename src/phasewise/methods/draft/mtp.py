"""A module trained to go on with the model's last state guesses ahead (MTP of DeepSeek-V3, arXiv 2412.19437)."""

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


@dataclass(frozen=True)
class MTPModule(Method):
    """A chain of `depth` guesses by one whole layer, which reads the model's last state and the next token's embedding,
    each after a norm of its own; the model's output head reads what comes out. For each further guess the same module
    goes on with its own output. With `width` > 1 the guesses are EAGLE-2's tree, as `draft.eagle` has it.

    `heads`: a folder in the layout of vLLM's `speculators` (mtp), or with the module's tensors as a checkpoint names
    them (Qwen3-Next's `mtp.*`, DeepSeek-V3's `model.layers.N.eh_proj` and so on); `auto`, such a folder beside the
    model; or `random:SEED`. The state is the one after the final norm, as vLLM hands it on. Guesses are chosen, not
    drawn. Left out: several modules, one for each further guess; modules that are mixtures of experts.
    """

    heads: str = "auto"
    depth: int = 2
    width: int = 1
    nodes: int = 8
    chunk: int = 512  # prompt tokens the module reads per step while it lags behind

    paper: ClassVar[str] = "arXiv 2412.19437"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "trained"
    neutral: ClassVar[dict[str, object]] = {}

    def __post_init__(self) -> None:
        for knob in ("depth", "width", "nodes", "chunk"):
            if getattr(self, knob) < 1:
                raise UserError(f"mtp: {knob}={getattr(self, knob)} must be at least 1")

    @property
    def shape(self) -> LikeliestTree:
        return LikeliestTree(self.depth, self.width, self.nodes)

    @property
    def traits(self) -> Traits:
        return Traits("draft", drawn=False, max_nodes=self.shape.nodes(self.depth))

    def bind(self, host: Host) -> FeatureDrafter:
        heads, key = feature_heads(host.model, ("mtp",), self.heads)
        return feature_drafter(host, "mtp", FeatureModel(heads, host.model, key), self.shape, self.chunk)
