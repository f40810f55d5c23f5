"""The loss of an engine that is made to write a text is the model's cross-entropy of that text."""

from __future__ import annotations

import pytest
import torch

from phasewise.bench.drive import Bench
from phasewise.bench.forced import STRETCH, Forced, forced_loss
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from tests import tiny
from tests.decode.slow import blockwise
from tests.oracle import logits


def oracle_loss(tokens: list[int]) -> float:
    scores = logits(tiny.checkpoint(), tokens).double().log_softmax(-1)
    return -float(scores[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])].mean())


@pytest.mark.parametrize("verbs", [{}, {"draft": "prompt_lookup:k=3"}, {"schedule": "sarathi:budget=8"}])
@pytest.mark.parametrize("length", [2, 40, STRETCH + 20])
def test_exact_engines_have_the_models_loss(verbs: dict[str, str], length: int) -> None:
    tokens = (tiny.prompts(9, seed=4)[0] * 20)[:length]  # repeats, so that the drafter has something to say
    forced = Forced()
    engine = Bench(tiny.model()).engine(verbs, Limits(kv_bytes=64 << 20), sample=forced)
    assert forced_loss(engine, forced, tokens) == pytest.approx(oracle_loss(tokens), abs=1e-4)
    assert not forced.scripts and not forced.nats
    if verbs.get("draft") and length > 30:
        assert engine.counters.accepted > 0


def test_a_drafters_own_questions_do_not_count() -> None:
    tokens = tiny.prompts(30, seed=5)[0]
    forced, bench = Forced(), Bench(tiny.model())
    directory = tiny.checkpoint(layers=2, seed=1)
    engine = bench.engine({"draft": f"draft_model:k=3,model={directory}"}, Limits(kv_bytes=64 << 20), sample=forced)
    assert forced_loss(engine, forced, tokens) == pytest.approx(oracle_loss(tokens), abs=1e-4)
    assert engine.counters.drafted > 0


def diffusion(knobs: str, tokens: list[int]) -> float:
    forced = Forced()
    engine = Bench(tiny.model()).engine(
        {"decode": f"block_diffusion:{knobs}"}, Limits(kv_bytes=64 << 20), sample=forced
    )
    try:
        return forced_loss(engine, forced, tokens)
    finally:
        assert not forced.scripts and not forced.nats


def test_diffusion_from_left_to_right_is_scored_by_the_passes_that_decide() -> None:
    """Against an uncached pass per token: what is known, then masks to the end of its block."""
    tokens, mask = tiny.prompts(STRETCH + 10, seed=7)[0], tiny.VOCAB - 1
    tokens = [token if token != mask else 5 for token in tokens]
    want = 0.0
    for at in range(1, len(tokens)):
        end = (at // 4 + 1) * 4
        row = blockwise(tiny.model(), tokens[:at] + [mask] * (end - at), 4)[0][at].clone()
        row[mask] = float("-inf")
        want -= float(row.double().log_softmax(-1)[tokens[at]]) / (len(tokens) - 1)
    assert diffusion("selector=sequential", tokens) == pytest.approx(want, abs=1e-4)
    assert diffusion("block=1,shift=true", tokens) == pytest.approx(oracle_loss(tokens), abs=1e-4)
    assert abs(want - oracle_loss(tokens)) > 0.01


@pytest.mark.parametrize("knobs", ["", "selector=static", "selector=sequential,steps=2", "selector=entropy"])
def test_tokens_decided_out_of_order_have_no_loss(knobs: str) -> None:
    with pytest.raises(UserError, match="left to right"):
        diffusion(knobs, tiny.prompts(40, seed=7)[0])


def test_lossy_methods_change_it() -> None:
    tokens = tiny.prompts(100, seed=6)[0]
    forced = Forced()
    engine = Bench(tiny.model()).engine(
        {"evict": "streaming:sinks=1,window=8"}, Limits(kv_bytes=64 << 20), sample=forced
    )
    assert abs(forced_loss(engine, forced, tokens) - oracle_loss(tokens)) > 0.01
