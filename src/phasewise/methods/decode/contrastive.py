"""Contrastive decoding: prefer what the model knows and a smaller amateur does not (arXiv 2210.15097, 2309.09117).

At `beta=0` and `alpha=0` the tokens are the model's own, sampled ones included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import ClassVar

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.request.request import Request
from phasewise.speculation.companion import Companion
from phasewise.speculation.loop import pending, slices
from phasewise.step.phase import Hidden, Phase
from phasewise.step.span import Span
from phasewise.verbs.decode import Decode, Outcome, draw_outcomes
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits

FAR = 1e5  # nats: no chance beside any other


@dataclass(frozen=True)
class Contrastive(Method):
    """One token per step from `(1 + beta) * expert - beta * amateur`, over the tokens the expert finds plausible.

    Plausible: at least `alpha` times as likely as the expert's best token. Both models read the same tokens in the same
    slices; the amateur's KV is part of the budget. Left out: the first paper's plain difference of log-probabilities
    (the limit of large beta) and prefix reuse for the amateur: after a prefix hit it reads the whole prompt in one
    pass, of which the scheduler's budget knows nothing.
    """

    amateur: str = "pocket-draft"  # a model's name or path, of the same vocabulary and with as long a context
    alpha: float = 0.1
    beta: float = 0.5
    temperature: float = 1.0  # of the amateur; above 1 flattens what is subtracted

    paper: ClassVar[str] = "arXiv 2210.15097"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "second model"
    neutral: ClassVar[dict[str, object]] = {"beta": 0.0, "alpha": 0.0}
    traits: ClassVar[Traits] = Traits("decode", plain_prompts=True, single_rows=True)

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise UserError(f"contrastive: alpha={self.alpha} must lie in [0, 1]")
        if not 0 <= self.beta < float("inf"):
            raise UserError(f"contrastive: beta={self.beta} must be a number that is not negative")
        if not 0 < self.temperature < float("inf"):
            raise UserError(f"contrastive: temperature={self.temperature} must be a positive number")

    def bind(self, host: Host) -> _Contrastive:
        amateur = host.load(self.amateur)
        if amateur.config.vocab != host.model.config.vocab:
            raise UserError(
                f"contrastive: amateur {self.amateur!r} has {amateur.config.vocab} token ids, but the model has "
                f"{host.model.config.vocab}: choose an amateur with the model's own tokenizer"
            )
        return _Contrastive(host, host.companion("contrastive", amateur), self)


class _Contrastive(Decode):
    def __init__(self, host: Host, companion: Companion, knobs: Contrastive) -> None:
        self.host, self.companion, self.knobs = host, companion, knobs

    def rows(self, request: Request) -> int:
        return pending(request)

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], phase: Phase) -> list[Span]:
        return slices(requests, budgets, phase)

    def accept(self, spans: Sequence[Span], hidden: Hidden) -> list[Outcome]:
        # a sibling about to fork reads its parent's logits: it will get the parent's followed prompt as well
        leaders = [span.request.parent or span.request for span in spans]
        followed = {leader.id: leader for leader in leaders}
        ends = {leader.id: max(1, span.end) for leader, span in zip(leaders, spans)}  # in tokens, which latents are not
        sequences = [leader.tokens[: ends[leader.id]] for leader in followed.values()]
        amateur = self.companion.advance(list(followed.values()), sequences)
        row = {leader: i for i, leader in enumerate(followed)}
        at = {id(span): row[leader.id] for leader, span in zip(leaders, spans)}

        def shape(logits: Tensor, done: list[Span]) -> Tensor:
            return contrast(logits, amateur[[at[id(span)] for span in done]], self.knobs)

        return draw_outcomes(self.host, spans, hidden, shape)


def contrast(expert: Tensor, amateur: Tensor, knobs: Contrastive) -> Tensor:
    """Logits [n, V] of the expert, raised by beta times the log-ratio; far below all others where the expert finds a
    token implausible: such tokens are said only if a sampling rule excludes all others.

    Up to a constant per row, which no distribution depends on, this is (1 + beta) * expert - beta * amateur.
    """
    ratio = expert.log_softmax(-1) - (amateur / knobs.temperature).log_softmax(-1)
    shaped = expert + knobs.beta * ratio
    if knobs.alpha == 0:
        return shaped.masked_fill(expert == float("-inf"), float("-inf"))  # not beta * inf where beta is 0
    border = expert.amax(-1, keepdim=True) + log(knobs.alpha)
    return torch.where(expert < border, shaped - FAR, shaped)
