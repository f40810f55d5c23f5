"""Temperature, top-k, top-p, min-p, penalties and logit bias, as every API user knows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, get_args

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.methods.sample._rules import NEVER, exclude
from phasewise.ops.sampling import largest, penalise, shape
from phasewise.request.request import Request
from phasewise.verbs.method import Method
from phasewise.verbs.sample import NOTHING, Context, Coupling, Dist, Sample
from phasewise.verbs.traits import Traits

CELLS = 1 << 16  # logits that are penalised at once: more would leave the processor's cache


@dataclass(frozen=True)
class Standard(Method, Sample):
    """Each request's own `Params` decide: penalties, then bias, then what must not be said at all (all but some tokens,
    ends too early, bad words), temperature, top-k, top-p, min-p; greedy at 0.

    Repetition penalty as in CTRL (arXiv 1909.05858) over prompt and output; presence and frequency over the output.

    `coupling` says how a random number becomes a token: by the cumulated probabilities (inverse), or as the largest
    of log-probabilities plus noise of the token's own (gumbel, arXiv 2408.07978). Either follows the distribution. A
    draft model and its target that share the number agree more often with gumbel, so that `--verify match` and `--draft
    pearl` accept more sampled guesses; a draw takes about four times as long (0.15 ms of 49,152 tokens), so it is no
    default. The two say different texts for the same seed.
    """

    coupling: Coupling = "inverse"

    paper: ClassVar[str] = "arXiv 1909.05858"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}
    traits: ClassVar[Traits] = Traits("sample")

    def __post_init__(self) -> None:
        if self.coupling not in get_args(Coupling):
            raise UserError(f"standard: coupling={self.coupling} must be inverse or gumbel")

    def greedy(self, contexts: Sequence[Context]) -> bool:
        """True if every token is the one of the largest logit, so that no logits are needed."""
        return all(c.request.params.greedy and not c.request.params.penalised for c in contexts)

    def exclude(self, logits: Tensor, contexts: Sequence[Context]) -> None:
        exclude(logits, [i for i, context in enumerate(contexts) if context.request.params.ruled], contexts)

    def __call__(self, logits: Tensor, contexts: Sequence[Context]) -> Dist:
        changed = [i for i, context in enumerate(contexts) if context.request.params.penalised]
        together = max(1, CELLS // logits.shape[-1])
        for start in range(0, len(changed), together):
            _change(logits, changed[start : start + together], contexts)
        top = largest(logits)
        for i in changed:
            if not float(logits[i, top[i]]) > NEVER:  # nor is what was made of -inf alone
                top[i] = NOTHING
        sampled = [i for i, context in enumerate(contexts) if top[i] != NOTHING and not context.request.params.greedy]
        if not sampled:
            return Dist(top, logits.shape[-1], coupling=self.coupling)
        params = [contexts[i].request.params for i in sampled]
        rows = logits if len(sampled) == len(contexts) else logits[torch.tensor(sampled, device=logits.device)]
        probs = shape(
            rows,
            torch.tensor([p.temperature for p in params], device=logits.device),
            torch.tensor([p.top_k for p in params], device=logits.device),
            torch.tensor([p.top_p for p in params], device=logits.device),
            torch.tensor([p.min_p for p in params], device=logits.device),
        )
        return Dist(top, logits.shape[-1], sampled, probs, self.coupling)


class _History:
    """Which tokens a request has seen and how often it has put them out; rolled forward, never counted anew."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.seen = torch.zeros(vocab, dtype=torch.bool, device=device)
        self.counts = torch.zeros(vocab, device=device)
        self.upto = 0

    def roll(self, request: Request) -> None:
        while self.upto < request.known:
            end = request.prompt_len if self.upto < request.prompt_len else request.known
            tokens = torch.tensor(request.tokens[self.upto : end], device=self.seen.device)
            self.seen[tokens] = True
            if self.upto >= request.prompt_len:
                self.counts.index_add_(0, tokens, self.counts.new_ones(len(tokens)))
            self.upto = end


def _change(logits: Tensor, which: Sequence[int], contexts: Sequence[Context]) -> None:
    """Penalties, bias and what is forbidden, in place, for these rows of logits [n, V]."""
    rows = []
    for i in which:
        params = contexts[i].request.params
        if (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0):
            rows.append(i)
    if rows:
        _penalise(logits, rows, contexts)
    for i in which:
        for token, bias in contexts[i].request.params.logit_bias.items():
            logits[i, token] += bias
    exclude(logits, [i for i in which if contexts[i].request.params.ruled], contexts)


def _penalise(logits: Tensor, rows: Sequence[int], contexts: Sequence[Context]) -> None:
    histories = [_history(contexts[i].request, logits) for i in rows]
    seen = torch.stack([history.seen for history in histories])
    counts = torch.stack([history.counts for history in histories])
    paths = [(at, token) for at, i in enumerate(rows) for token in contexts[i].path]
    if paths:  # draft paths come on top, for their rows only
        at, tokens = torch.tensor(paths, device=logits.device).unbind(1)
        seen[at, tokens] = True
        counts.index_put_((at, tokens), counts.new_ones(len(paths)), accumulate=True)
    each = [contexts[i].request.params for i in rows]
    rules = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in each]
    index = torch.tensor(rows, device=logits.device)
    logits[index] = penalise(logits[index], seen, counts, torch.tensor(rules, device=logits.device))


def _history(request: Request, logits: Tensor) -> _History:
    """The tokens that a request has seen up to now."""
    history: _History | None = request.state.get("standard")
    if history is None:
        history = request.state["standard"] = _History(logits.shape[-1], logits.device)
    history.roll(request)
    return history
