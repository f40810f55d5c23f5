"""Steps whose tokens are all simply the most likely ones ask the model for these, and never for logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from phasewise.methods.sample.standard import Standard
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.sample import Context, Dist, Sample, distribution
from tests import seeds, tiny
from tests.sample import structured
from tests.serve.tiny_chat import chat_checkpoint

GREEDY = tiny.greedy(12)
OTHERS = {
    "sampled": Params(max_tokens=12, ignore_eos=True, temperature=0.9, seed=3),
    "repetition": Params(max_tokens=12, ignore_eos=True, repetition_penalty=1.3),
    "presence": Params(max_tokens=12, ignore_eos=True, presence_penalty=1.0),
    "frequency": Params(max_tokens=12, ignore_eos=True, frequency_penalty=0.5),
    "bias": Params(max_tokens=12, ignore_eos=True, logit_bias={9: 4.0}),
}
VERBS = [{}, {"draft": "prompt_lookup"}, {"draft": "prompt_lookup", "verify": "match"}]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often `head` and `best` were asked of any model."""
    counts: Counter[str] = Counter()
    head, best = Model.head, Model.best

    def count_head(model: Model, x: Tensor) -> Tensor:
        counts["head"] += 1
        return head(model, x)

    def count_best(model: Model, x: Tensor, masks: Sequence[Tensor | None] = ()) -> list[int]:
        before, counts["best"] = counts["head"], counts["best"] + 1
        out = best(model, x, masks)
        counts["head"] = before  # where there is no native head, `best` is made of `head`
        return out

    monkeypatch.setattr(Model, "head", count_head)
    monkeypatch.setattr(Model, "best", count_best)
    return counts


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.int8], ids=str)
def model(request: pytest.FixtureRequest) -> Model:
    if request.param == torch.int8 and native.library() is None:
        pytest.skip("no native kernels here")
    return Model.load(tiny.checkpoint(hidden=64), dtype=request.param)


@pytest.mark.parametrize("verbs", VERBS, ids=str)
def test_a_greedy_step_writes_no_logits(verbs: dict[str, str], asked: Counter[str], model: Model) -> None:
    placed = tiny.engine(verbs, of=model)
    tiny.run(placed, tiny.prompts(9, 30), GREEDY)
    assert asked["best"] > 0 and asked["head"] == 0
    assert placed.counters.head_rows >= 24


@pytest.mark.parametrize(
    ("dtype", "verbs"), seeds.params(product([torch.float32, torch.bfloat16], VERBS), 3, "greedy under a grammar")
)
def test_nor_does_one_under_a_grammar(dtype: torch.dtype, verbs: dict[str, str], asked: Counter[str]) -> None:
    """Beside one that has none; the tokens are those that are found with logits."""
    pytest.importorskip("llguidance")
    many, each = structured.prompts(9, 30, 12), [structured.asking(), structured.asking(), GREEDY]
    texts = []
    for bias in ({}, {9: 0.0}):  # a bias that changes nothing, but needs logits
        made = tiny.engine(verbs, of=Model.load(chat_checkpoint(), dtype=dtype))
        requests = tiny.run(made, many, [replace(params, logit_bias=bias) for params in each])
        texts.append(tiny.outs(requests))
        assert structured.valid(requests[:2], structured.FLAT) == 2
        assert (asked["best"] > 0 and asked["head"] == 0) == (not bias)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("verbs", VERBS, ids=str)
@pytest.mark.parametrize("how", OTHERS)
def test_others_need_them(how: str, verbs: dict[str, str], asked: Counter[str]) -> None:
    tiny.run(tiny.engine(verbs), tiny.prompts(9), OTHERS[how])
    assert asked["head"] > 0 and asked["best"] == 0


@pytest.mark.parametrize("verbs", VERBS, ids=str)
def test_mixed_batches_give_what_each_gets_alone(verbs: dict[str, str], asked: Counter[str], model: Model) -> None:
    verbs = {**verbs, "schedule": "prefill_first"}
    params = [GREEDY, OTHERS["sampled"], GREEDY, OTHERS["repetition"], OTHERS["bias"]]
    prompts = tiny.prompts(33, 5, 64, 17, 50)
    alone = [tiny.outs(tiny.run(tiny.engine(verbs, of=model), [p], q))[0] for p, q in zip(prompts, params)]
    greedy_only = Counter(asked)
    assert tiny.outs(tiny.run(tiny.engine(verbs, of=model), prompts, params)) == alone
    assert greedy_only["best"] > 0 and asked["head"] > greedy_only["head"]


class FirstToken(Sample):
    """A sample method of another kind: it says nothing about greedy tokens, so it is always asked."""

    def __call__(self, logits: Tensor, contexts: list[Context]) -> Dist:
        return Dist([0] * len(contexts), logits.shape[-1])


def test_the_same_distribution_either_way(asked: Counter[str]) -> None:
    model, contexts = tiny.model(), [Context(Request([1], Params())) for _ in range(6)]
    x = torch.randn(6, model.config.hidden)
    with torch.inference_mode():
        short = distribution(Standard(), model, x, contexts)
        long = Standard()(model.head(x), contexts)
    assert asked == {"head": 1, "best": 1}
    assert short.top == long.top and short.vocab == long.vocab and len(short) == 6
    assert all(short.greedy(i) for i in range(6))
    with torch.inference_mode():
        assert distribution(FirstToken(), model, x, contexts).top == [0] * 6
    assert asked == {"head": 2, "best": 1}
