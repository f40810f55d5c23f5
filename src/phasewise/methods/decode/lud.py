"""Lexical unit decoding: several tokens a step where the model is sure of them, without verification (LUD, arXiv
2405.15208)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from phasewise.errors import UserError
from phasewise.model.config import ModelConfig
from phasewise.request.request import Request
from phasewise.speculation.loop import pending
from phasewise.step.phase import Hidden, Phase
from phasewise.step.span import Span
from phasewise.verbs.decode import Decode, Outcome, slice_span
from phasewise.verbs.draft import headroom
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.sample import Context, draw
from phasewise.verbs.traits import Traits

NAME = "lud"
MOST = 15  # pads of a step


@dataclass(frozen=True)
class LUD(Method):
    """A step computes the tokens of the step before it, then `pads` rows of a padding token. The row of the last token
    says the next one; each pad stands for a token not known yet, and says the one after that.

    The first token is always accepted. The next pad's is accepted too while its likeliest token has a probability of
    at least `beta` and is not the same as the token before it, which keeps text from repeating itself. Nothing is
    verified: tokens differ from plain decoding's, the more so the lower `beta` is. With pads=0, and with beta above 1,
    this is plain decoding of the same model.

    Accepted tokens enter the model as themselves in the next step, and no row of a pad stays in the KV. So the KV is
    that of the text, and prefix hits, forks and preemption change nothing.

    The model must have learned what pads mean: `--model pocket-units`, or one that `phasewise train units` has made.
    Another one is hardly ever sure of what a pad says. `pad`: its token; None: the model's own mask, else the last of
    its vocabulary. Tokens are drawn one after another, each after those before it, at any temperature. Left out: pads
    behind a prompt's last slice.
    """

    pads: int = 3
    beta: float = 0.9
    pad: int | None = None

    paper: ClassVar[str] = "arXiv 2405.15208"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "trained"
    neutral: ClassVar[dict[str, object]] = {"pads": 0}
    tight: ClassVar[dict[str, object]] = {"pads": 2, "beta": 0.0}

    def __post_init__(self) -> None:
        if not 0 <= self.pads <= MOST:
            raise UserError(f"{NAME}: pads={self.pads} must be from 0 (plain decoding) to {MOST}")
        if not self.beta >= 0:
            raise UserError(f"{NAME}: beta={self.beta} must be at least 0: above 1 nothing is accepted, 0 accepts all")

    traits: ClassVar[Traits] = Traits("decode", plain_prompts=True)

    def bind(self, host: Host) -> UnitDecoder:
        pad, vocab = pad_of(host.model.config) if self.pad is None else self.pad, host.model.config.vocab
        if not 0 <= pad < vocab:
            raise UserError(f"{NAME}: pad={pad} is outside the vocabulary: it must lie in [0, {vocab})")
        return UnitDecoder(host, 0 if self.beta > 1 else self.pads, self.beta, pad)


def pad_of(config: ModelConfig) -> int:
    """The token that stands for one that is not known yet."""
    return config.vocab - 1 if config.mask is None else config.mask


class UnitDecoder(Decode):
    """LUD in one engine. A span's `note` is the number of its pads."""

    def __init__(self, host: Host, pads: int, beta: float, pad: int) -> None:
        self.host, self.pads, self.beta, self.pad = host, pads, beta, pad

    # ---- which rows
    def rows(self, request: Request) -> int:
        return pending(request) + self._behind(request)

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], phase: Phase) -> list[Span]:
        return [self._span(request, budget, phase) for request, budget in zip(requests, budgets)]

    def _behind(self, request: Request) -> int:
        """Pads behind its last known token: as many as it has room for tokens, whatever the load."""
        return 0 if request.prefilling else max(0, min(self.pads, headroom(request)))

    def _span(self, request: Request, budget: int, phase: Phase) -> Span:
        left, pads = pending(request), self._behind(request)
        if request.prefilling:
            return slice_span(request, budget, phase)
        if left > self.pads + 1:  # a replay, which may be long: the last token waits for the step that has its pads
            budget = min(budget, left - 1)
        if budget < left:
            return slice_span(request, max(1, budget), phase)
        assert request.kv is not None
        start = request.computed
        tokens = [*request.tokens[start:], *[self.pad] * pads]
        return Span(request, request.kv, phase, tokens, range(start, start + len(tokens)), note=pads)

    # ---- what becomes of them
    def accept(self, spans: Sequence[Span], hidden: Hidden) -> list[Outcome]:
        outcomes = [Outcome(span.rows - (span.note or 0), [], drafted=span.note or 0) for span in spans]
        saying = [i for i, span in enumerate(spans) if span.note is not None or span.reaches_end]
        if saying:
            self._say(saying, spans, hidden, outcomes)
        for outcome in outcomes:
            outcome.accepted = max(0, len(outcome.tokens) - 1)
        return outcomes

    def _say(
        self, saying: Sequence[int], spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome]
    ) -> None:  # fmt: skip
        """The tokens of these spans: of all their first ones, then of those whose next pad is sure, and so on."""
        firsts, wanted = dict[int, int](), list[int]()  # of each span, the row of `wanted` that says its first token
        for i in saying:
            firsts[i], last = len(wanted), spans[i].start + spans[i].rows
            wanted += range(last - 1 - outcomes[i].drafted, last)
        logits = self.host.model.head(hidden.rows(wanted))
        self.host.counters.head_rows += len(wanted)
        sure = logits.softmax(-1).amax(-1).tolist() if len(wanted) > len(saying) else []
        asked, level = list(saying), 0
        while asked:
            self._draw(asked, level, spans, outcomes, logits[[firsts[i] + level for i in asked]])
            level += 1
            asked = [
                i for i in asked
                if outcomes[i].drafted >= level == len(outcomes[i].tokens) and sure[firsts[i] + level] >= self.beta
            ]  # fmt: skip

    def _draw(
        self, asked: Sequence[int], level: int, spans: Sequence[Span], outcomes: Sequence[Outcome], logits: Tensor
    ) -> None:
        """A token of some spans, from logits [n, V], each after its own tokens so far."""
        contexts = [Context(spans[i].request, tuple(outcomes[i].tokens)) for i in asked]
        for i, token in zip(asked, draw(self.host.sample(logits, contexts), contexts)):
            before = outcomes[i].tokens
            if not level or token != before[-1]:
                before.append(token)
