"""Temperature, top-k, top-p, min-p, penalties and logit bias, as every API user knows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from phasewise.ops.sampling import penalise, shape
from phasewise.request.request import Request
from phasewise.verbs.sample import Context, Dist


@dataclass(frozen=True)
class Standard:
    """Each request's own `Params` decide: penalties, then bias, temperature, top-k, top-p, min-p; greedy at 0.

    Repetition penalty as in CTRL (arXiv 1909.05858) over prompt and output; presence and frequency over the output.
    """

    paper: ClassVar[str] = "arXiv 1909.05858"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}

    def greedy(self, contexts: Sequence[Context]) -> bool:
        """Whether every token is the one of the largest logit, so that no logits are needed."""
        return all(c.request.params.greedy and not c.request.params.penalised for c in contexts)

    def __call__(self, logits: Tensor, contexts: Sequence[Context]) -> Dist:
        for row, context in zip(logits, contexts):
            if context.request.params.penalised:
                _penalise(row, context)
        top = logits.argmax(-1).tolist()
        sampled = [i for i, context in enumerate(contexts) if not context.request.params.greedy]
        if not sampled:
            return Dist(top, logits.shape[-1])
        params = [contexts[i].request.params for i in sampled]
        rows = logits if len(sampled) == len(contexts) else logits[torch.tensor(sampled, device=logits.device)]
        probs = shape(
            rows,
            torch.tensor([p.temperature for p in params], device=logits.device),
            torch.tensor([p.top_k for p in params], device=logits.device),
            torch.tensor([p.top_p for p in params], device=logits.device),
            torch.tensor([p.min_p for p in params], device=logits.device),
        )
        return Dist(top, logits.shape[-1], sampled, probs)


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


def _penalise(row: Tensor, context: Context) -> None:
    """In place, logits [V] of one context."""
    request, params = context.request, context.request.params
    rules = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    if rules != (1.0, 0.0, 0.0):
        history = request.state.get("standard")
        if history is None:
            history = request.state["standard"] = _History(row.shape[0], row.device)
        history.roll(request)
        seen, counts = history.seen, history.counts
        if context.path:  # a draft path comes on top, for this row only
            path = torch.tensor(context.path, device=row.device)
            seen, counts = seen.clone(), counts.index_add(0, path, counts.new_ones(len(path)))
            seen[path] = True
        penalise(row, seen, counts, rules)
    for token, bias in params.logit_bias.items():
        row[token] += bias
