"""How each token came about: told by the engine to whoever asks, the same wherever the phases run, and free else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.llm import LLM, Output
from phasewise.request.params import Params
from phasewise.request.score import ORIGINS, Score
from tests.serve.tiny_chat import chat_checkpoint

PROMPT = "the quick brown fox jumps over the lazy dog and the quick brown"
RECIPES = {
    "guess": {"draft": "prompt_lookup:k=4,min_match=1"},
    "tree": {"draft": "token_recycling"},
    "blocks": {"decode": "block_diffusion:block=4,steps=2"},
    "shifted": {"decode": "block_diffusion:block=4,shift=true"},
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    loaded = LLM(str(chat_checkpoint()), recipes=RECIPES)
    yield loaded
    loaded.close()


def told(llm: LLM, recipe: str = "", **fields: Any) -> tuple[Output, list[str]]:
    """The output, and its tokens' origins."""
    fields = {"max_tokens": 24, "ignore_eos": True, "provenance": True, **fields}
    (out,) = llm.generate(PROMPT, recipe=recipe, **fields)
    assert out.logprobs is not None and len(out.logprobs) == len(out.tokens)
    origins = [score.origin for score in out.logprobs]
    assert set(origins) <= set(ORIGINS)
    return out, origins


def test_the_first_comes_from_the_prompt_and_the_others_from_steps(llm: LLM) -> None:
    _, origins = told(llm)
    assert origins == ["prefill"] + ["decode"] * 23


@pytest.mark.parametrize("recipe", ["guess", "tree"])
def test_accepted_guesses_are_as_many_as_the_counter_says(llm: LLM, recipe: str) -> None:
    before = llm.engine.by_recipe[recipe]["accepted"]
    out, origins = told(llm, recipe, max_tokens=48)
    accepted = llm.engine.by_recipe[recipe]["accepted"] - before
    beyond = accepted - origins.count("accepted")  # the last step may have guessed past the end
    assert origins[0] == "prefill" and origins.count("accepted") > 0 and 0 <= beyond <= 8
    assert out.tokens == told(llm, max_tokens=48)[0].tokens


def test_what_a_grammar_leaves_alone_is_forced(llm: LLM) -> None:
    before = llm.engine.counters.forced
    _, origins = told(llm, choice=["an unmistakable answer", "blue"], max_tokens=64, ignore_eos=False)
    assert 0 < origins.count("forced") <= llm.engine.counters.forced - before
    assert "accepted" not in origins


@pytest.mark.parametrize("recipe", ["blocks", "shifted"])
def test_masks_are_told_with_the_confidence_they_became_final_with(llm: LLM, recipe: str) -> None:
    out, origins = told(llm, recipe)
    assert origins.count("denoised") >= 16 and set(origins) <= {"denoised", "decode"}  # between blocks, if shifted
    assert recipe == "shifted" or set(origins) == {"denoised"}
    assert out.logprobs is not None and all(score.logprob <= 0 for score in out.logprobs)
    with pytest.raises(UserError, match="there are no log-probabilities"):
        llm.generate(PROMPT, recipe=recipe, logprobs=1)


def test_siblings_have_their_own_first_token(llm: LLM) -> None:
    first = llm.request(llm.tokenizer.encode(PROMPT), Params(max_tokens=6, temperature=1.0, provenance=True))
    both = [first, first.sibling(1)]
    for request in both:
        llm.engine.add(request)
    while not llm.engine.idle:
        llm.engine.step()
    for request in both:
        at = range(request.prompt_len, request.known)
        assert [request.scores[i].origin for i in at][:2] == ["prefill", "decode"]


def test_scores_are_the_same_with_and_without(llm: LLM) -> None:
    out, _ = told(llm, logprobs=3)
    (plain,) = llm.generate(PROMPT, max_tokens=24, ignore_eos=True, logprobs=3)
    assert out.logprobs is not None and plain.logprobs is not None
    assert [score._replace(origin="") for score in out.logprobs] == plain.logprobs


def test_nobody_else_pays(llm: LLM) -> None:
    before = llm.engine.counters.head_rows
    (plain,) = llm.generate(PROMPT, max_tokens=8, ignore_eos=True)
    assert plain.logprobs is None and llm.engine.counters.head_rows - before == 8


@pytest.mark.parametrize("verbs", [{"place": "disaggregated"}, {"place": "semi_pd"}])
def test_it_travels_with_the_request(llm: LLM, verbs: dict[str, str]) -> None:
    placed = LLM(
        str(chat_checkpoint()), limits=Limits(cluster="inline"), draft="prompt_lookup:k=4,min_match=1", **verbs
    )
    try:
        assert told(placed)[1] == told(llm, "guess")[1]
    finally:
        placed.close()


def test_a_score_survives_json() -> None:
    score = Score(-0.5, 1, ((3, -0.5),), "accepted")
    assert Score.of([-0.5, 1, [[3, -0.5]], "accepted"]) == score


def test_it_must_be_a_truth_value() -> None:
    with pytest.raises(UserError, match="provenance='yes' must be True or False"):
        Params(provenance="yes")  # type: ignore[arg-type]
