"""Greedy, with a resistance that grows with the length of the repeat a token would make (Momentum Decoding, arXiv
2212.02175)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from phasewise.catalog import part
from phasewise.errors import UserError
from phasewise.methods.sample._rest import Chained
from phasewise.request.request import Request
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.sample import Context, Dist
from phasewise.verbs.traits import Traits

NAME = "momentum"
LONGEST = 5  # tokens of a repeat; longer ones count as this


@dataclass(frozen=True)
class Momentum(Method):
    """Picks of the `k` likeliest tokens the one with the largest p - alpha * f, f being how many tokens of an earlier
    text (prompt or output) end with it, the ones before it included, at most five: f = 0 for a token that is new.

    For greedy requests; sampled ones are drawn as without it. Scores take the place of the logits, so penalties and a
    bias that come after change scores. With alpha=0 it is greedy decoding. Left out: tables of f other than f(n) = n.
    """

    k: int = 5
    alpha: float = 0.2
    then: Any = part("sample", "standard")

    paper: ClassVar[str] = "arXiv 2212.02175"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {"alpha": 0.0}

    def __post_init__(self) -> None:
        if self.k < 1:
            raise UserError(f"momentum: k={self.k} must be at least 1")
        if not 0 <= self.alpha < float("inf"):
            raise UserError(f"momentum: alpha={self.alpha} must be a number that is not negative")

    @property
    def traits(self) -> Traits:
        then: Traits = self.then.traits
        return then

    def bind(self, host: Host) -> MomentumSampler:
        return MomentumSampler(host, self)


class Grams:
    """The runs of up to LONGEST tokens that a request's text has; rolled forward, never counted anew."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, ...]] = set()
        self.upto = 0

    def roll(self, tokens: Sequence[int]) -> None:
        for end in range(self.upto + 1, len(tokens) + 1):
            self.seen.update(endings(tokens, end))
        self.upto = len(tokens)

    def repeats(self, text: Sequence[int], path: Sequence[int], token: int) -> int:
        """The longest run in `text` (this request's) and `path` that `token`, put behind both, would say again."""
        tail = [*text[-LONGEST:], *path]
        own = {run for end in range(len(tail) - len(path) + 1, len(tail) + 1) for run in endings(tail, end)}
        runs = endings([*tail, token], len(tail) + 1)
        return max((len(run) for run in runs if run in self.seen or run in own), default=0)


def endings(tokens: Sequence[int], end: int) -> list[tuple[int, ...]]:
    """The runs of up to LONGEST tokens that end before position `end`."""
    return [tuple(tokens[end - n : end]) for n in range(1, min(LONGEST, end) + 1)]


class MomentumSampler(Chained):
    """Scores in place of the logits of greedy requests; the chain goes on with them."""

    def __init__(self, host: Host, knobs: Momentum) -> None:
        super().__init__(host, knobs.then)
        self.k, self.alpha = knobs.k, knobs.alpha

    def greedy(self, contexts: Sequence[Context]) -> bool:
        return self.alpha == 0 and self.then.greedy(contexts)

    def __call__(self, logits: Tensor, contexts: Sequence[Context]) -> Dist:
        chosen = [row for row, context in enumerate(contexts) if context.request.params.greedy]
        if self.alpha and chosen:
            self.then.exclude(logits, contexts)
            self._score(logits, chosen, contexts)
        return self.then(logits, contexts)

    def _score(self, logits: Tensor, chosen: Sequence[int], contexts: Sequence[Context]) -> None:
        """Scores in place of the logits [n, V] of some rows."""
        probs = logits[chosen].softmax(-1)
        best, tokens = probs.topk(min(self.k, probs.shape[-1]), -1)
        again = torch.tensor(
            [[self._repeats(contexts[row], token) for token in some] for row, some in zip(chosen, tokens.tolist())],
            device=logits.device,
        )
        scores = (best - self.alpha * again).masked_fill(best == 0, float("-inf"))
        logits[chosen] = torch.full_like(probs, float("-inf")).scatter(-1, tokens, scores)

    def _repeats(self, context: Context, token: int) -> int:
        return grams(context.request).repeats(context.request.tokens, context.path, token)


def grams(request: Request) -> Grams:
    """The n-grams of a request up to now."""
    held: Grams | None = request.state.get(NAME)
    if held is None:
        held = request.state[NAME] = Grams()
    held.roll(request.tokens)
    return held
