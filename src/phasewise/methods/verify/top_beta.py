"""Accept what is nearly the best (the relaxed verification of SpecDec, arXiv 2203.16487): lossy at temperature 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from phasewise.errors import UserError
from phasewise.verbs.draft import Draft
from phasewise.verbs.method import Method
from phasewise.verbs.sample import Dist, Purpose
from phasewise.verbs.traits import Traits
from phasewise.verbs.verify import Random, Shown


@dataclass(frozen=True)
class TopBeta(Method):
    """At temperature 0 a guess that is not the likeliest token is accepted if it is one of the `beta` likeliest and its
    logit is at most `tau` below the best one; of several, the likeliest.

    Logits are the model's own, before penalties. Sampled requests are matched exactly, as `match` does: the paper
    knows greedy decoding only. With beta=1 nothing but the likeliest token is accepted.
    """

    beta: int = 5
    tau: float = 3.0

    paper: ClassVar[str] = "arXiv 2203.16487"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {"beta": 1}
    traits: ClassVar[Traits] = Traits("verify", wants=frozenset({"logits"}))
    tight: ClassVar[dict[str, object]] = {"beta": 64, "tau": 100.0}

    def __post_init__(self) -> None:
        if self.beta < 1:
            raise UserError(f"top_beta: beta={self.beta} must be at least 1")
        if not self.tau >= 0:
            raise UserError(f"top_beta: tau={self.tau} must be at least 0")

    def __call__(self, draft: Draft, p: Dist, rng: Random, shown: Shown) -> tuple[list[int], int]:
        assert shown.logits is not None
        path: list[int] = []
        while True:
            row = path[-1] + 1 if path else 0
            greedy = p.greedy(row)
            token = p.draw(row, 0.0 if greedy else rng(len(path), Purpose.SAMPLE))
            children = draft.children(row - 1)
            child = next((c for c in children if draft.tokens[c] == token), None)
            if child is None and greedy:
                child = self._near(draft, children, shown.logits[row])
            if child is None:
                return path, token
            path.append(child)

    def _near(self, draft: Draft, children: list[int], logits: Tensor) -> int | None:
        """The likeliest child that will do; tokens as likely as itself count as likelier."""
        least = float(logits.max()) - self.tau
        near: list[tuple[float, int]] = []
        for child in children:
            logit = logits[draft.tokens[child]]
            if float(logit) >= least and int((logits >= logit).sum()) <= self.beta:
                near.append((float(logit), child))
        return max(near, key=lambda one: one[0])[1] if near else None
