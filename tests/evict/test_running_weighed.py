"""Evictors with running scores whose token was a native step: what they make of its weights, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from phasewise.methods.evict.h2o import H2O
from phasewise.methods.evict.tova import Tova
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.step.span import Span
from tests import tiny
from tests.evict.running import bound

GONE = float("-inf")
PROMPT, ROWS, RECENT = 20, 7, 2


def by_hand(scores: list[float], recent: int) -> list[float]:
    """The lowest of the older ones leave until no more than ROWS are left; of equal ones the later."""
    scores = list(scores)
    while sum(score > GONE for score in scores) > ROWS:
        older = [at for at in range(len(scores) - recent) if scores[at] > GONE]
        if not older:
            break
        scores[min(older, key=lambda at: (scores[at], -at))] = GONE
    return scores


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("method", "recent"), [(H2O(heavy=ROWS - RECENT, recent=RECENT), RECENT), (Tova(ROWS), 0)])
def test_scores_after_a_token_are_those_by_hand(method: Any, recent: int, seed: int) -> None:
    """Few, enough and too many rows are left, with scores that are often equal."""
    torch.manual_seed(seed)
    model, runtime = tiny.model(), bound(method)
    config, n, together = model.config, PROMPT - 4, isinstance(method, Tova)
    request = Request(list(range(3, 3 + PROMPT)), Params(max_tokens=30))
    request.computed = PROMPT
    heads = 1 if together else config.kv_heads
    state = torch.randint(0, 4, (config.layers, heads, n)) / 4
    for own in state.view(-1, n):
        own[torch.randperm(n)[: int(torch.randint(n - ROWS - 2, n - ROWS + 2, ()))]] = GONE
    request.state[runtime.trail.name] = dict(enumerate(state.clone()))
    span = cast(Span, SimpleNamespace(request=request, trail=None, positions=range(PROMPT, PROMPT + 1)))
    gone, done = runtime.weighs(span)
    assert torch.equal(gone, state == GONE)
    weights = torch.randint(0, 4, (config.layers, config.kv_heads, n + 1)) / 4
    done(weights)
    runtime.stayed(span, 1)
    counts = set()
    for layer in range(config.layers):
        after = request.state[runtime.trail.name][layer].tolist()
        for head in range(heads):
            got = weights[layer].sum(0) / config.heads if together else weights[layer, head]
            before = [*state[layer, head].tolist(), 0.0]
            scores = [w if together else s + w for s, w in zip(before, got.tolist(), strict=True)]
            scores = [GONE if s == GONE else w for s, w in zip(before, scores, strict=True)]
            assert after[head] == by_hand(scores, recent)
            counts.add(sum(score > GONE for score in before) - ROWS)
    assert max(counts) > 0, "a row has to leave"
