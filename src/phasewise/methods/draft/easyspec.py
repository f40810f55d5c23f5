"""A draft model whose layers do not wait for each other (EasySpec, arXiv 2502.02493), repaired after every verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phasewise.errors import UserError
from phasewise.methods.draft._chain import ChainShape
from phasewise.model.grouped import GroupedModel, grouped
from phasewise.speculation.companion import Companion
from phasewise.speculation.tree_drafter import TreeDrafter, tree_drafter
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class EasySpec(Method):
    """A chain of `k` tokens by a draft model in which the attentions of `group` layers in a row all read what the group
    is given: they could be computed side by side, and only MLPs wait for one another. The first and the last `ends`
    layers stay as they are, so a guess waits for 2 ends + ceil((layers - 2 ends) / group) attentions.

    The keys and values of such a pass are rough. With `calibrate` those of all guesses go after every verdict, and one
    exact pass over the accepted tokens and the one that followed them, which makes the next first guess as well, takes
    their place: so what is guessed hangs on the request's tokens alone. Without it accepted guesses keep their rough
    rows, errors add up, and after a preemption the guesses are others.

    It is for a deep draft model and idle devices: here attentions of a group are computed in turn, operator by
    operator, and a guess takes longer than one of `draft_model`. A draft model of two layers, as `pocket-draft` is,
    leaves nothing to group unless `ends=0`. Left out: devices of their own for the layers of a group; trees.
    """

    model: str = "pocket-draft"
    k: int = 4
    group: int = 4
    ends: int = 1
    calibrate: bool = True
    chunk: int = 512  # prompt tokens the draft model computes per step while it lags behind

    paper: ClassVar[str] = "arXiv 2502.02493"
    guarantee: ClassVar[str] = "distribution"
    needs: ClassVar[str] = "second model"
    neutral: ClassVar[dict[str, object]] = {}
    tight: ClassVar[dict[str, object]] = {"k": 3, "group": 2, "ends": 0}

    def __post_init__(self) -> None:
        for knob, least in (("k", 1), ("group", 1), ("ends", 0)):
            if getattr(self, knob) < least:
                raise UserError(f"easyspec: {knob}={getattr(self, knob)} must be at least {least}")
        if self.chunk <= self.k:
            raise UserError(
                f"easyspec: chunk={self.chunk} must be more than k={self.k}: accepted guesses are read again"
            )

    @property
    def traits(self) -> Traits:
        return Traits("draft", max_nodes=self.k)

    def bind(self, host: Host) -> TreeDrafter:
        made = tree_drafter(host, "easyspec", self.model, ChainShape(self.k, 1, "without_replacement"), self.chunk)
        exact = made.companion.model
        rough = GroupedModel(exact, grouped(exact.config.layers, self.group, self.ends))
        assert isinstance(made.companion, Companion)
        if rough.depth < exact.depth:  # else its passes are exact, and there is nothing to repair
            made.companion.rough, made.companion.calibrated = rough, self.calibrate
        return made
