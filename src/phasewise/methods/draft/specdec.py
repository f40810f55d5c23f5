"""A draft model's chain whose length is decided guess by guess, by the risk that one of them is rejected (SpecDec++,
arXiv 2405.19715); as exact as its verifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from torch import Tensor

from phasewise.errors import UserError
from phasewise.methods.decode._second import config_of
from phasewise.methods.draft._acceptance_head import AcceptanceHead, shapes
from phasewise.methods.draft._stopped import StoppedChain, StopRule, Weigh, by_state, calibrated, own, record, top
from phasewise.model.artefacts import Artefact, fingerprint
from phasewise.model.config import ModelConfig
from phasewise.speculation.tree_drafter import TreeDrafter, tree_drafter
from phasewise.step.phase import Hidden
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits

if TYPE_CHECKING:
    from phasewise.model.model import Model

NAME = "specdec"
Stop = Literal["head", "top", "token", "calibrated"]
MOST = 63  # guesses: with the pending token 64 rows


@dataclass(frozen=True)
class SpecDec(Method):
    """A chain of `least` to `most` guesses. It ends once 1 - (the product of the guesses' chances of being accepted)
    reaches `threshold`: with 0 after `least` guesses, with 1 never before `most`.

    `stop` says what those chances are. Three of them need no training and count the newest guess as well: `top`, the
    largest probability where a guess was drawn; `token`, its own; `calibrated`, how often the request's guesses of
    about that probability were accepted so far. `head` is the paper's: what a small trained network makes of the draft
    model's state behind a guess. That state is there once the next guess is made, so the newest one never counts.

    `weights` of the head: `auto` (trained for this pair of models), a file, or `random:SEED`. It has `blocks` residual
    blocks. It is trained on texts of the model (train/artefacts/draft_specdec.py), where a rejection counts more than
    an acceptance; so its chances are too low, and it needs a higher threshold than the others. A length hangs on the
    draft model alone, or on earlier passes; thus the verifier keeps its guarantee. What `calibrated` has seen of a
    request is lost in a preemption, and then drawn tokens may differ. Left out: a head that knows the request's
    temperature.
    """

    model: str = "pocket-draft"
    stop: Stop = "top"
    threshold: float = 0.4
    least: int = 1
    most: int = 16
    blocks: int = 1
    weights: str = "auto"
    chunk: int = 512  # prompt tokens the draft model computes per step while it lags behind

    paper: ClassVar[str] = "arXiv 2405.19715"
    guarantee: ClassVar[str] = "distribution"
    needs: ClassVar[str] = "second model"
    neutral: ClassVar[dict[str, object]] = {}
    tight: ClassVar[dict[str, object]] = {"stop": "head", "most": 4, "threshold": 0.6}

    def __post_init__(self) -> None:
        if self.stop not in get_args(Stop):
            raise UserError(f"specdec: stop={self.stop} must be one of {', '.join(get_args(Stop))}")
        if not 0 <= self.threshold <= 1:
            raise UserError(f"specdec: threshold={self.threshold} must be from 0 to 1")
        if not 1 <= self.least <= self.most <= MOST:
            raise UserError(f"specdec: least={self.least},most={self.most}: say 1 <= least <= most <= {MOST}")
        if self.blocks < 0:
            raise UserError(f"specdec: blocks={self.blocks} must be at least 0")
        if self.chunk < 1:
            raise UserError(f"specdec: chunk={self.chunk} must be at least 1")

    def artefact(self, config: ModelConfig, draft: ModelConfig | None = None, partner: str = "") -> Artefact:
        """The head for a model and a draft model, whose configuration is read if it is not given; `partner`: the draft
        model's fingerprint."""
        width = (draft or config_of(self.model)).hidden
        knobs: dict[str, int | float | str] = {"stop": "head", "model": self.model, "blocks": self.blocks}
        return Artefact("draft.specdec", shapes(width, self.blocks), knobs, "say stop=top", partner)

    @property
    def traits(self) -> Traits:
        return Traits("draft", max_nodes=self.most)

    @property
    def rule(self) -> StopRule:
        return StopRule(self.threshold, self.least, self.most)

    def bind(self, host: Host) -> TreeDrafter:
        made = tree_drafter(host, NAME, self.model, StoppedChain(self.rule, top), self.chunk)
        if self.stop == "calibrated":
            return CalibratedDrafter(host, made.companion, StoppedChain(self.rule, calibrated), self.chunk)
        made.shape = StoppedChain(self.rule, self._weigh(host, made.companion.model))
        return made

    def _weigh(self, host: Host, draft: Model) -> Weigh:
        if self.stop == "head":
            wanted = self.artefact(host.model.config, draft.config, fingerprint(draft))
            return by_state(AcceptanceHead(host.artefact(wanted, self.weights), draft.norm, draft.device))
        return top if self.stop == "top" else own


class CalibratedDrafter(TreeDrafter):
    """The runtime of `stop=calibrated`: it learns what became of each chain."""

    def learn(
        self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome], tops: Tensor | None = None
    ) -> None:
        for span, outcome in zip(spans, outcomes):
            if span.note is not None:
                record(span.request).judged(outcome.drafted, outcome.accepted)
