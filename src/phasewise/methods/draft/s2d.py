"""One draft model with several exits; a guess leaves at the first one that is sure (S2D, arXiv 2407.01955)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal, get_args

from torch import Tensor

from phasewise.errors import UserError
from phasewise.methods.draft._chain import ChainShape
from phasewise.model.artefacts import Artefact
from phasewise.model.config import ModelConfig
from phasewise.model.layout import layout
from phasewise.model.lowrank import shapes
from phasewise.model.model import Model
from phasewise.model.pruned import Pruned, pruned
from phasewise.model.sliced import Sliced
from phasewise.model.tuned import Added
from phasewise.model.weights import Weights
from phasewise.speculation.nested import NestedDraft, Part
from phasewise.speculation.tree_drafter import TreeDrafter
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits

NAME = "s2d"
RANK = 64  # of what is added to each of the draft's layers
MOST = 63  # guesses: with the pending token 64 rows
Learned = Literal["sorted", "last"]


@dataclass(frozen=True)
class S2D(Method):
    """A chain of `k` guesses by the model's own first layers, low-rank weights added, with the model's norm and head.

    `exits` numbers the layers behind which a guess may leave, as in 1+2+3; the draft has as many layers as the last of
    them. A guess leaves at the first exit where the largest probability is above that exit's threshold, else at the
    last. `tau` has a threshold for each exit but the last, as in 0.6+0.4, or one for all: at 0 every guess leaves
    there, at 1 none does. At an exit that no guess leaves, nothing is computed.

    Deeper layers read all tokens before. So the rows of guesses that left early wait, and run the deeper layers
    together with the next guess that goes there. What is guessed hangs on the text alone, whenever they do.

    `learned`: `sorted` is the paper's training, in which all exits learn alike; `last` trains the last exit alone.
    `weights`: `auto` (trained for this model; beside it, or shipped), a file, `random:SEED`, or `none`: the model's
    layers as they are. Left out: the paper's trees, for which exits are decided level by level.
    """

    exits: str = "1+2+3"
    tau: str = "0.5"
    k: int = 2
    learned: Learned = "sorted"
    weights: str = "auto"
    chunk: int = 512  # prompt tokens the draft computes per step while it lags behind

    paper: ClassVar[str] = "arXiv 2407.01955"
    guarantee: ClassVar[str] = "distribution"
    needs: ClassVar[str] = "trained"
    neutral: ClassVar[dict[str, object]] = {}
    tight: ClassVar[dict[str, object]] = {"tau": "0.5+0.6", "k": 4}

    def __post_init__(self) -> None:
        self.depths  # noqa: B018 (raises for what are no exits)
        self.thresholds  # noqa: B018 (likewise)
        if self.learned not in get_args(Learned):
            raise UserError(f"s2d: learned={self.learned} must be one of {', '.join(get_args(Learned))}")
        if not 1 <= self.k <= MOST:
            raise UserError(f"s2d: k={self.k} must be from 1 to {MOST}")
        if self.chunk < 1:
            raise UserError(f"s2d: chunk={self.chunk} must be at least 1")

    @property
    def depths(self) -> tuple[int, ...]:
        """The number of layers before each exit, increasing."""
        parts = self.exits.split("+")
        if not all(part.isdecimal() for part in parts):
            raise UserError(f"s2d: exits={self.exits}: name numbers of layers joined by +, as in 1+2+3")
        found = tuple(map(int, parts))
        if found[0] < 1 or any(a >= b for a, b in pairwise(found)):
            raise UserError(f"s2d: exits={self.exits}: numbers of layers must be at least 1, and increase")
        return found

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The threshold of each exit but the last."""
        parts, wanted = str(self.tau).split("+"), len(self.depths) - 1
        try:
            found = tuple(map(float, parts))
        except ValueError:
            raise UserError(f"s2d: tau={self.tau}: name numbers from 0 to 1 joined by +, as in 0.6+0.4") from None
        if not all(0 <= tau <= 1 for tau in found):
            raise UserError(f"s2d: tau={self.tau}: each threshold must be from 0 to 1")
        if len(found) not in (1, wanted):
            raise UserError(f"s2d: tau={self.tau} has {len(found)} thresholds: exits={self.exits} needs one for all, "
                            f"or {wanted}, one for each exit but the last")  # fmt: skip
        return found * wanted if len(found) == 1 else found

    @property
    def used(self) -> list[tuple[int, float]]:
        """Layers before each exit that a guess may leave, and its threshold. At the last of them, which has 0, all that
        come there leave."""
        found = list[tuple[int, float]]()
        for depth, tau in zip(self.depths, (*self.thresholds, 0.0)):
            if tau < 1:
                found.append((depth, tau))
            if tau == 0:
                break
        return found

    def artefact(self, config: ModelConfig) -> Artefact:
        """Low-rank weights beside all linear layers of the draft. Raises UserError for a model of fewer layers."""
        depth = self.depths[-1]
        if depth > config.layers:
            raise UserError(f"s2d: exits={self.exits}, and the model has {config.layers} layers: name no more of them")
        knobs: dict[str, int | float | str] = {"exits": self.exits, "learned": self.learned}
        return Artefact("draft.s2d", shapes(config, range(depth), RANK), knobs, "say weights=none")

    @property
    def traits(self) -> Traits:
        return Traits("draft", max_nodes=self.k)

    def bind(self, host: Host) -> TreeDrafter:
        draft, start, parts = self.draft(host), 0, list[Part]()
        for number, (end, _) in enumerate(self.used):
            layers = Sliced(draft, range(start, end))
            part = host.companion(NAME if not number else f"{NAME} from layer {start + 1}", layers, Part)
            assert isinstance(part, Part)
            parts.append(part)
            start = end
        nested = NestedDraft(parts, [tau for _, tau in self.used[:-1]])
        return TreeDrafter(host, nested, ChainShape(self.k, 1, "without_replacement"), self.chunk)

    def draft(self, host: Host) -> Model:
        """The model's first layers, as many as are used, with what was learned added: a plain model."""
        model, keep = host.model, range(self.used[-1][0])
        wanted = self.artefact(model.config)
        config, tensors = pruned(model.config, keep), model.files.tensors()
        delta = dict[str, tuple[Tensor, Tensor]]()
        if self.weights != "none":
            learned = host.artefact(wanted, self.weights)
            names = shapes(config, keep, RANK)
            pairs = {name.rpartition(".")[0] for name in names}
            delta = {name: (learned[f"{name}.a"], learned[f"{name}.b"]) for name in pairs}
        added = Added(Pruned(tensors, model.config, keep), config, delta)
        return Model(config, Weights(added, layout(config), model.dtype, model.device), model.files)
