"""The slow, obvious reference: recompute the whole sequence for every token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phasewise.engine.assembly import kv_shapes
from phasewise.kv.buffer import Ledger, Raw
from phasewise.kv.store import Store
from phasewise.methods.attend.dense import Dense
from phasewise.model.model import Model
from phasewise.request.counters import Counters
from phasewise.request.request import Request
from phasewise.step.forward import forward
from phasewise.step.phase import Phase
from phasewise.step.span import Span

PLAIN = Phase("plain", decode=None, attend=Dense())  # type: ignore[arg-type]


@torch.inference_mode()
def logits(model: Model, tokens: Sequence[int]) -> torch.Tensor:
    """Logits float32 [len(tokens), V] of one uncached causal pass."""
    store = Store(kv_shapes(model), Raw(), ledger=Ledger(1 << 40), counters=Counters())
    request = Request(tokens)
    kv = store.open(request, len(tokens))
    hidden = forward(model, [Span(request, kv, PLAIN, list(tokens), range(len(tokens)))], Counters())
    kv.close()
    return model.head(hidden.x)


def greedy(model: Model, prompt: Sequence[int], n: int) -> tuple[list[int], list[float]]:
    """`n` greedy tokens by full recomputation, and the gap between the two best logits at each."""
    tokens, gaps = list(prompt), []
    for _ in range(n):
        best = logits(model, tokens)[-1].topk(2)
        tokens.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
    return tokens[len(prompt) :], gaps
