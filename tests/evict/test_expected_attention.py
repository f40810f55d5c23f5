"""evict.expected_attention: scores are the mean of exp(q . k) over queries to come, and the best rows stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phasewise.engine.engine import Engine
from phasewise.errors import UserError
from phasewise.request.request import Request
from tests import tiny

KEEP, SAMPLE, SINKS, PROMPT = 12, 8, 2, 40
SPELLED = f"expected_attention:keep={KEEP},sample={SAMPLE},future=16,sinks={SINKS}"


def engine(evict: str = SPELLED, **verbs: str) -> Engine:
    placed = tiny.engine({"evict": evict, **verbs})
    assert isinstance(placed, Engine)
    return placed


def runtime(placed: Engine) -> object:
    found = [phase.evict for phase in placed.parts.phases if phase.evict is not None]
    return found[0]


def test_the_score_is_the_mean_of_exponentials_over_gaussian_queries_rotated_ahead() -> None:
    """By Monte Carlo: many queries of the sample's mean and covariance, turned by the mean rotation of 16 positions."""
    placed, gen = engine(), torch.Generator().manual_seed(3)
    evict, config, end = runtime(placed), placed.model.config, 50
    heads, dim = config.kv_heads, config.head_dim
    queries = 0.5 * torch.randn(64, config.heads, dim, generator=gen)
    keys, values = (torch.randn(heads, 20, dim, generator=gen) for _ in range(2))
    found = evict.scores(1, queries, (keys, values), end)  # type: ignore[attr-defined]
    for head in range(config.heads):
        own = queries[:, head]
        centred = own - own.mean(0)
        root = torch.linalg.cholesky((centred.T @ centred / len(own)).double() + 1e-9 * torch.eye(dim))
        drawn = own.mean(0).double() + torch.randn(80_000, dim, generator=gen).double() @ root.T
        turned = sum(placed.model.rotate(1, drawn.float(), end + j).double() for j in range(16)) / 16
        scale = config.attention[1].scale
        shares = (scale * turned @ keys[head // (config.heads // heads)].double().T).exp().mean(0)
        if head % (config.heads // heads) == 0:
            total = torch.zeros_like(shares)
        total += shares / shares.sum() / (config.heads // heads)
        if head % (config.heads // heads) == config.heads // heads - 1:
            group = head // (config.heads // heads)
            want = total * values[group].double().norm(dim=-1)
            torch.testing.assert_close(found[group].double(), want, rtol=0.03, atol=1e-4)


def held(placed: Engine, prompt: list[int]) -> list[Tensor]:
    """The positions that each layer holds once the prompt is complete, [H, KEEP]."""
    request = Request(prompt, tiny.greedy(3))
    placed.add(request)
    while request.known < len(prompt) + 2:
        placed.step()
    assert request.kv is not None and not request.state.get("expected_attention")
    kept = [layer.read()[0].positions for layer in request.kv.layers]
    tiny.finish(placed, [request])
    return [each[:, each[0] < len(prompt)] if each.shape[0] == 1 else each[:, :KEEP] for each in kept]


def test_exactly_the_budget_stays_with_the_sinks_and_chunks_choose_the_same() -> None:
    (prompt,) = tiny.prompts(PROMPT)
    whole = held(engine(schedule="prefill_first"), prompt)
    for layer, positions in enumerate(whole):
        assert positions.shape[1] == KEEP and bool((positions[:, :SINKS] == torch.arange(SINKS)).all())
        assert bool((positions.diff(dim=1) > 0).all()), f"layer {layer}"
    assert len({tuple(positions.flatten().tolist()) for positions in whole}) > 1  # layers choose for themselves
    for budget in (5, 13):
        chunked = held(engine(schedule=f"sarathi:budget={budget}"), prompt)
        assert all(torch.equal(a, b) for a, b in zip(whole, chunked))


@pytest.mark.parametrize("knobs", ["keep=0", "keep=1.5", "sample=0", "future=0", "sinks=-1", "heads=both"])
def test_wrong_knobs_are_refused_by_name(knobs: str) -> None:
    with pytest.raises(UserError, match=knobs.partition("=")[0]):
        engine(f"expected_attention:{knobs}")
