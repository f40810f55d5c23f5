"""Temperature, top-k, top-p, min-p, penalties and logit bias, as every API user knows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from phasewise.ops.sampling import penalise, shape
from phasewise.sampling import Context, Dist


@dataclass(frozen=True)
class Standard:
    """Each request's own `Params` decide: bias and penalties, then temperature, top-k, top-p, min-p; greedy at 0."""

    paper: ClassVar[str] = ""
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}

    def __call__(self, logits: Tensor, contexts: Sequence[Context]) -> Dist:
        for i, context in enumerate(contexts):
            params = context.request.params
            if params.penalised:
                out = [*context.request.out, *context.path]
                rules = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
                penalise(logits[i], context.request.prompt, out, rules)
                for token, bias in params.logit_bias.items():
                    logits[i, token] += bias
        top = logits.argmax(-1).tolist()
        sampled = [i for i, context in enumerate(contexts) if not context.request.params.greedy]
        if not sampled:
            return Dist(top, logits.shape[-1])
        params_of = [contexts[i].request.params for i in sampled]
        rows = logits if len(sampled) == len(contexts) else logits[torch.tensor(sampled, device=logits.device)]
        probs = shape(
            rows,
            torch.tensor([p.temperature for p in params_of], device=logits.device),
            torch.tensor([p.top_k for p in params_of], device=logits.device),
            torch.tensor([p.top_p for p in params_of], device=logits.device),
            torch.tensor([p.min_p for p in params_of], device=logits.device),
        )
        return Dist(top, logits.shape[-1], sampled, probs)
