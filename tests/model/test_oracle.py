"""The independent decoder is transformers' model, and the engine's tokens are the independent decoder's."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import phasewise
from phasewise.model.model import Model
from phasewise.request.params import Params
from phasewise.request.request import Request
from tests import oracle, tiny
from tests.lazy import lazy

transformers: Any = lazy("transformers")
POCKET = Path(phasewise.__file__).parent / "pocket" / "target"
PATHS = {"llama": tiny.checkpoint(), "mixtral": tiny.checkpoint(experts=4), "pocket": POCKET}


@pytest.mark.parametrize("name", PATHS)
def test_the_oracle_is_the_model_of_transformers(name: str) -> None:
    config = json.loads((PATHS[name] / "config.json").read_text())
    assert config["num_attention_heads"] > config["num_key_value_heads"], "or heads that share keys are not told apart"
    text = tiny.prompts(33, vocab=config["vocab_size"])[0]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(PATHS[name], dtype=torch.float32).eval()
    with torch.inference_mode():
        wanted = theirs(torch.tensor([text])).logits[0]
    assert wanted.std() > 0.2
    torch.testing.assert_close(oracle.logits(PATHS[name], text), wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", PATHS)
def test_the_engines_tokens_are_the_oracles(name: str) -> None:
    """Greedy, over prompts in chunks, a hit of the prefix cache and cached decoding; log-probabilities say how sure
    each token was, so that a fault which changes no token of these is seen as well."""
    model = Model.load(PATHS[name], dtype=torch.float32)
    long, short = tiny.prompts(75, 6, vocab=model.config.vocab)
    prompts = [long, short, long[:40] + short]
    placed = tiny.engine({"schedule": "sarathi:budget=16"}, of=model)
    params = Params(max_tokens=12, ignore_eos=True, logprobs=2)
    found = [Request(prompt, params) for prompt in prompts]
    placed.add(found[0])
    while found[0].left is None:
        placed.step()
    for request in found[1:]:
        placed.add(request)
    tiny.finish(placed, found)
    assert placed.counters.prefix_hits == 32 and placed.counters.steps > 25
    for request, prompt in zip(found, prompts):
        tokens, gaps = oracle.greedy(PATHS[name], prompt, 12)
        assert min(gaps) > 1e-3, "a tie tells nothing"
        assert request.out == tokens
        rows = oracle.logits(PATHS[name], prompt + tokens).log_softmax(-1)
        for at in range(len(prompt), len(prompt) + 12):
            (_, first), (_, second) = request.scores[at].top
            assert math.isclose(first - second, gaps[at - len(prompt)], abs_tol=2e-3)
            assert math.isclose(request.scores[at].logprob, float(rows[at - 1].max()), abs_tol=2e-3)
