"""Log-probabilities are the model's own, whatever drew the tokens, wherever, and whatever happened on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from phasewise import catalog
from phasewise.engine import scores
from phasewise.errors import UserError
from phasewise.model.model import Model
from phasewise.request.params import Params
from phasewise.request.request import Request
from tests import oracle, seeds, tiny
from tests.laws.engines import engines, preempt
from tests.laws.settings import options

N = 12
TOP = 3
GREEDY = Params(max_tokens=N, ignore_eos=True, logprobs=TOP)
SAMPLED = replace(GREEDY, temperature=0.8, top_p=0.95, seed=11)
LENGTHS = (41, 7, 90)


def truth(tokens: Sequence[int]) -> torch.Tensor:
    """Log-probabilities float32 [len(tokens), V] by one uncached pass: row i of the token at i + 1."""
    return oracle.logits(tiny.checkpoint(), tokens).log_softmax(-1)


def check(request: Request, positions: Sequence[int], top: int = TOP) -> None:
    """These positions, and no others, are scored, and as a plain pass of the model says."""
    assert sorted(request.scores) == list(positions)
    rows = truth(request.tokens)
    for at in positions:
        row, score = rows[at - 1], request.scores[at]
        own = row[request.tokens[at]]
        assert score.logprob == pytest.approx(float(own), abs=2e-4)
        assert 1 + int((row > own + 1e-4).sum()) <= score.rank <= int((row > own - 1e-4).sum())
        best = row.topk(top)
        assert [value for _, value in score.top] == pytest.approx(best.values.tolist(), abs=2e-4)
        assert [float(row[token]) for token, _ in score.top] == pytest.approx(best.values.tolist(), abs=2e-4)


def outputs(request: Request) -> range:
    return range(request.prompt_len, request.known)


EVERY = [(verb, name) for verb in ("draft", "verify", "schedule", "place") for name in catalog.names(verb)]


@pytest.mark.parametrize(
    ("verb", "name", "params"),
    seeds.params([(*each, (SAMPLED, GREEDY)[i % 2]) for i, each in enumerate(EVERY)], 4, "scores"), ids=str,
)  # fmt: skip
def test_they_are_the_models_own(verb: str, name: str, params: Params) -> None:
    """Accepted guesses along chains and trees included; asking for them changes no token."""
    verbs, prompts = options(verb, name), tiny.prompts(*LENGTHS)
    prompts.append(prompts[0] * 2)  # something to look up
    requests = tiny.run(tiny.engine(verbs), prompts, params)
    plain = tiny.run(tiny.engine(verbs), prompts, replace(params, logprobs=None))
    assert tiny.outs(requests) == tiny.outs(plain)
    for request in requests:
        check(request, outputs(request))
    assert all(not request.scores for request in plain)


def test_guesses_are_accepted_in_these_tests() -> None:
    """Else only plain rows would have been looked at."""
    placed = tiny.engine(options("draft", "rsd"))
    tiny.run(placed, tiny.prompts(*LENGTHS), SAMPLED)
    assert placed.counters.accepted > 0


def test_contrastive_decoding_tells_what_the_model_says() -> None:
    for request in tiny.run(tiny.engine(options("decode", "contrastive")), tiny.prompts(*LENGTHS), SAMPLED):
        check(request, outputs(request))


def test_rules_of_the_request_do_not_touch_them() -> None:
    params = replace(SAMPLED, temperature=2.0, repetition_penalty=1.5, logit_bias={5: 50.0}, top_k=2)
    (request,) = tiny.run(tiny.engine(), tiny.prompts(30), params)
    assert 5 in request.out
    check(request, outputs(request))


@pytest.mark.parametrize("verbs", [{}, options("draft", "draft_model")], ids=["plain", "drafts"])
def test_prompts(verbs: dict[str, str]) -> None:
    """In slices, beside decodes, after a prefix met before, and with nothing drawn at all."""
    placed = tiny.engine(verbs | {"schedule": "sarathi:budget=16"})
    prompts = tiny.prompts(*LENGTHS)
    for logprobs in (None, 0, TOP):
        for request in tiny.run(placed, prompts, replace(GREEDY, logprobs=logprobs, prompt_logprobs=TOP)):
            scored = range(1, request.prompt_len if logprobs is None else request.known)
            assert sorted(request.scores) == list(scored)
            request.scores = {at: score for at, score in request.scores.items() if at < request.prompt_len}
            check(request, range(1, request.prompt_len))
    for request in tiny.run(placed, prompts, Params(max_tokens=0, prompt_logprobs=TOP)):
        assert request.out == [] and request.left is not None and request.left.reason == "length"
        check(request, range(1, request.prompt_len))


@pytest.mark.parametrize("name", catalog.names("place"))
@pytest.mark.parametrize("n", [0, N])
def test_prompts_in_placements(name: str, n: int) -> None:
    placed = tiny.engine(options("place", name))
    params = Params(max_tokens=n, ignore_eos=True, logprobs=TOP, prompt_logprobs=TOP)
    for request in tiny.run(placed, tiny.prompts(*LENGTHS), params):
        check(request, range(1, request.known))


def test_what_is_scored_is_computed_and_what_lies_before_it_shared() -> None:
    placed = tiny.engine()
    (prompt,) = tiny.prompts(100)

    def serve(params: Params) -> tuple[Request, int]:
        before, request = placed.counters.prefix_hits, Request(prompt, params)
        placed.add(request)
        while request.left is None:
            placed.step()
        return request, placed.counters.prefix_hits - before

    serve(GREEDY)
    assert serve(GREEDY)[1] == 96
    request, hits = serve(Params(max_tokens=0, prompt_logprobs=TOP))
    check(request, range(1, 100))
    assert hits == 0
    request, hits = serve(Params(max_tokens=0, prompt_logprobs=TOP, scored_from=65))
    check(request, range(65, 100))
    assert hits == 64


def test_preemption_loses_none() -> None:
    prompts = tiny.prompts(41, 50, 60)
    params = replace(GREEDY, prompt_logprobs=TOP)
    for moment in (1, 3, 6):
        placed = tiny.engine({"schedule": "sarathi:budget=32"})
        requests = [Request(p, params) for p in prompts]
        for request in requests:
            placed.add(request)
        for _ in range(3):
            for _ in range(moment):
                placed.step()
            assert preempt(placed, lambda i, request: True)
        tiny.finish(placed, requests)
        for request in requests:
            check(request, range(1, request.known))


@pytest.mark.parametrize("verbs", [{}, options("place", "disaggregated")], ids=["one engine", "placed"])
def test_siblings_have_their_own_and_share_the_prompts(verbs: dict[str, str]) -> None:
    (prompt,) = tiny.prompts(41)
    placed = tiny.engine(verbs, max_running=2)  # one of them does not fork
    first = Request(prompt, replace(SAMPLED, prompt_logprobs=TOP))
    family = [first, first.sibling(1), first.sibling(2)]
    for request in family:
        placed.add(request)
    tiny.finish(placed, family)
    assert len({tuple(request.out) for request in family}) == 3
    for request in family:
        check(request, range(1, request.known))


def test_greedy_steps_write_no_logits_when_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model()
    monkeypatch.setattr(model, "head", lambda x: pytest.fail("logits were written"))
    monkeypatch.setattr(model, "best", lambda x: [7] * x.shape[0])
    tiny.run(tiny.engine(), tiny.prompts(*LENGTHS), tiny.greedy(4))


def test_a_prompts_logits_are_never_held_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "CELLS", 10 * tiny.VOCAB + 5)
    head, sizes = Model.head, list[int]()

    def counted(self: Model, x: torch.Tensor) -> torch.Tensor:
        sizes.append(x.shape[0])
        return head(self, x)

    monkeypatch.setattr(Model, "head", counted)
    placed = tiny.engine({"schedule": "prefill_first"})
    (request,) = tiny.run(placed, tiny.prompts(90), Params(max_tokens=0, prompt_logprobs=TOP))
    assert max(sizes) == 10 and sum(sizes) >= 89
    check(request, range(1, 90))


def test_who_cannot_tell_refuses() -> None:
    placed = tiny.engine(options("decode", "block_diffusion"))
    for params in (GREEDY, Params(prompt_logprobs=0)):
        with pytest.raises(UserError, match="block_diffusion does not draw one token after another"):
            placed.add(Request([3, 4], params))
    tiny.run(placed, [[3, 4]], tiny.greedy(4))


@pytest.mark.parametrize(
    ("fields", "what"),
    [({"logprobs": -1}, "logprobs=-1"), ({"prompt_logprobs": 1.5}, "prompt_logprobs=1.5 is not a whole number"),
     ({"max_tokens": 0}, "max_tokens=0 is allowed only"), ({"scored_from": 0}, "scored_from=0")],
)  # fmt: skip
def test_mistakes_are_named(fields: dict[str, Any], what: str) -> None:
    with pytest.raises(UserError, match=what):
        Params(**fields)


def test_engines_are_found() -> None:
    """`preempt` above looks for them."""
    assert engines(tiny.engine())
