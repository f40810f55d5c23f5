"""Let the drafter have a say (the knowledge transfer of RAPID, arXiv 2502.20330): lossy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.methods.verify.rejection import Rejection
from phasewise.verbs.draft import Draft
from phasewise.verbs.method import Method
from phasewise.verbs.sample import Dist, Purpose
from phasewise.verbs.traits import Traits
from phasewise.verbs.verify import Random, Shown

REJECTION = Rejection()


@dataclass(frozen=True)
class TransferVerifier(Method):
    """The target's logits move by eta * (q - p) for tokens with at least `share` times the chance of the drafter's
    best: made for `--draft rapid`, whose drafter has read what matters. With eta=0 it is `rejection`.

    Sampled requests: a guess is accepted with min(1, p'/q), p' being the distribution that has moved. law=paper: after
    a refusal comes a token from the normalised (max(p - q, p - p'))+, so what is said follows neither p nor p';
    law=moved: from (p' - q)+, and what is said follows p' exactly. Further siblings are judged as `rejection` does.
    What no guess was made for comes from p. p and q are those of the request's own rules, so that nothing is said
    which these exclude.

    Greedy requests: a guess is accepted if it is the model's choice, or has the largest of the logits that have moved,
    unless rules of the request (penalties, a grammar) decide the choice. Guesses that no model made are matched.
    """

    eta: float = 10.0
    share: float = 0.1
    law: Literal["paper", "moved"] = "paper"

    paper: ClassVar[str] = "arXiv 2502.20330"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {"eta": 0.0}
    traits: ClassVar[Traits] = Traits("verify", wants=frozenset({"logits", "thoughts"}))
    tight: ClassVar[dict[str, object]] = {"eta": 40.0}

    def __post_init__(self) -> None:
        if not 0 <= self.eta < float("inf"):
            raise UserError(f"transfer: eta={self.eta} must be a number that is not negative")
        if not 0 < self.share <= 1:
            raise UserError(f"transfer: share={self.share} must be above 0 and at most 1")
        if self.law not in ("paper", "moved"):
            raise UserError(f"transfer: law={self.law} must be paper or moved")

    def __call__(self, draft: Draft, p: Dist, rng: Random, shown: Shown) -> tuple[list[int], int]:
        if self.eta == 0:
            return REJECTION(draft, p, rng)
        assert shown.logits is not None
        path: list[int] = []
        while True:
            node = path[-1] if path else -1
            children = draft.children(node)
            if p.greedy(node + 1):
                token = self._choice(draft, node, children, p.top[node + 1], shown.logits[node + 1])
            else:
                token = self._drawn(draft, node, children, p, rng, len(path))
            child = next((child for child in children if draft.tokens[child] == token), None)
            if child is None:
                return path, token
            path.append(child)

    def _choice(self, draft: Draft, node: int, children: list[int], own: int, logits: Tensor) -> int:
        """The next token of a greedy request: the model's `own` choice, or another guess."""
        q, guesses = _thought(draft, node), [draft.tokens[child] for child in children]
        if q is None or not guesses or own in guesses or own != int(logits.argmax()):
            return own
        best = int(moved(logits, logits.softmax(-1), q, self.eta, self.share).argmax())
        return best if best in guesses else own

    def _drawn(self, draft: Draft, node: int, children: list[int], dist: Dist, rng: Random, depth: int) -> int:
        """The next token of a sampled request."""
        p = dist.row(node + 1)
        guesses = [
            child for child in children if draft.q is not None and float(draft.q[child, draft.tokens[child]]) > 0
        ]
        if not guesses:
            return dist.pick(p, rng(depth, Purpose.SAMPLE))
        assert draft.q is not None
        thought = _thought(draft, node)
        known = draft.q[guesses[0]] if thought is None else thought
        left = shifted = moved(p.log(), p, known, self.eta, self.share).softmax(-1)
        for i, child in enumerate(guesses):
            token, q = draft.tokens[child], draft.q[child]
            if rng(depth, Purpose.ACCEPT, children.index(child)) * float(q[token]) < float(left[token]):
                return token
            if i == 0 and self.law == "paper":
                left = _rest(torch.maximum(p - q, p - shifted), p)
            else:
                left = _rest(left - q, left)
        return dist.pick(left, rng(depth, Purpose.RESIDUAL))


def moved(logits: Tensor, p: Tensor, q: Tensor, eta: float, share: float) -> Tensor:
    """Logits [V] after the transfer, p being their softmax; those of tokens that the drafter thinks little of stay."""
    return torch.where(q >= share * q.max(), logits + eta * (q - p), logits)


def _rest(excess: Tensor, otherwise: Tensor) -> Tensor:
    """The positive part, normalised; if rounding has left nothing, the distribution it came from."""
    rest = excess.clamp(min=0.0)
    total = rest.sum()
    return rest / total if float(total) > 0.0 else otherwise


def _thought(draft: Draft, node: int) -> Tensor | None:
    return None if draft.thoughts is None else draft.thoughts.get(draft.path(node))
